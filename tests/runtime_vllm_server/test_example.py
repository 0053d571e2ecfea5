"""The example runs with one command: it serves the adapters that it trained, and leaves no file or process."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM, in a separate environment")


def test_the_example_prints_the_answer_of_every_adapter_and_leaves_nothing(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("x")  # short, since the server makes sockets in it
    places = {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "vllm" / "serve.py"],
        env=os.environ | places,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = (ROOT / "docs" / "how-to" / "serve-with-vllm.md").read_text(encoding="utf-8")
    shown = page.split("```text\n")[1].split("```")[0]
    assert done.stdout.endswith(shown)
    assert not list(folder.glob("scute-vllm-*"))
    running = [process for process in Path("/proc").glob("[0-9]*/cmdline") if str(folder).encode() in _read(process)]
    assert not running


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # the process has ended
        return b""

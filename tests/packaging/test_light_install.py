"""The default install: planning works without torch, transformers and PEFT, and the rest names the extra to install."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.commands import compiled

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "peft", "triton")

pytestmark = pytest.mark.skipif(
    os.environ.get("SCUTE_TEST_LIGHT") != "1", reason="makes a virtual environment; set SCUTE_TEST_LIGHT=1 to run it"
)


@pytest.fixture(scope="module")
def light_scute(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the `scute` command of a new virtual environment with the default install."""
    folder = tmp_path_factory.mktemp("light") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", str(ROOT)], check=True, cwd=folder)
    return folder / "bin" / "scute"


def _run(command: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    strings = [str(argument) for argument in arguments]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run([command, *strings], capture_output=True, text=True, check=False, env=clean, cwd="/")


def test_the_default_install_has_nothing_heavy(light_scute: Path) -> None:
    program = f"from importlib.util import find_spec; print([name for name in {HEAVY!r} if find_spec(name)])"
    done = _run(light_scute.with_name("python"), "-c", program)
    assert done.stdout == "[]\n", done.stderr


def test_the_cost_of_a_step_is_predicted_without_torch(light_scute: Path) -> None:
    done = _run(light_scute, "cost", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["command"] == "cost"


@pytest.mark.parametrize("recipe", ["lora", "dora", "ia3", "vera", "oft", "adalora"])
def test_check_inspect_and_explain_work_without_torch(
    light_scute: Path, recipe: str, base_folder: Callable[[str], Path], adapter_folder: Callable[[str, str], Path]
) -> None:
    adapter, base = adapter_folder(recipe, "llama"), base_folder("llama")
    done = _run(light_scute, "check", adapter, "--base", base, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["adapters"][0]["outcome"] in {"exact", "noted"}
    for command in ("inspect", "explain-folds"):
        shown = _run(light_scute, command, adapter, "--base", base, "--json")
        assert shown.returncode == 0, shown.stderr
        assert json.loads(shown.stdout)["command"] == command


def test_the_default_install_knows_how_ranks_divide_a_model(
    light_scute: Path, base_folder: Callable[[str], Path], adapter_folder: Callable[[str, str], Path]
) -> None:
    """`check` must not refuse an adapter that the full install compiles."""
    done = _run(light_scute, "check", adapter_folder("dora", "llama"), "--base", base_folder("llama"), "--tp", 2)
    assert done.returncode == 0, done.stderr


def test_a_broken_adapter_is_refused_without_torch(
    light_scute: Path, tmp_path: Path, base_folder: Callable[[str], Path]
) -> None:
    done = _run(light_scute, "check", tmp_path, "--base", base_folder("llama"))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["compile", "verify"])
def test_what_needs_torch_names_the_extra(
    light_scute: Path,
    command: str,
    tmp_path: Path,
    base_folder: Callable[[str], Path],
    adapter_folder: Callable[[str, str], Path],
) -> None:
    adapter, base = adapter_folder("lora", "llama"), base_folder("llama")
    if command == "compile":
        asked: tuple[object, ...] = (adapter, "-o", tmp_path / "store")
    else:
        asked = (compiled(adapter, base, tmp_path / "made-with-torch"), "--adapter", adapter)
    done = _run(light_scute, command, *asked, "--base", base)
    assert done.returncode in {1, 2}
    assert "SC701" in done.stderr
    assert "pip install 'scute-compile[compile]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "store").exists()

"""Collects what the environment can import, and prepares a folder for the examples of the public API."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

collect_ignore_glob = [] if find_spec("vllm") else ["scute_compile/runtime_vllm/*", "tests/runtime_vllm*"]
"""The plugin's modules and tests, where vLLM is not installed."""


@pytest.fixture(scope="session")
def example_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `base`, `adapters` (dora and vera), and `store` with their artifacts for two ranks."""
    import scute_compile as scute
    from scute_compile.cli.demo.models import write_adapter, write_base

    folder = tmp_path_factory.mktemp("example")
    write_base(folder / "base")
    for name in ("dora", "vera"):
        write_adapter(name, folder / "base", folder / "adapters" / name)
    scute.compile((folder / "adapters").iterdir(), target=scute.Target(tp=2), store=folder / "store")
    return folder


@pytest.fixture(autouse=True)
def _in_example_folder(request: pytest.FixtureRequest) -> None:
    """Run the examples in the public API's docstrings in a copy of the example folder."""
    if isinstance(request.node, pytest.DoctestItem) and request.node.dtest.globs["__name__"] == "scute_compile":
        folder: Path = request.getfixturevalue("tmp_path") / "example"
        shutil.copytree(request.getfixturevalue("example_folder"), folder)
        monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
        monkeypatch.chdir(folder)

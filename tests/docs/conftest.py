"""The example that pages start from."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest


@pytest.fixture
def example(shared_folder: Path, tmp_path: Path) -> Path:
    """Return a folder in which `scute demo -o example` was run."""
    from scute_compile.cli.demo.report import demo
    from tests.support.bases import made_once

    def write(folder: Path) -> None:
        folder.mkdir()
        with contextlib.chdir(folder):  # adapters name their base by the path that they are given
            demo(Path("example"), quiet=True)

    made_once(shared_folder / "documentation", write)
    shutil.copytree(shared_folder / "documentation", tmp_path, dirs_exist_ok=True)
    return tmp_path

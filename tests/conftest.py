"""Folders that all tests of one session share; workers of a parallel run share them too."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

# Read when `huggingface_hub` is imported, which the modules below do: so they are imported inside the fixtures.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# Read when Triton is imported, which torch does. Where a GPU or an engine compiles kernels, it stays unset.
if find_spec("vllm") is None and not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that all tests and workers of this session share."""
    folder = tmp_path_factory.getbasetemp()
    parallel = "PYTEST_XDIST_WORKER" in os.environ
    return (folder.parent if parallel else folder) / "shared"


@pytest.fixture(scope="session")
def base_folder(shared_folder: Path) -> Callable[[str], Path]:
    """Return the folder of a tiny base by name."""
    from tests.support.bases import made_once, write_base

    return lambda name: made_once(shared_folder / "bases" / name, lambda folder: write_base(name, folder))


@pytest.fixture(scope="session")
def adapter_folder(shared_folder: Path) -> Callable[[str, str], Path]:
    """Return the folder of an adapter by recipe and base."""
    from tests.support.adapters import adapter

    return lambda recipe, base: adapter(recipe, base, shared_folder / "bases", shared_folder / "adapters")


@pytest.fixture(scope="session")
def pair(
    base_folder: Callable[[str], Path], adapter_folder: Callable[[str, str], Path]
) -> Callable[[str, str], tuple[Path, Path]]:
    """Return the folders of an adapter and of its base, by recipe and base."""
    return lambda recipe, base: (adapter_folder(recipe, base), base_folder(base))

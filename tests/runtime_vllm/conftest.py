"""Bases and adapters that the tests of the plugin share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.runtime_vllm.engine import SEVERAL_PROCESSES, Engine, Engines
from tests.runtime_vllm.engine_forks import connected

if TYPE_CHECKING:
    from tests.runtime_vllm.adapters_by_method import Tenants

# Read when torch is imported: tiny models are fastest on one thread, and the engine uses the other core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

SMOLLM2 = "SCUTE_TEST_SMOLLM2"
"""Environment variable: a folder with SmolLM2-135M."""


@pytest.fixture(scope="session")
def engines(shared_folder: Path) -> Iterator[Engines]:
    """Start engines from a process that has imported vLLM; all workers of a run share it."""
    with connected(shared_folder) as forks:
        yield Engines(forks=forks, logs=shared_folder / "logs")


@pytest.fixture(scope="session")
def llama(base_folder: Callable[[str], Path], shared_folder: Path) -> Tenants:
    """Adapters of a tiny Llama."""
    return _tiny("llama-heads-of-32", base_folder, shared_folder)


@pytest.fixture(scope="session")
def qwen2(base_folder: Callable[[str], Path], shared_folder: Path) -> Tenants:
    """Adapters of a tiny Qwen2, whose q, k and v have biases."""
    return _tiny("qwen2-heads-of-32", base_folder, shared_folder)


@pytest.fixture(scope="session")
def smollm2(shared_folder: Path) -> Tenants:
    """Adapters of SmolLM2-135M, if the environment names its folder."""
    from tests.runtime_vllm.adapters_by_method import Tenants

    folder = os.environ.get(SMOLLM2)
    if not folder:
        pytest.skip(f"set {SMOLLM2} to the folder of SmolLM2-135M")
    return Tenants(base=Path(folder), root=shared_folder / "smollm2")


PROCESSES: Mapping[str, Mapping[str, str]] = {"in several": SEVERAL_PROCESSES, "in one process": {}}
"""Settings of engines in several processes, as in production, and in one process, as most tests run them."""
LONG = "SCUTE_TEST_LONG"


@pytest.fixture(scope="session", params=PROCESSES if os.environ.get(LONG) == "1" else tuple(PROCESSES)[:1])
def crowded(request: pytest.FixtureRequest, llama: Tenants, engines: Engines) -> Iterator[Engine]:
    """An engine with max_loras 2, max_cpu_loras 3, and a prefix cache of blocks of 32 tokens."""
    with engines.started(
        f"crowded-{request.param[3:]}",
        llama.base,
        settings=PROCESSES[request.param],
        enable_prefix_caching=True,
        block_size=32,
        max_loras=2,
        max_cpu_loras=3,
    ) as running:
        yield running


def _tiny(name: str, base_folder: Callable[[str], Path], shared: Path) -> Tenants:
    from tests.runtime_vllm.adapters_by_method import Tenants

    return Tenants(base=base_folder(name), root=shared / name, tiny=name)

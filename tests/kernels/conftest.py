"""The kernels' tests run under Triton's interpreter, in float32, in buffers that hold NaN until they are written.

A value that is read too early, or never written, is therefore detected. `tests/conftest.py` selects the interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    """Run a test in the interpreter; if kernels are compiled instead, skip it with the command that runs it."""
    from tests.kernels.checks import spread_booleans

    pytest.importorskip("triton", reason="Triton is released for Linux only")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled here: run `TRITON_INTERPRET=1 pytest tests/kernels`")
    with spread_booleans():
        yield


@pytest.fixture(autouse=True)
def poisoned(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill every new buffer with NaN, and cut K into several runs, each of several products, although it is short."""
    from scute_compile.runtime_min.step import launch_decode

    monkeypatch.setattr(launch_decode, "RUN_GRANULES", 48)
    monkeypatch.setattr(launch_decode, "SHARED_STEP", 32)
    monkeypatch.setattr(launch_decode, "OWNED_PROGRAMS", 100)
    monkeypatch.setattr(launch_decode, "TALL_PROGRAMS", 4)
    torch.use_deterministic_algorithms(mode=True)
    assert torch.zeros(1).new_empty(64).isnan().all()
    yield
    torch.use_deterministic_algorithms(mode=False)

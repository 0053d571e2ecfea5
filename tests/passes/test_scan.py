"""The scan's facts equal those computed from whole arrays."""

from __future__ import annotations

import hashlib
import math
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from scute_compile.diagnostics import Code, ScuteError
from scute_compile.formats.peft_folder import CONFIG, WEIGHTS, AdapterFolder, open_adapter
from scute_compile.passes.scan import BLOCK_BYTES, TensorFacts, scan


def opened(folder: Path, tensors: dict[str, torch.Tensor]) -> AdapterFolder:
    (folder / CONFIG).write_text('{"peft_type": "LORA"}')
    save_file(tensors, folder / WEIGHTS)
    return open_adapter(str(folder))


def expected(x: torch.Tensor) -> TensorFacts:
    numbers = np.abs(x.double().numpy().reshape(-1))
    finite = bool(np.isfinite(numbers).all())
    positive = numbers[(numbers > 0) & np.isfinite(numbers)]
    not_one = int((x.double() != 1).sum())
    return TensorFacts(
        finite=finite,
        zero=not numbers.any(),
        largest=float(numbers.max(initial=0.0)) if finite else math.inf,
        smallest=float(positive.min()) if positive.size else 0.0,
        not_one=not_one,
        ones=not_one == 0 and numbers.size > 0,
        size=numbers.size,
    )


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_facts_equal_those_of_the_whole_array_across_blocks(tmp_path: Path, dtype: torch.dtype) -> None:
    count = 5 * BLOCK_BYTES // (2 * dtype.itemsize) + 3
    torch.manual_seed(0)
    x = torch.randn(count).to(dtype)
    x[::7], x[3::11] = 0, 1
    end = torch.zeros(count, dtype=dtype)
    end[-1] = -3e-5  # the only entry that isn't zero is in the last block
    tensors = {"x": x, "end": end, "ones": torch.ones(count, dtype=dtype), "empty": torch.ones(0, 3, dtype=dtype)}
    facts = scan(opened(tmp_path, tensors)).facts
    for key, value in tensors.items():
        assert facts[key] == expected(value), key


SPECIAL = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 5.9e-8, 1e-45, -65504.0]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(SPECIAL), max_size=6), st.sampled_from(DTYPES))
def test_facts_of_special_values_are_those_of_numpy(tmp_path: Path, values: list[float], dtype: torch.dtype) -> None:
    x = torch.tensor(values, dtype=torch.float64).to(dtype)
    assert scan(opened(tmp_path, {"x": x})).facts["x"] == expected(x)


def test_of_integers_only_the_size_is_known(tmp_path: Path) -> None:
    facts = scan(opened(tmp_path, {"i": torch.arange(5)})).facts["i"]
    assert facts == TensorFacts(finite=True, zero=False, largest=0.0, smallest=0.0, not_one=0, ones=False, size=5)


def test_hashes_are_those_of_the_files(tmp_path: Path) -> None:
    adapter = opened(tmp_path, {"x": torch.randn(BLOCK_BYTES // 4 + 5), "y": torch.randn(7).bfloat16()})
    hashes = scan(adapter, hash_files=True).sha256
    assert hashes == {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in (CONFIG, WEIGHTS)}
    assert scan(adapter).sha256 == {}


def test_peak_memory_is_a_few_blocks(tmp_path: Path) -> None:
    adapter = opened(tmp_path, {"x": torch.ones(16 * BLOCK_BYTES // 4)})
    scan(adapter)
    tracemalloc.start()
    try:
        scan(adapter)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * BLOCK_BYTES


def test_a_file_that_shrank_is_a_diagnostic(tmp_path: Path) -> None:
    adapter = opened(tmp_path, {"x": torch.ones(100)})
    os.truncate(adapter.weights, adapter.weights.stat().st_size - 4)
    with pytest.raises(ScuteError) as caught:
        scan(adapter)
    assert caught.value.diagnostics[0].code is Code.SC104

"""DoRA's column norms: as accurate as in float64, with bits that don't depend on threads, ranks or shards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from scute_compile.ir.expressions import ColumnNorm, Expression, Ref, Source
from scute_compile.pack.column_norms import NormRequest, stream_norms
from scute_compile.passes import scale
from scute_compile.passes.scale import plan_norm
from tests.support.artifact_files import rank_tensors
from tests.support.commands import compiled, python
from tests.support.sparse_base import write_sparse_file

TOLERANCE = 1e-6
"""A few roundings of float32 (6e-8 each) per value, averaged over a column, and one of the sum."""
C = 1.3

Norms = npt.NDArray[np.float64]
Factors = tuple[torch.Tensor, torch.Tensor]
"""A `(rank, in)` and B `(rank, out)`."""


def _norms(weight: torch.Tensor, *adapters: Factors, transposed: bool = False) -> list[Norms]:
    """Stream the norms of all adapters over one weight, as stored."""
    ref = Ref(Source.BASE, "weight", tuple(weight.shape), "F32")
    values: dict[Expression, torch.Tensor] = {}
    requests = []
    for package, pair in enumerate(adapters):
        a, b = (Ref(Source.ADAPTER, f"{package}.{i}", tuple(x.shape), "F32") for i, x in enumerate(pair))
        values |= {a: pair[0], b: pair[1]}
        requests.append(NormRequest(package, plan_norm(ColumnNorm(ref, transposed, a, b, C))))

    def tiles(norm: ColumnNorm) -> Iterator[torch.Tensor]:
        return (weight[start:stop] for start, stop in norm.tiles())

    streamed = stream_norms(requests, tiles, lambda _, x: values[x].numpy(), lambda _: None)
    return [norm for _, norm in streamed]


def _exact(weight: torch.Tensor, factors: Factors) -> Norms:
    a, b = (factor.double() for factor in factors)
    norms: Norms = (weight.double() + C * b.T @ a).norm(dim=1).numpy()
    return norms


def _error(norms: Norms, exact: Norms) -> float:
    return float(np.abs(norms / exact - 1).max())


def _drawn(outputs: int, inputs: int, rank: int, size: float = 0.1) -> tuple[torch.Tensor, Factors]:
    generator = torch.Generator().manual_seed(outputs + inputs)
    weight = (0.02 * torch.randn(outputs, inputs, generator=generator)).bfloat16()
    a = torch.randn(rank, inputs, generator=generator) / rank**0.5
    return weight, (a, size * torch.randn(rank, outputs, generator=generator))


@pytest.mark.parametrize(("outputs", "inputs", "rank"), [(300, 576, 16), (64, 28672, 16), (96, 4096, 256), (7, 33, 1)])
@pytest.mark.parametrize("size", [0.0, 0.001, 0.1])
def test_norms_are_as_accurate_as_in_float64(outputs: int, inputs: int, rank: int, size: float) -> None:
    weight, factors = _drawn(outputs, inputs, rank, size)
    (norms,) = _norms(weight, factors)
    assert _error(norms, _exact(weight, factors)) <= TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("transposed", [False, True])
def test_norms_keep_their_digits_where_the_weight_and_the_product_cancel(dtype: torch.dtype, transposed: bool) -> None:
    weight, factors = _drawn(200, 2048, 16)
    product = C * factors[1].T.double() @ factors[0].double()
    weight = weight.to(dtype)
    weight[::3] = (-product).to(dtype)[::3]
    exact = _exact(weight, factors)
    assert exact[::3].max() < 0.01 * product.norm(dim=1).min(), "every third column cancels"
    (norms,) = _norms(weight.T.contiguous() if transposed else weight, factors, transposed=transposed)
    assert _error(norms, exact) <= TOLERANCE


@pytest.mark.parametrize("transposed", [False, True])
def test_the_size_of_a_tile_does_not_matter(transposed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, factors = _drawn(310, 1000, 8)
    exact = _exact(weight, factors)
    stored = weight.T.contiguous() if transposed else weight
    for values in (1, 2048, 7 * 1000, 1 << 20):
        monkeypatch.setattr(scale, "TILE_VALUES", values)
        (norms,) = _norms(stored, factors, transposed=transposed)
        assert _error(norms, exact) <= TOLERANCE


def test_a_weight_stored_by_input_has_the_same_norms() -> None:
    weight, factors = _drawn(200, 300, 8)
    (stored_by_output,) = _norms(weight, factors)
    (stored_by_input,) = _norms(weight.T.contiguous(), factors, transposed=True)
    assert _error(stored_by_input, stored_by_output) <= TOLERANCE


def test_neither_other_adapters_nor_the_number_of_threads_change_a_bit() -> None:
    weight, first = _drawn(600, 1024, 16)
    second = (first[0] * 2, first[1].flip(0))
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 3):
            torch.set_num_threads(count)
            results += [_norms(weight, first, second), [_norms(weight, each)[0] for each in (first, second)]]
            assert torch.get_num_threads() == count, "the number of threads is restored"
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("base", ["llama-bf16", "gpt2"])
def test_scales_do_not_depend_on_ranks_or_on_how_the_base_is_split(
    base: str, pair: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    adapter, folder = pair("dora", base)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 1
    joined = tmp_path / "joined"
    joined.mkdir()
    (joined / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file({key: value for shard in shards for key, value in load_file(shard).items()}, joined / "model.safetensors")
    (whole,) = rank_tensors(compiled(adapter, folder, tmp_path / "one"))
    (same,) = rank_tensors(compiled(adapter, joined, tmp_path / "other"))
    ranks = rank_tensors(compiled(adapter, joined, tmp_path / "two", "--tp", 2))
    assert any(key.endswith(".ds") for key in whole)
    for key, tensor in whole.items():
        assert torch.equal(tensor, same[key]), key
        if key.endswith(".ds") and tensor.shape == ranks[0][key].shape:
            assert all(torch.equal(tensor, rank[key]) for rank in ranks), key
        elif key.endswith(".ds"):
            held = torch.cat([rank[key] for rank in ranks])
            assert torch.equal(held.sort().values, tensor.sort().values), key


PEAK = """
import sys, torch
from pathlib import Path
import scute_compile.pack.pack
from scute_compile.driver.bases import open_model
from scute_compile.driver.packing import compile_planned
from scute_compile.pipeline import plan
from scute_compile.ir.target import Target
def peak():  # of this process, in KiB
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
torch.mm(torch.ones(8, 8), torch.ones(8, 8))  # loads the libraries of matrix products
base, adapter, store = sys.argv[1:]
before = peak()
opened = open_model(base, weights=True)
result, = compile_planned((plan(adapter, opened, Target(), hash_files=True),), opened, Path(store), lambda *_: None)
assert isinstance(result, Path), result
print(peak() - before)
"""


def _write_model(folder: Path, layers: int) -> None:
    """Write a base of sparse files, and a DoRA adapter of rank 1 on its largest projection."""
    hidden, inner, heads = 1024, 8192, {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 64}
    attention = {f"self_attn.{x}_proj": (hidden, hidden) for x in "qkvo"}
    feedforward = {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    shapes = {**attention, **feedforward, "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    inside = {f"model.layers.{i}.{name}.weight": shape for i in range(layers) for name, shape in shapes.items()}
    outside = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (64, hidden))
    (folder / "base").mkdir(parents=True)
    (folder / "adapter").mkdir()
    write_sparse_file(folder / "base" / "model.safetensors", {**inside, **outside, "model.norm.weight": (hidden,)})
    config = {"model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    (folder / "base" / "config.json").write_text(json.dumps({**config, **heads, "tie_word_embeddings": False}))
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(layers):
        stem = f"base_model.model.model.layers.{layer}.mlp.down_proj.lora_"
        tensors |= {f"{stem}A.weight": torch.ones(1, inner), f"{stem}B.weight": torch.ones(hidden, 1)}
        tensors[f"{stem}magnitude_vector"] = torch.ones(hidden)
    save_file(tensors, folder / "adapter" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "use_dora": True, "target_modules": ["down_proj"]}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))


def test_peak_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    peaks = {}
    for layers in (2, 24):
        _write_model(tmp_path / str(layers), layers)
        paths = (tmp_path / str(layers) / name for name in ("base", "adapter", "store"))
        peaks[layers] = int(python(PEAK, *paths)) / 1024
    weight = 2 * 1024 * 8192 / 2**20
    assert peaks[24] - peaks[2] < weight, f"less than one weight of {weight} MiB more for 22 more layers: {peaks}"

"""The custom operator: PyTorch's checks, one compiled graph for every mix, and agreement with the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from scute_compile.runtime_min.model.served_model import ServedModel
from scute_compile.runtime_min.oracle.adapted_model import AdaptedModel
from scute_compile.runtime_min.pool.leases import ResidentFacts
from scute_compile.runtime_min.step.arguments import capacity_numbers, features_of
from scute_compile.runtime_min.step.op import adapted_linear
from scute_compile.runtime_min.step.plan import Capacity, StepBuffers, plan_step
from tests.runtime_min.pool.small_adapters import DTYPE, METHODS, SITES, packed, pool_of
from tests.support.bases import load_base
from tests.support.served import Pair, artifact_of, ids_of, logits_of, served

Step = tuple[Any, ...]


def step_of(rows: Sequence[str | None], *, bias: bool, sites: tuple[int, int] = (0, 2), seed: int = 0) -> Step:
    """Return the operator's arguments for one GEMM of the test sites, with one resident adapter per method."""
    pool = pool_of(256, 8)
    for method in METHODS:
        pool.add(method, packed(method, 2))
    indices = pool.ensure(METHODS)
    capacity = Capacity(tokens=32, ranks=1024, pairs=len(pool.pairs), pair_ranks=32, rotated=32)
    plan = plan_step([-1 if row is None else indices[row] for row in rows], pool.facts, pool.pairs, capacity)
    buffers = StepBuffers(capacity, torch.device("cpu"))
    buffers.fill(plan)
    generator = torch.Generator().manual_seed(seed)
    first, last = sites
    held, memory = SITES[first:last], pool.memory
    widths = [site.out_features for site in held]
    weight = torch.randn(sum(widths), held[0].in_features, generator=generator).to(DTYPE)
    x = torch.randn(len(rows), held[0].in_features, generator=generator).to(DTYPE)
    return (
        x,
        weight,
        weight[:, 0].clone() if bias else None,
        memory.pages,
        memory.page_map,
        memory.directory,
        memory.shared,
        buffers.device_copy,
        first,
        widths,
        list(capacity_numbers(capacity)),
        list(features_of(plan, whole_granules=False).numbers()),
    )


ROWS = (None, "lora", "dora", "vera", "ia3", "oft", "lora")


@pytest.mark.parametrize("bias", [False, True])
def test_pytorch_accepts_the_operator(bias: bool) -> None:
    torch.library.opcheck(adapted_linear, step_of(ROWS, bias=bias))
    torch.library.opcheck(adapted_linear, step_of((None, None), bias=bias, sites=(2, 3)))


def test_the_weight_may_be_a_transposed_view() -> None:
    step = list(step_of(ROWS, bias=True))
    plain = adapted_linear(*step)
    step[1] = step[1].T.contiguous().T
    assert not step[1].is_contiguous()
    torch.library.opcheck(adapted_linear, tuple(step))
    assert (adapted_linear(*step) - plain).abs().max() <= plain.abs().max() * 2**-7


def test_slices_of_one_gemm_equal_the_slices_computed_apart() -> None:
    step = step_of(ROWS, bias=True)
    whole = adapted_linear(*step)
    start = 0
    for number, width in enumerate(step[9]):
        rows = slice(start, start + width)
        alone = adapted_linear(step[0], step[1][rows], step[2][rows], *step[3:8], number, [width], *step[10:])
        assert (alone - whole[:, rows]).abs().max() <= whole.abs().max() * 2**-7
        start += width


def test_every_method_changes_its_rows_and_no_other() -> None:
    step = step_of(ROWS, bias=False)
    base = torch.nn.functional.linear(step[0], step[1])
    moved = (adapted_linear(*step) - base).abs().amax(1) > 0.05
    assert moved.tolist() == [row is not None for row in ROWS]


@pytest.fixture
def model(pair: Pair, shared_folder: Path) -> ServedModel:
    """Return a tiny Llama for steps of one form, with an adapter of every method."""
    made = {name: artifact_of(name, "llama", pair, shared_folder) for name in ("lora", "dora", "vera", "oft", "ia3")}
    model = served("llama", made["lora"].base, fixed=True, max_num_batched_tokens=64, max_num_seqs=8)
    for name, files in made.items():
        model.load_adapter(files.artifact, adapter_name=name)
    return model


MIXES = (("lora", "oft", None), ("vera", "vera", "ia3"), ("dora", "lora", "lora"), (None, None, None))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_one_compiled_graph_serves_every_mix(model: ServedModel, backend: str) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        compiler = torch._dynamo.lookup_backend(backend)
        made: Callable[..., Any] = compiler(graph, inputs)
        return made

    ids = ids_of(3, 5)
    expected = [logits_of(model, ids, mix) for mix in MIXES]
    torch._dynamo.reset()
    model.compile(fullgraph=True, backend=counting)
    for mix, eager in zip(MIXES, expected, strict=True):
        assert torch.allclose(logits_of(model, ids, mix), eager, atol=1e-4), mix
    assert len(graphs) == 1
    names = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("scute" in name for name in names) == len(model.layers)


def test_the_metadata_keeps_its_address_from_step_to_step(model: ServedModel) -> None:
    addresses = set()
    for mix in MIXES:
        logits_of(model, ids_of(3, 1), mix)
        addresses.add(next(iter(model.layers.values())).step.buffer.data_ptr())
    assert len(addresses) == 1


def test_the_served_model_matches_the_adapted_model(pair: Pair, shared_folder: Path) -> None:
    names = ("lora", "dora", "ia3-inputs", "vera", "oft", "adalora")
    made = {name: artifact_of(name, "qwen2", pair, shared_folder) for name in names}
    base = made["lora"].base
    rows = [*names, None, "lora"]
    ids = ids_of(len(rows), 7)
    with AdaptedModel(load_base("qwen2", base), {name: files.artifact for name, files in made.items()}) as adapted:
        expected = adapted(input_ids=ids, adapter_names=rows).logits.detach()  # type: ignore[attr-defined] # transformers leaves it untyped
    model = served("qwen2", base)
    for name, files in made.items():
        model.load_adapter(files.artifact, adapter_name=name)
    # the same products in another order: two layers of float32 rounding on logits near 10
    assert (logits_of(model, ids, rows) - expected).abs().max() < 1e-4


def test_rows_beyond_a_shorter_step_belong_to_no_adapter() -> None:
    capacity = Capacity(tokens=128, ranks=1024, rotated=8, prefill=True)
    buffers = StepBuffers(capacity, torch.device("cpu"))
    facts = {0: ResidentFacts(rank=4)}
    for rows in ([0] * 100, [0, -1]):
        buffers.fill(plan_step(rows, facts, [], capacity))
        adapters, tiles = buffers.region("row_adapter").tolist(), buffers.region("tile").view(-1, 4)
        assert adapters == rows + [-1] * (128 - len(rows))
        assert int(tiles[:, 2].sum()) == len(rows)

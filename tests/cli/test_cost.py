"""Bytes and predicted times against the published arithmetic, and the sums over the tenants of a pool."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from scute_compile.base.shapes import SHAPES, named_shape, shape_of
from scute_compile.base.structure import ModelStructure
from scute_compile.cli.cost.rendering import render
from scute_compile.cli.cost.report import CostReport, CostRow, Sizes, cost_table
from scute_compile.cli.cost.step_cost import (
    gemm_bytes,
    ia3_bytes,
    launches,
    lora_bytes,
    oft_bytes,
    padded_bytes,
    predicted_seconds,
    scale_bytes,
    vera_pair_bytes,
)
from scute_compile.diagnostics import ScuteError
from scute_compile.ir.expressions import Ref, Source
from scute_compile.ir.linear import Linear
from scute_compile.ir.method import Method
from scute_compile.ir.target import Workload

LLAMA = named_shape("Llama-3.1-8B")
A6000 = Workload(tenants=16, tokens=16, bandwidth=680e9, launch=0.96e-6)


def digits(value: float, count: int = 3) -> float:
    """Return `value` rounded to `count` significant digits."""
    return float(f"{value:.{count - 1}e}")


def structure(linears: list[Linear]) -> ModelStructure:
    return ModelStructure(model_type="made", linears={x.name: x for x in linears}, tensors={})


def linear(name: str, inputs: int, outputs: int, gemm: str = "") -> Linear:
    weight = Ref(Source.BASE, f"{name}.weight", (outputs, inputs), "F16")
    return Linear(name=name, in_features=inputs, out_features=outputs, weight=weight, gemm=gemm)


def row(report: CostReport, pool: str) -> CostRow:
    return next(r for r in report.rows if r.pool.startswith(pool))


@pytest.mark.parametrize(
    ("counted", "expected"),
    [
        pytest.param(vera_pair_bytes(LLAMA, rank=256, width=2), 1.342e9, id="VeRA's shared pair, rank 256"),
        pytest.param(lora_bytes(LLAMA, rank=64, tenants=1, width=2), 335.5e6, id="one rank-64 LoRA"),
        pytest.param(padded_bytes(LLAMA, ranks=[16] * 15 + [256], width=2), 21.47e9, id="16 padded to rank 256"),
        pytest.param(lora_bytes(LLAMA, rank=16, tenants=16, width=2), 1.342e9, id="16 LoRA of rank 16"),
        pytest.param(scale_bytes(LLAMA, tenants=16, width=2), 44.0e6, id="16 DoRA s"),
        pytest.param(ia3_bytes(LLAMA, tenants=16, width=2), 16.8e6, id="16 IA3"),
        pytest.param(oft_bytes(LLAMA, block=32, tenants=16, width=2), 1.275e9, id="16 OFT of block 32"),
    ],
)
def test_bytes_agree_with_the_published_arithmetic_to_three_digits(counted: int, expected: float) -> None:
    assert digits(counted) == digits(expected)


def test_times_at_680_gigabytes_per_second_agree_to_three_digits() -> None:
    pair = vera_pair_bytes(LLAMA, rank=256, width=2)
    padded = padded_bytes(LLAMA, ranks=[16] * 15 + [256], width=2)
    assert digits(1e3 * predicted_seconds(pair, bandwidth=680e9)) == 1.97
    assert digits(1e3 * predicted_seconds(padded, bandwidth=680e9)) == 31.6


def test_a_launch_adds_its_time() -> None:
    assert predicted_seconds(0, bandwidth=1.0, launches=256, launch=0.96e-6) == pytest.approx(256 * 0.96e-6)


@pytest.mark.parametrize(
    ("name", "billions"),
    # Parameters of the published models without embeddings, heads, norms and biases, which are not sites.
    [
        ("llama-3.1-8b", 6.979),
        ("llama-3.1-70b", 68.45),
        ("llama-3.2-1b", 0.9731),
        ("qwen2.5-7b", 6.525),
        ("smollm2-135m", 0.1062),
    ],
)
def test_known_shapes_have_their_models_weights(name: str, billions: float) -> None:
    assert digits(named_shape(name).weights, 4) == pytest.approx(billions * 1e9)
    assert gemm_bytes(named_shape(name), width=2) == 2 * named_shape(name).weights


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ScuteError, match=r"SC703(?s:.*)`gpt-9`(?s:.*)llama-3\.1-8b"):
        named_shape("gpt-9")


@pytest.mark.parametrize(
    ("methods", "per_layer"),
    [
        ((), 0),
        ((Method.LORA,), 8),
        ((Method.LORA, Method.DORA, Method.VERA), 8),
        ((Method.IA3,), 2),
        ((Method.OFT,), 8),
        ((Method.LORA, Method.OFT), 12),
        (tuple(Method), 12),
    ],
)
def test_methods_share_the_launches_of_a_fused_site(methods: tuple[Method, ...], per_layer: int) -> None:
    assert launches(LLAMA, methods) == 32 * per_layer


def test_a_structure_of_equal_layers_becomes_one_layer() -> None:
    linears = [
        linear(f"model.layers.{layer}.{p.name}", p.inputs, p.outputs, f"model.layers.{layer}.{p.gemm}")
        for layer in range(32)
        for p in LLAMA.projections
    ]
    shape = shape_of(structure(linears))
    assert (shape.layers, shape.projections) == (32, LLAMA.projections)


def test_layers_that_differ_are_all_counted() -> None:
    linears = [linear("h.0.mlp.c_fc", 8, 32), linear("h.0.mlp.c_proj", 32, 8), linear("h.1.mlp.c_fc", 8, 64)]
    shape = shape_of(structure(linears))
    assert (shape.layers, shape.inputs, shape.outputs, shape.weights) == (1, 48, 104, 1024)


def test_ia3_scales_the_input_of_the_last_layer_in_a_plain_mlp() -> None:
    linears = [linear("h.0.mlp.c_fc", 8, 32), linear("h.0.mlp.c_proj", 32, 8), linear("h.0.attn.c_attn", 8, 24)]
    assert sorted(shape_of(structure(linears)).ia3_vectors) == [("attn.c_attn", 24), ("mlp.c_proj", 32)]


def test_a_base_without_linear_layers_is_refused() -> None:
    with pytest.raises(ScuteError, match="SC405"):
        shape_of(structure([]))


def test_a_mix_reads_veras_pair_once_and_the_values_of_every_tenant() -> None:
    methods = (Method.LORA, Method.DORA, Method.IA3, Method.VERA, Method.OFT)
    mixed = row(cost_table(LLAMA, workload=Workload(tenants=20, tokens=20)), "mix")
    alone = [row(cost_table(LLAMA, workload=Workload(tenants=4, tokens=20)), method) for method in methods]
    assert mixed.tenants == 20
    assert mixed.shared_bytes == vera_pair_bytes(LLAMA, rank=256, width=2)
    assert mixed.adapter_bytes == sum(r.adapter_bytes for r in alone)
    assert mixed.launches == 32 * 12


def test_more_vera_tenants_read_the_same_pair() -> None:
    single, many = (row(cost_table(LLAMA, workload=Workload(tenants=n, tokens=n)), "vera") for n in (1, 16))
    assert single.shared_bytes == many.shared_bytes
    assert 16 * single.tenant_bytes == many.tenant_bytes


def test_the_padded_row_pads_every_adapter_to_the_largest_rank() -> None:
    report = cost_table(LLAMA, workload=A6000)
    padded = row(report, "lora padded to rank 256")
    assert padded.adapter_bytes == 16 * row(report, "lora").adapter_bytes
    assert digits(padded.memory_ms) == 31.6


def test_the_default_mix_has_all_tenants() -> None:
    assert row(cost_table(LLAMA, workload=Workload(tenants=17, tokens=17)), "mix").tenants == 17


def test_numbers_out_of_range_are_refused_together() -> None:
    with pytest.raises(ScuteError) as caught:
        cost_table(LLAMA, workload=Workload(tenants=0, bandwidth=0.0), sizes=Sizes(rank=-1))
    assert [d.where for d in caught.value.diagnostics] == ["--tenants", "--rank", "--bandwidth"]


def test_numbers_out_of_range_are_shown_in_the_units_of_their_options() -> None:
    with pytest.raises(ScuteError) as caught:
        cost_table(LLAMA, workload=Workload(bandwidth=-680e9, launch=-1e-6))
    assert [(d.found, d.expected) for d in caught.value.diagnostics] == [
        ("-680", "GB/s above 0"),
        ("-1", "microseconds, 0 or more"),
    ]


def test_json_carries_its_version_and_the_tables_numbers() -> None:
    report = cost_table(named_shape("smollm2-135m"), workload=A6000)
    read = json.loads(json.dumps(report.to_json()))
    assert read["schema_version"] == "1.0"
    assert [pool["bytes"] for pool in read["pools"]] == [r.adapter_bytes for r in report.rows]
    assert read["base"]["bytes"] == report.base_bytes


def test_the_printed_table_shows_the_published_numbers() -> None:
    console = Console(file=io.StringIO(), width=120)
    render(cost_table(LLAMA, workload=A6000), console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert all(part in text for part in ("21.47 GB", "31.581", "1.275 GB", "16.78 MB", "680 GB/s"))


def test_every_shape_has_a_cost_for_every_method() -> None:
    for shape in SHAPES.values():
        rows = cost_table(shape).rows
        assert all(0 < r.memory_ms < r.predicted_ms for r in rows)

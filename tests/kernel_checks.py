"""The kernels under Triton's interpreter, in float32; `tests/test_kernels.py` runs this file in a process of its own.

Triton reads TRITON_INTERPRET when it is imported, and other tests import it first. Buffers that nothing wrote hold NaN
here, so a value that is read too early, or never written, shows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from scute_compile.ir import RotationKind
from scute_compile.runtime_min.image import (
    FactorImage,
    PairWindow,
    SharedTerm,
    SiteContent,
    pack_adapter,
    pack_factor,
    window_of,
)
from scute_compile.runtime_min.ops import adapted_linear as by_reference
from scute_compile.runtime_min.record import Field, SiteSlot
from scute_compile.runtime_min.reference import SiteSlots, TermSlots
from scute_compile.runtime_min.resident_pool import ResidentPool
from scute_compile.runtime_min.step_form import (
    Features,
    Gemm,
    PoolTensors,
    capacity_numbers,
    features_of,
    fixed_features,
)
from scute_compile.runtime_min.step_plan import Capacity, StepBuffers, plan_step

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")

GEMMS = ((72, (64, 40, 32)), (520, (64,)))
SITES = tuple(
    SiteSlot(name=f"{number}.{part}", in_features=inputs, out_features=width, gemm=str(number))
    for number, (inputs, widths) in enumerate(GEMMS)
    for part, width in enumerate(widths)
)
PAIR_RANK = 40
CLOSE = 2e-5
"""Relative to a row: sums of up to 520 products in float32, in another order than float64 adds them."""
ADAPTERS = (
    "lora-5",
    "dora-16",
    "ia3",
    "oft-8",
    "diagonal",
    "vera",
    "vera-2",
    "lora-37",
    "lora-3-partly",
    "oft-shared-4",
)
ROWS = (0, 1, None, 2, 3, 5, 4, 7, 6, 8, 0, 9, 5, 0)
"""Numbers of `ADAPTERS`; rows of one adapter stand apart, and three of them are two segments of a decode step."""


@cache
def factors() -> tuple[FactorImage, FactorImage]:
    """Shared factors as wide as the widest site."""
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(PAIR_RANK, 520, generator=generator) / 520**0.5
    b = torch.randn(PAIR_RANK, 64, generator=generator)
    first, second = (pack_factor(name, factor, torch.float32) for name, factor in (("a", a), ("b", b)))
    return first, second


def pair(site: SiteSlot) -> PairWindow:
    """The columns that a site uses: some sites don't start at the first, as on the ranks of a tensor-parallel model."""
    a, b = factors()
    column_a, column_b = {"0.0": (16, 0), "0.1": (16, 8), "0.2": (16, 32)}.get(site.name, (0, 0))
    return PairWindow(
        a=window_of(a, torch.float32, column=column_a), b=window_of(b, torch.float32, column=column_b)
    )  # fmt: skip


def content(adapter: str, site: SiteSlot, generator: torch.Generator) -> SiteContent:
    """One site's slots as the adapter's name says."""

    def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    method, *numbers = adapter.removesuffix("-partly").replace("shared-", "").split("-")
    k, n = site.in_features, site.out_features
    slots, shared = SiteSlots(), None
    if method in ("lora", "dora"):
        rank = int(numbers[0])
        slots = SiteSlots(terms=(TermSlots(a=drawn(rank, k, scale=k**-0.5), b=drawn(rank, n)),))
    if method in ("dora", "ia3"):
        slots = replace(slots, ds=drawn(n, scale=0.3), b=drawn(n) if method == "dora" else None)
    if method == "diagonal":
        slots = SiteSlots(rotation=RotationKind.DIAGONAL, delta=drawn(k, scale=0.3))
    if method == "oft":
        width = int(numbers[0])
        blocks = 1 if "shared" in adapter else k // width
        slots = SiteSlots(rotation=RotationKind.BLOCKS, delta=drawn(blocks, width, width, scale=0.3))
    if method == "vera":
        shared = SharedTerm(pair=pair(site), d=drawn(PAIR_RANK), e=drawn(n))
    return SiteContent(in_features=k, out_features=n, slots=slots, shared=shared)


@cache
def pool() -> ResidentPool:
    """All adapters, in pages that held NaN before."""
    made = ResidentPool(
        SITES, num_pages=400, slots=16, dtype=torch.float32, device=torch.device("cpu"), shared_pages=64, pairs=2
    )
    made.memory.pages.fill_(float("nan"))
    made.memory.shared.fill_(float("nan"))
    for name in ADAPTERS:
        generator = torch.Generator().manual_seed(len(name) + 100)
        held = [site for site in SITES if not (name.endswith("partly") and site.name == "0.1")]
        contents = {site.name: content(name, site, generator) for site in held}
        made.load(name, pack_adapter(name, SITES, contents, torch.float32))
    return made


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """One step over one GEMM, for kernels and reference alike."""

    rows: tuple[int | None, ...]
    prefill: bool
    buffers: StepBuffers
    features: Features
    tables: PoolTensors

    def kernels(self, number: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The kernels' output for the GEMM of this number."""
        from scute_compile.runtime_min.launch import adapted_linear

        gemm = Gemm(first_site=first_site(number), widths=GEMMS[number][1])
        return adapted_linear(x, weight, bias, self.tables, self.buffers, gemm, self.features)

    def reference(self, number: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The reference's output, in float64."""
        tables = self.tables
        out: torch.Tensor = by_reference(
            x.double(), weight.double(), None if bias is None else bias.double(), tables.pages, tables.page_map,
            tables.directory, tables.shared, self.buffers.device_copy, first_site(number), list(GEMMS[number][1]),
            list(capacity_numbers(self.buffers.capacity)), list(self.features.numbers()),
        )  # fmt: skip
        return out


def first_site(number: int) -> int:
    return sum(len(widths) for _, widths in GEMMS[:number])


def step_of(
    rows: Sequence[int | None], *, prefill: bool, fixed: bool = False, buffers: StepBuffers | None = None
) -> Step:
    """Plan a step on the pool's adapters."""
    held, memory = pool(), pool().memory
    slots = {number: held.resident[name] for number, name in enumerate(ADAPTERS)}
    if buffers is None:
        capacity = Capacity(
            tokens=96 if prefill else 32,
            ranks=4096 if prefill else 256,
            pairs=len(held.pairs),
            pair_ranks=PAIR_RANK,
            rotated=8,
            prefill=prefill,
        )
        buffers = StepBuffers(capacity, torch.device("cpu"))
    plan = plan_step([-1 if row is None else slots[row] for row in rows], held.facts, held.pairs, buffers.capacity)
    buffers.fill(plan)
    features = features_of(plan, whole_granules=True)
    if fixed:
        features = fixed_features(buffers.capacity, slots=16, prefill=prefill, whole_granules=True)
    tables = PoolTensors(
        pages=memory.pages, page_map=memory.page_map, directory=memory.directory, shared=memory.shared
    )  # fmt: skip
    return Step(rows=tuple(rows), prefill=prefill, buffers=buffers, features=features, tables=tables)


def inputs(number: int, rows: int, *, bias: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Input, weight and bias of one GEMM; row i is the same whatever the number of rows."""
    k, widths = GEMMS[number]
    generator = torch.Generator().manual_seed(number)
    weight = torch.randn(sum(widths), k, generator=generator) * k**-0.5
    added = torch.randn(sum(widths), generator=generator)
    x = torch.stack([torch.randn(k, generator=generator) for _ in range(rows)])
    return x, weight, added if bias else None


@pytest.fixture(autouse=True)
def booleans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spread comparisons of scalars as booleans: Triton 3.9's interpreter spreads them as int32, which no mask may be.

    Compiled kernels have no such difference, and older interpreters take int32 masks.
    """
    from triton.language import int1
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    spread = InterpreterBuilder.create_splat

    def splat(self: object, block: Any, value: Any) -> object:  # noqa: ANN401 - Triton's own, unannotated
        if value.data.dtype == np.bool_:
            return TensorHandle(np.full(block.shape, value.data.flat[0]), int1)
        return spread(self, block, value)

    monkeypatch.setattr(InterpreterBuilder, "create_splat", splat)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fill every new buffer with NaN, and cut K in several runs although it is short."""
    from scute_compile.runtime_min import launch

    monkeypatch.setattr(launch, "RUN_GRANULES", 48)
    monkeypatch.setattr(launch, "OWNED_PROGRAMS", 100)
    monkeypatch.setattr(launch, "TALL_PROGRAMS", 4)
    torch.use_deterministic_algorithms(mode=True)
    assert torch.zeros(1).new_empty(64).isnan().all()
    yield
    torch.use_deterministic_algorithms(mode=False)


def assert_close(ours: torch.Tensor, exact: torch.Tensor) -> None:
    error = (ours.double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max() < CLOSE, (int(error.argmax()), error.max())


@pytest.mark.parametrize(("number", "bias"), [(0, True), (1, False)])
@pytest.mark.parametrize("prefill", [False, True])
def test_kernels_are_the_reference(prefill: bool, number: int, bias: bool) -> None:
    step = step_of(ROWS, prefill=prefill)
    given = inputs(number, len(ROWS), bias=bias)
    assert_close(step.kernels(number, *given), step.reference(number, *given))


@pytest.mark.parametrize("prefill", [False, True])
def test_results_repeat_to_the_bit(prefill: bool) -> None:
    step = step_of((1, 5, None, 3), prefill=prefill)
    given = inputs(0, 4, bias=True)
    assert torch.equal(step.kernels(0, *given), step.kernels(0, *given))


def test_more_rows_of_a_shared_pair_than_a_block_holds() -> None:
    rows = (*(5, 6) * 8, 5, None)
    step = step_of(rows, prefill=False)
    given = inputs(1, len(rows), bias=True)
    assert_close(step.kernels(1, *given), step.reference(1, *given))


def test_more_tokens_of_one_adapter_than_a_tile_holds() -> None:
    rows = (*(1,) * 70, 6, None, 3)
    step = step_of(rows, prefill=True)
    given = inputs(0, len(rows), bias=True)
    assert_close(step.kernels(0, *given), step.reference(0, *given))


@pytest.mark.parametrize("rows", [(None, None), (2,), (5, None), (3, 4)])
@pytest.mark.parametrize("prefill", [False, True])
def test_steps_with_one_kind_of_adapter_alone(rows: tuple[int | None, ...], prefill: bool) -> None:
    step = step_of(rows, prefill=prefill)
    given = inputs(0, len(rows), bias=True)
    assert_close(step.kernels(0, *given), step.reference(0, *given))


@pytest.mark.parametrize("prefill", [False, True])
def test_a_launch_for_every_step_serves_a_smaller_one_after_a_larger_one(prefill: bool) -> None:
    larger: tuple[int | None, ...] = (5, 6, 3, 1)
    buffers = step_of(larger, prefill=prefill).buffers
    for rows in (larger, (None, 6)):
        step = step_of(rows, prefill=prefill, fixed=True, buffers=buffers)
        given = inputs(0, len(rows), bias=True)
        assert_close(step.kernels(0, *given), step.reference(0, *given))


def test_blocks_that_are_no_whole_granules_go_entry_by_entry() -> None:
    step = step_of((3, 9, 4), prefill=False)
    step = replace(step, features=replace(step.features, whole_granules=False))
    given = inputs(0, 3, bias=False)
    assert_close(step.kernels(0, *given), step.reference(0, *given))


def by_row(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A GEMM whose rows don't depend on how many there are."""
    y = torch.stack([row @ weight.T for row in x])
    return y if bias is None else y + bias


@pytest.mark.parametrize("prefill", [False, True])
def test_a_row_does_not_depend_on_the_rest_of_the_batch(prefill: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "linear", by_row)
    rows = (3, 1, None, 5, 0, 6, 1)
    x, weight, bias = inputs(0, len(rows), bias=True)
    mixed = step_of(rows, prefill=prefill).kernels(0, x, weight, bias)
    for place in (2, 3, 6):
        # rotation decides where the bias is added, so a rotated row rides along
        alone = step_of((3, rows[place]), prefill=prefill).kernels(0, x[[0, place]], weight, bias)
        assert torch.equal(alone[1], mixed[place]), (place, rows[place])


ABSENT: Mapping[Field, int] = {
    Field.RANK: 0,
    Field.DS_OFFSET: -1,
    Field.SHIFT_OFFSET: -1,
    Field.R_OFFSET: -1,
    Field.D_OFFSET: -1,
    Field.E_OFFSET: -1,
}
CARRIERS = {field: 5 if field in (Field.D_OFFSET, Field.E_OFFSET) else 1 for field in ABSENT} | {Field.R_OFFSET: 3}
"""An adapter that has the field."""


@pytest.mark.parametrize("prefill", [False, True])
@pytest.mark.parametrize("field", ABSENT, ids=lambda field: field.name)
def test_every_slot_counts_and_moves_its_own_rows_alone(field: Field, prefill: bool) -> None:
    rows = (CARRIERS[field], None, 0 if field is not Field.RANK else 2)
    step = step_of(rows, prefill=prefill)
    given = inputs(0, len(rows), bias=False)
    whole = step.kernels(0, *given)
    directory = step.tables.directory.clone()
    directory[:, :, field] = ABSENT[field]
    if field is Field.RANK:
        directory[:, :, Field.PAIR] = -1
    without = replace(step, tables=replace(step.tables, directory=directory))
    part = without.kernels(0, *given)
    assert_close(part, without.reference(0, *given))
    moved = (part - whole).abs().amax(1)
    assert moved[0] > 0.01
    assert moved[1:].max() == 0


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fixed", [False, True])
def test_padded_steps_of_an_engine_have_one_form_for_every_mix(fixed: bool, bias: bool) -> None:
    from scute_compile.runtime_min.launch import adapted_output
    from scute_compile.runtime_min.ops import adapted_output as reference
    from scute_compile.runtime_vllm.engine_steps import EngineSteps, StepLimits

    limits = StepLimits(max_tokens=40, max_rows=8, max_rank=37, pair_rank=PAIR_RANK, rotations=True)
    steps = EngineSteps(pool(), limits)
    tables = step_of((None,), prefill=False).tables
    gemm = Gemm(first_site=first_site(0), widths=GEMMS[0][1])
    for rows, padded in (((5, 3, None, 1), 8), ((None, 6), 3), ((*range(10), None, 7), 16)):
        x, weight, added = inputs(0, padded, bias=bias)
        product = _Product(weight=weight, bias=added)
        steps.write([None if row is None else ADAPTERS[row] for row in rows])
        buffers, features = steps.form(padded, fixed=fixed)
        assert features.prefill == (padded > 8)
        ours = adapted_output(x, product, added, tables, buffers, gemm, features)
        exact = reference(x.double(), product, tables, buffers, gemm)
        assert_close(ours[: len(rows)], exact[: len(rows)])
    steps.release()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Product:
    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, rows: torch.Tensor, *, biased: bool) -> torch.Tensor:
        bias = self.bias.to(rows.dtype) if biased and self.bias is not None else None
        return torch.nn.functional.linear(rows, self.weight.to(rows.dtype), bias)

"""Adapters of every kind and steps over them, small enough for Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch

from scute_compile.ir.program import RotationKind
from scute_compile.runtime_min.pool.directory import DirectoryEntry
from scute_compile.runtime_min.pool.packed_adapter import (
    PackedFactor,
    PairWindow,
    SharedTerm,
    SiteContent,
    pack_adapter,
    pack_factor,
    window_of,
)
from scute_compile.runtime_min.pool.resident_pool import ResidentPool
from scute_compile.runtime_min.reference import SiteTensors, TermTensors, rotate
from scute_compile.runtime_min.step.arguments import (
    Features,
    Gemm,
    PoolTensors,
    capacity_numbers,
    features_of,
    fixed_features,
)
from scute_compile.runtime_min.step.op import adapted_linear as by_reference
from scute_compile.runtime_min.step.op import read_site
from scute_compile.runtime_min.step.plan import Capacity, StepBuffers, plan_step

Rows = tuple[int | None, ...]
"""Numbers of `ADAPTERS`, by row; None for the base."""
Rotation = Callable[[torch.Tensor, PoolTensors, StepBuffers, Gemm, Features], torch.Tensor]
GEMMS = ((72, (64, 40, 32)), (520, (64,)))
SITES = tuple(
    DirectoryEntry(name=f"{number}.{part}", in_features=inputs, out_features=width, gemm=str(number))
    for number, (inputs, widths) in enumerate(GEMMS)
    for part, width in enumerate(widths)
)
PAIR_RANK = 43
"""Not a multiple of the shrink's blocks."""
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
    "oft-8-partly",
    "oft-wide",
)
ROWS: Rows = (0, 1, None, 2, 3, 5, 4, 7, 6, 8, 0, 9, 10, 5, 11, 0)
"""The rows of one adapter are not adjacent."""


@cache
def factors() -> tuple[PackedFactor, PackedFactor]:
    """Return shared factors as wide as the widest site."""
    generator = torch.Generator().manual_seed(1)
    a = torch.randn(PAIR_RANK, 520, generator=generator) / 520**0.5
    b = torch.randn(PAIR_RANK, 64, generator=generator)
    first, second = (pack_factor(name, factor, torch.float32) for name, factor in (("a", a), ("b", b)))
    return first, second


def pair(site: DirectoryEntry) -> PairWindow:
    """Return the columns that a site uses; some do not start at column 0, as on tensor-parallel ranks."""
    a, b = factors()
    column_a, column_b = {"0.0": (16, 0), "0.1": (16, 8), "0.2": (16, 32)}.get(site.name, (0, 0))
    return PairWindow(a=window_of(a, torch.float32, column=column_a), b=window_of(b, torch.float32, column=column_b))


def content(adapter: str, site: DirectoryEntry, generator: torch.Generator) -> SiteContent:
    """Return an adapter's tensors at one site; its name gives the method."""

    def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    method, *numbers = adapter.removesuffix("-partly").replace("shared-", "").split("-")
    k, n = site.in_features, site.out_features
    tensors, shared = SiteTensors(), None
    if method in ("lora", "dora"):
        rank = int(numbers[0])
        tensors = SiteTensors(terms=(TermTensors(a=drawn(rank, k, scale=k**-0.5), b=drawn(rank, n)),))
    if method in ("dora", "ia3"):
        tensors = replace(tensors, ds=drawn(n, scale=0.3), b=drawn(n) if method == "dora" else None)
    if method == "diagonal":
        tensors = SiteTensors(rotation=RotationKind.DIAGONAL, delta=drawn(k, scale=0.3))
    if method == "oft":
        width = {72: 36, 520: 104}[k] if numbers[0] == "wide" else int(numbers[0])  # don't divide a prefill tile's 64
        blocks = 1 if "shared" in adapter else k // width
        tensors = SiteTensors(rotation=RotationKind.BLOCKS, delta=drawn(blocks, width, width, scale=0.3))
    if method == "vera":
        shared = SharedTerm(pair=pair(site), d=drawn(PAIR_RANK), e=drawn(n))
    return SiteContent(in_features=k, out_features=n, tensors=tensors, shared=shared)


@cache
def pool() -> ResidentPool:
    """Return a pool with all adapters, in pages that held NaN before."""
    made = ResidentPool(
        SITES, num_pages=400, max_adapters=16, dtype=torch.float32, device=torch.device("cpu"), shared_pages=64, pairs=2
    )
    made.memory.pages.fill_(float("nan"))
    made.memory.shared.fill_(float("nan"))
    for name in ADAPTERS:
        generator = torch.Generator().manual_seed(len(name) + 100)
        held = [site for site in SITES if not (name.endswith("partly") and site.name == "0.1")]
        contents = {site.name: content(name, site, generator) for site in held}
        made.add(name, pack_adapter(name, SITES, contents, torch.float32))
    made.ensure(ADAPTERS)
    return made


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """One step over one GEMM, for the kernels and the reference."""

    rows: Rows
    buffers: StepBuffers
    features: Features
    tables: PoolTensors

    def kernels(self, number: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the kernels' output for the GEMM of this number."""
        from scute_compile.runtime_min.step.launch import adapted_linear

        return adapted_linear(x, weight, bias, self.tables, self.buffers, gemm_of(number), self.features)

    def reference(self, number: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the reference's output, in float64."""
        tables = self.tables
        out: torch.Tensor = by_reference(
            x.double(),
            weight.double(),
            None if bias is None else bias.double(),
            tables.pages,
            tables.page_map,
            tables.directory,
            tables.shared,
            self.buffers.device_copy,
            gemm_of(number).first_site,
            list(GEMMS[number][1]),
            list(capacity_numbers(self.buffers.capacity)),
            list(self.features.numbers()),
        )
        return out


def gemm_of(number: int) -> Gemm:
    """Return the sites of the GEMM of this number."""
    return Gemm(first_site=sum(len(widths) for _, widths in GEMMS[:number]), widths=GEMMS[number][1])


def step_of(
    rows: Rows, *, prefill: bool, fixed: bool = False, buffers: StepBuffers | None = None, tokens: int | None = None
) -> Step:
    """Plan a step on the pool's adapters, in the given buffers or in new buffers for `tokens` tokens."""
    resident = pool()
    indices = {number: resident.resident[name] for number, name in enumerate(ADAPTERS)}
    if buffers is None:
        tokens = tokens or (96 if prefill else 32)
        capacity = Capacity(
            tokens=tokens,
            ranks=tokens * (PAIR_RANK if prefill else 16),
            pairs=len(resident.pairs),
            pair_ranks=PAIR_RANK,
            rotated=8,
            prefill=prefill,
        )
        buffers = StepBuffers(capacity, torch.device("cpu"))
    adapters = [-1 if row is None else indices[row] for row in rows]
    plan = plan_step(adapters, resident.facts, resident.pairs, buffers.capacity)
    buffers.fill(plan)
    features = features_of(plan, whole_granules=True)
    if fixed:
        features = fixed_features(buffers.capacity, max_adapters=16, whole_granules=True)
    return Step(rows=rows, buffers=buffers, features=features, tables=PoolTensors.of(resident.memory))


def site_of(step: Step, row: int, number: int, part: int) -> SiteTensors | None:
    """Return the tensors of a row's adapter at one slice of a GEMM; None where it has none."""
    adapter, (k, widths) = step.rows[row], GEMMS[number]
    if adapter is None:
        return None
    index = pool().resident[ADAPTERS[adapter]]
    return read_site(step.tables, index, gemm_of(number).first_site + part, (k, widths[part]))


def term_of(step: Step, row: int, number: int, part: int) -> TermTensors | None:
    """Return the low-rank term of a row's adapter at one slice of a GEMM; None where it has none."""
    site = site_of(step, row, number, part)
    return site.terms[0] if site is not None and site.terms else None


def check_delta_rows(kernel: Rotation, step: Step, number: int) -> None:
    """Compare a rotation's output with a copy of x and the reference's delta rows: zeros at sites without R."""
    x, *_ = inputs(number, len(step.rows), bias=False)
    slices = len(GEMMS[number][1])
    out = kernel(x, step.tables, step.buffers, gemm_of(number), step.features)
    assert out.shape == (len(x) + step.features.rotated * slices, x.shape[1])
    assert torch.equal(out[: len(x)], x)
    positions = step.buffers.region("rot_position")[: len(x)].tolist()
    assert sum(position >= 0 for position in positions) == step.features.rotated
    for row, position in enumerate(positions):
        for part in range(slices if position >= 0 else 0):
            site = site_of(step, row, number, part)
            exact = torch.zeros(x.shape[1], dtype=torch.float64)
            if site is not None and site.delta is not None and site.rotation is not None:
                exact = rotate(x[row].double(), site.delta.double(), site.rotation)
            delta = out[len(x) + position * slices + part]
            assert (delta - exact).norm() <= 1e-6 * exact.norm(), (row, part)


def inputs(number: int, rows: int, *, bias: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return input, weight and bias of one GEMM; row i does not depend on the number of rows."""
    k, widths = GEMMS[number]
    generator = torch.Generator().manual_seed(number)
    weight = torch.randn(sum(widths), k, generator=generator) * k**-0.5
    added = torch.randn(sum(widths), generator=generator)
    x = torch.stack([torch.randn(k, generator=generator) for _ in range(rows)])
    return x, weight, added if bias else None

"""Launching the kernels for one fused GEMM: what runs beside the GEMM, and what after it.

Decode: shrink and expand run on a side stream while the base GEMM runs, since neither needs its output; `combine` adds
their float32 result to the base's output. Prefill: the shrink runs beside the GEMM and the expand finishes the tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton

from scute_compile.runtime_min.kernels.combine import combine_kernel
from scute_compile.runtime_min.kernels.expand import expand_kernel
from scute_compile.runtime_min.kernels.prefill import prefill_expand_kernel, prefill_shrink_kernel
from scute_compile.runtime_min.kernels.rotate import rotate_kernel
from scute_compile.runtime_min.kernels.shrink import shrink_kernel
from scute_compile.runtime_min.step_plan import OWNED_ROWS, PAIR_RANKS, PAIR_TOKENS, TILE_TOKENS, StepBuffers

PROGRAMS = 132 * 16
"""Most programs of a decode launch; they take records of work in turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What a captured graph must be able to do; a feature that is off costs nothing."""

    owned: bool = True
    shared: bool = True
    rotated: int = 0
    """Capacity of rotated rows."""
    whole_granules: bool = True
    """Every rotation block's width is a multiple of a granule."""
    prefill: bool = False
    tiles: int = 0
    """Token tiles of a prefill step."""
    programs: int = PROGRAMS
    """Programs of the owned shrink per slice and run; from the plan's work."""
    beside: bool = True
    """Whether terms run on a side stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """One fused GEMM of the base: its sites are consecutive in the directory."""

    first_site: int
    widths: tuple[int, ...]
    """Output columns of each slice."""

    @property
    def padded(self) -> tuple[int, int, int]:
        """The widths with zeros for absent slices."""
        a, b, c = (*self.widths, 0, 0)[:3]
        return a, b, c


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTensors:
    """The resident pool's tensors."""

    pages: torch.Tensor
    page_map: torch.Tensor
    directory: torch.Tensor

    @property
    def values(self) -> int:
        """Values per granule."""
        return 16 // self.pages.element_size()


@dataclass(frozen=True, slots=True)
class _Split:
    parts: int
    step: int


def owned_split(k: int, values: int) -> _Split:
    """Return runs of K and granules per step of the owned shrink.

    4096 values per program keep 32 of A's values in each of 256 threads; longer inputs (`down_proj`) are cut in runs,
    so that a decode step has enough programs to fill the card.
    """
    granules = -(-k // values)
    parts = -(-granules // 512)
    return _Split(parts, triton.next_power_of_2(-(-granules // parts)))


def shared_split(k: int) -> int:
    """Return runs of K of the shared shrink: about 512 values each."""
    return max(1, min(32, k // 512))


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which terms run beside the GEMM; its programs go first where both wait for a place."""
    return torch.cuda.Stream(device, priority=-1)


def adapted_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, pool: PoolTensors, step: StepBuffers, gemm: Gemm,
    features: Features,
) -> torch.Tensor:  # fmt: skip
    """Return the adapted output `(T, N)` of one fused GEMM.

    Args:
        x: Inputs `(T, K)`, contiguous.
        weight: `(N, K)`.
        bias: `(N,)` or None.
        pool: Resident adapters.
        step: This step's metadata.
        gemm: Where the layer's sites stand.
        features: What the step may need.
    """
    tokens = x.shape[0]
    h, hs, delta = _buffers(x, weight, gemm, step, features)
    terms = features.owned or features.shared
    main = torch.cuda.current_stream(x.device) if x.is_cuda else None
    if terms and main is not None and features.beside:
        side = side_stream(x.device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            _terms(x, h, hs, delta, pool, step, gemm, features)
    elif terms:
        _terms(x, h, hs, delta, pool, step, gemm, features)
    with_rows = _rotate(x, pool, step, gemm, features) if features.rotated else x
    late_bias = bias is not None and features.rotated > 0
    y = torch.nn.functional.linear(with_rows, weight, None if late_bias else bias)
    if terms and main is not None and features.beside:
        main.wait_stream(side_stream(x.device))
    _finish(y, h, delta, bias if late_bias else None, pool, step, gemm, features, tokens)
    return y[:tokens] if features.rotated else y


def _buffers(
    x: torch.Tensor, weight: torch.Tensor, gemm: Gemm, step: StepBuffers, features: Features
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values = 16 // x.element_size()
    capacity = step.capacity
    slices = len(gemm.widths)
    parts = 1 if features.prefill else owned_split(x.shape[1], values).parts
    h = x.new_empty(parts * slices * capacity.ranks, dtype=torch.float32)
    rows = capacity.tokens if features.shared and not features.prefill else 0
    hs = x.new_empty(shared_split(x.shape[1]) * rows * 1024, dtype=torch.float32)
    delta = x.new_empty((0 if features.prefill else x.shape[0], weight.shape[0]), dtype=torch.float32)
    return h, hs, delta


def _terms(
    x: torch.Tensor, h: torch.Tensor, hs: torch.Tensor, delta: torch.Tensor, pool: PoolTensors, step: StepBuffers,
    gemm: Gemm, features: Features,
) -> None:  # fmt: skip
    region, k, values = step.region, x.shape[1], pool.values
    sites = pool.directory.shape[1]
    if features.prefill:
        grid = (features.tiles, len(gemm.widths), 1)
        prefill_shrink_kernel[grid](
            x, h, pool.pages, pool.page_map, pool.directory, region("tile"), region("seg_rows"), region("row_h"),
            sites, gemm.first_site, step.capacity.ranks,
            K=k, BLOCK_T=TILE_TOKENS, BLOCK_R=16, BLOCK_K=128, VALUES=values, num_warps=4, num_stages=3,
        )  # fmt: skip
        return
    split, split_s, slices = owned_split(k, values), shared_split(k), len(gemm.widths)
    hs_ranks = 1024
    programs = features.programs * slices * split.parts if features.owned else 0
    if features.shared:
        programs += 16 * split_s
    shrink_kernel[(max(1, min(programs, PROGRAMS)),)](
        x, h, hs, pool.pages, pool.page_map, pool.directory, region("counts"), region("row_slot"), region("seg_slot"),
        region("seg_start"), region("seg_rows"), region("row_h"), region("work"), region("swork"), region("block"),
        region("pair_rows"), region("pair"), sites, gemm.first_site, step.capacity.ranks, step.capacity.tokens, hs_ranks,
        K=k, SLICES=slices, SPLIT=split.parts, ROWS=OWNED_ROWS, STEP=split.step, SPLIT_S=split_s, BLOCK_K=128,
        VALUES=values, BLOCK_T=PAIR_TOKENS, BLOCK_R=PAIR_RANKS, HAS_OWNED=features.owned, HAS_SHARED=features.shared,
        num_warps=8,
    )  # fmt: skip
    n0, n1, n2 = gemm.padded
    block_n, block_ns = (512 if sum(gemm.widths) >= 16384 else 256), 64
    blocks = sum(triton.cdiv(n, block_n) for n in gemm.widths)
    programs = blocks * step.capacity.tokens if features.owned else 0
    if features.shared:
        programs += sum(triton.cdiv(n, block_ns) for n in gemm.widths) * (step.capacity.tokens // PAIR_TOKENS + 1)
    expand_kernel[(max(1, min(programs, PROGRAMS)),)](
        h, hs, delta, pool.pages, pool.page_map, pool.directory, region("counts"), region("row_slot"),
        region("seg_slot"), region("seg_start"), region("seg_rows"), region("row_h"), region("block"),
        region("pair_rows"), region("pair"), sites, gemm.first_site, step.capacity.ranks, step.capacity.tokens, hs_ranks,
        N0=n0, N1=n1, N2=n2, SLICES=slices, SPLIT=split.parts, BLOCK_N=block_n, BLOCK_R=16, SPLIT_S=split_s,
        BLOCK_NS=block_ns, BLOCK_RS=64, BLOCK_T=PAIR_TOKENS, VALUES=values,
        HAS_OWNED=features.owned, HAS_SHARED=features.shared, num_warps=8,
    )  # fmt: skip


def _rotate(x: torch.Tensor, pool: PoolTensors, step: StepBuffers, gemm: Gemm, features: Features) -> torch.Tensor:
    tokens, k = x.shape
    slices = len(gemm.widths)
    out = x.new_empty((tokens + features.rotated * slices, k))
    block = 256
    rotate_kernel[(out.shape[0], triton.cdiv(k, block))](
        x, out, pool.pages, pool.page_map, pool.directory, step.region("counts"), step.region("row_slot"),
        step.region("rot_rows"), pool.directory.shape[1], gemm.first_site, tokens,
        K=k, SLICES=slices, BLOCK=block, DEPTH=32, VALUES=pool.values, WHOLE_GRANULES=features.whole_granules,
        num_warps=4,
    )  # fmt: skip
    return out


def _finish(
    y: torch.Tensor, h: torch.Tensor, delta: torch.Tensor, bias: torch.Tensor | None, pool: PoolTensors,
    step: StepBuffers, gemm: Gemm, features: Features, tokens: int,
) -> None:  # fmt: skip
    n0, n1, n2 = gemm.padded
    region, sites = step.region, pool.directory.shape[1]
    given = bias if bias is not None else y
    if features.prefill:
        block_n = 128
        grid = (sum(triton.cdiv(n, block_n) for n in gemm.widths), features.tiles)
        prefill_expand_kernel[grid](
            y, h, given, pool.pages, pool.page_map, pool.directory, region("tile"), region("seg_rows"), region("row_h"),
            region("rot_position"), sites, gemm.first_site, step.capacity.ranks, tokens,
            N0=n0, N1=n1, N2=n2, SLICES=len(gemm.widths), BLOCK_T=TILE_TOKENS, BLOCK_N=block_n, BLOCK_R=16,
            VALUES=pool.values, HAS_ROTATION=features.rotated > 0, HAS_BIAS=bias is not None, num_warps=8, num_stages=2,
        )  # fmt: skip
        return
    block_n = 1024
    combine_kernel[(tokens, sum(triton.cdiv(n, block_n) for n in gemm.widths))](
        y, delta, given, pool.pages, pool.page_map, pool.directory, region("row_slot"), region("rot_position"),
        sites, gemm.first_site, tokens,
        N0=n0, N1=n1, N2=n2, SLICES=len(gemm.widths), BLOCK_N=block_n, VALUES=pool.values,
        HAS_TERMS=features.owned or features.shared, HAS_ROTATION=features.rotated > 0, HAS_BIAS=bias is not None,
        num_warps=4,
    )  # fmt: skip

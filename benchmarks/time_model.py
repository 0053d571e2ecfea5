"""Predicts the time of a decode step's kernels from the cost of launches and of reading bytes. Nothing is fitted.

Both costs are measured in the same run. Launches: the runtime's kernels with one tenant and a minimum of bytes. Bytes:
a kernel that only reads that many, uncached, by size. Delta rows of rotations: the base's GEMM with as many more rows.

Left out: activations, partial sums and the base's output, which mostly stay in a cache; the overlap of the expand with
the end of the shrink; the second read of a pair for tokens beyond sixteen. DoRA's launches count as LoRA's. A shared
pair counts as read from memory, although a cache may hold it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

READ_VALUES = 4096
"""Values that a program of the reading kernel adds up."""
SIZES = (0, *(1 << power for power in range(16, 27)))
"""Bytes per launch, up to 64 MiB."""
READS = 64
"""Launches that are timed together."""
FLUSH_BYTES = 1 << 28
"""Read before them, so that no bytes of the previous run are cached."""
Timed = Callable[[Callable[[], object]], float]
Gemm = tuple[str, int, tuple[int, ...]]


@triton.jit
def read_kernel(x_ptr, out_ptr, VALUES: tl.constexpr):  # noqa: ANN001, ANN201 - Triton gives them no types
    """Add up `VALUES` values per program."""
    at = tl.program_id(0).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    tl.store(out_ptr + tl.program_id(0), tl.sum(tl.load(x_ptr + at).to(tl.float32)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTimes:
    """Milliseconds by bytes read, beyond the time of a launch that reads a single run."""

    sizes: tuple[int, ...]
    times: tuple[float, ...]

    def __call__(self, size: float) -> float:
        """Return the time by linear interpolation; beyond the largest size, at its rate.

        >>> times = ReadTimes(sizes=(0, 10, 20), times=(0.0, 1.0, 3.0))
        >>> times(5), times(15), times(40)
        (0.5, 2.0, 6.0)
        """
        if size >= self.sizes[-1]:
            return self.times[-1] * size / self.sizes[-1]
        place = max(1, bisect_left(self.sizes, size))
        low, high = self.sizes[place - 1], self.sizes[place]
        before, after = self.times[place - 1], self.times[place]
        return before + (after - before) * (size - low) / (high - low)


def read_times(timed: Timed, device: torch.device) -> ReadTimes:
    """Measure the times of reads, each launch on bytes that earlier launches did not bring into the cache.

    Args:
        timed: Returns the milliseconds of a call.
        device: A GPU.
    """
    values = torch.randn(1 << 30, device=device).to(torch.bfloat16)
    out = torch.empty(len(values) // READ_VALUES, device=device)
    flush = torch.ones(FLUSH_BYTES // 4, device=device)

    def read(size: int) -> float:
        programs = max(1, size // (READ_VALUES * values.element_size()))
        starts = (len(values) - programs * READ_VALUES) // READ_VALUES + 1
        step = max(programs, starts // READS)

        def launches() -> None:
            flush.sum()
            for number in range(READS):
                first = number * step % starts * READ_VALUES  # aligned as whole runs are
                read_kernel[(programs,)](values[first:], out, VALUES=READ_VALUES)

        return timed(launches) / READS

    least = read(0)
    return ReadTimes(sizes=SIZES, times=tuple(max(0.0, read(size) - least) for size in SIZES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Bytes of adapters that the kernels of one GEMM read."""

    rotate: int
    shrink: int
    expand: int


def moved(methods: Sequence[tuple[str, int]], gemm: Gemm, *, pair_rank: int, block: int, size: int) -> Moved:
    """Return the bytes that a step with one row per adapter reads at a GEMM; all tenants of a pair share one read.

    Args:
        methods: Method and rank of each adapter.
        gemm: Its name, inputs, and the outputs of its slices.
        pair_rank: Of the shared pair.
        block: Width of rotation blocks.
        size: Bytes per value.

    >>> moved([("dora", 16), ("oft", 0)], ("o", 8, (4,)), pair_rank=0, block=2, size=2)
    Moved(rotate=32, shrink=256, expand=136)
    """
    _, inputs, widths = gemm
    outputs, count = sum(widths), {"lora": 0, "dora": 0, "ia3": 0, "oft": 0, "vera": 0}
    ranks = sum(rank for method, rank in methods if method in ("lora", "dora"))
    for method, _ in methods:
        count[method] += 1
    shared = pair_rank if count["vera"] else 0
    return Moved(
        rotate=size * count["oft"] * len(widths) * inputs * block,
        shrink=size * (ranks * len(widths) * inputs + count["vera"] * len(widths) * pair_rank + shared * inputs),
        expand=size
        * (
            (ranks + count["dora"] + count["vera"] + shared) * outputs + count["ia3"] * sum(widths[1:])  # k, v and up
        ),
    )


def modelled_ms(traffic: Sequence[Moved], methods: Sequence[str], read: ReadTimes, costs: Mapping[str, float]) -> float:
    """Return the milliseconds that kernels add at some GEMMs, without a rotation's rows in the GEMM itself.

    A mix launches one expand, one shrink if any adapter has low-rank terms, and one rotation if any rotates x.

    Args:
        traffic: Of each GEMM.
        methods: Of the adapters.
        read: The times of reads.
        costs: By method, the cost of a GEMM's launches with one tenant and a minimum of bytes.
    """
    expand = costs["ia3"]
    shrink = max((costs[method] - expand for method in {*methods} & {"lora", "dora", "vera"}), default=0.0)
    rotation = costs["oft"] - expand if "oft" in methods else 0.0
    return sum(
        expand + shrink + rotation + read(each.rotate) + read(each.shrink) + read(each.expand) for each in traffic
    )

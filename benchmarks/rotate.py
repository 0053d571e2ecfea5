"""Times the decode rotation alone, beside the bytes that it reads: one GPU, one call.

    PYTHONPATH=. python benchmarks/rotate.py --tenants 20

Shapes, adapters and timing are those of `decode_step.py`; milliseconds are of a step of 32 layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from decode_step import Pool, kernel_ms, kernel_table

from scute_compile.runtime_min.step import launch_decode
from scute_compile.runtime_min.step.arguments import Gemm

MIXES = [(f"oft, blocks of {block}", "oft", 16, block) for block in (8, 32, 64)]


def rotate_ms(pool: Pool, xs: Sequence[torch.Tensor]) -> float:
    """Return the time of a layer's four rotations in milliseconds."""

    def run(index: int, gemm: Gemm) -> None:
        launch_decode.rotate(xs[index], pool.tensors, pool.buffers, gemm, pool.features)

    return kernel_ms(run)


if __name__ == "__main__":
    kernel_table(__doc__, MIXES, rotate_ms, attrgetter("rotate"))

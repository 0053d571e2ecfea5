"""Times the decode rotation alone, beside the bytes that it reads: one GPU, one call.

    PYTHONPATH=. python benchmarks/rotate.py --tenants 20

Shapes, adapters and timing are those of `decode_step.py`; milliseconds are of a step of 32 layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from decode_step import DTYPE, GEMMS, LAYERS, Pool, ceilings, kernel_ms, kernel_options, normal
from time_model import moved

from scute_compile.runtime_min.step import launch_decode
from scute_compile.runtime_min.step.arguments import Gemm

BLOCKS = (8, 32, 64)
"""Widths of rotation blocks."""


def rotate_ms(pool: Pool, xs: Sequence[torch.Tensor]) -> float:
    """Return the time of a layer's four rotations in milliseconds."""

    def run(index: int, gemm: Gemm) -> None:
        launch_decode.rotate(xs[index], pool.tensors, pool.buffers, gemm, pool.features)

    return kernel_ms(run)


def main() -> None:
    """Measure and print the table."""
    tenants, (read, _) = kernel_options(__doc__), ceilings()
    xs = [normal(tenants, k) for _, k, _ in GEMMS]
    methods = [("oft", 16)] * tenants
    for block in BLOCKS:
        traffic = [moved(methods, gemm, pair_rank=0, block=block, size=DTYPE.itemsize).rotate for gemm in GEMMS]
        floor = LAYERS * sum(traffic) / read * 1e3
        taken = LAYERS * rotate_ms(Pool(methods, block=block), xs)
        print(f"oft, blocks of {block:<3d} {taken:6.3f} ms, floor by bytes {floor:6.3f}")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

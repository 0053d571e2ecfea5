"""Times the decode shrink alone, beside the bytes that it reads: one GPU, one call.

    PYTHONPATH=. python benchmarks/shrink.py --tenants 20

Shapes, adapters and timing are those of `decode_step.py`; milliseconds are of a step of 32 layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from decode_step import DTYPE, GEMMS, LAYERS, PAIR_RANK, Pool, ceilings, kernel_ms, kernel_options, normal
from time_model import moved

from scute_compile.runtime_min.step import launch_decode
from scute_compile.runtime_min.step.arguments import Gemm
from scute_compile.runtime_min.step.launch import empty_intermediates

MIXES = (("lora", 16), ("lora", 64), ("lora", 256), ("vera", 16))
"""Method and rank of all tenants; VeRA's pair has the rank of `PAIR_RANK`."""


def shrink_ms(pool: Pool, xs: Sequence[torch.Tensor]) -> float:
    """Return the time of a layer's four shrinks in milliseconds."""

    def run(index: int, gemm: Gemm) -> None:
        held = empty_intermediates(xs[index], gemm, pool.buffers, pool.features)
        launch_decode.shrink(xs[index], held, pool.tensors, pool.buffers, gemm, pool.features)

    return kernel_ms(run)


def main() -> None:
    """Measure and print the table."""
    tenants, (read, _) = kernel_options(__doc__), ceilings()
    xs = [normal(tenants, k) for _, k, _ in GEMMS]
    for method, rank in MIXES:
        methods = [(method, rank)] * tenants
        traffic = [moved(methods, gemm, pair_rank=PAIR_RANK, block=0, size=DTYPE.itemsize).shrink for gemm in GEMMS]
        floor = LAYERS * sum(traffic) / read * 1e3
        print(f"{method} {rank:<3d} {LAYERS * shrink_ms(Pool(methods), xs):6.3f} ms, floor by bytes {floor:6.3f}")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

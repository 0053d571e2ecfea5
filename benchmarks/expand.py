"""Times the decode expand alone, beside the bytes that it reads: one GPU, one call.

    PYTHONPATH=. python benchmarks/expand.py --tenants 20

Shapes, adapters and timing are those of `decode_step.py`; milliseconds are of a step of 32 layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from decode_step import BLOCK, GEMMS, Pool, kernel_ms, kernel_table, normal

from scute_compile.runtime_min.step import launch_decode
from scute_compile.runtime_min.step.arguments import Gemm
from scute_compile.runtime_min.step.launch import empty_intermediates

METHODS = (("lora", 16), ("lora", 64), ("lora", 256), ("dora", 16), ("ia3", 16), ("vera", 16))
"""Method and rank of all tenants; VeRA's pair has the rank of `PAIR_RANK` in `decode_step.py`."""
MIXES = [(f"{method} {rank}", method, rank, BLOCK) for method, rank in METHODS]


def expand_ms(pool: Pool, xs: Sequence[torch.Tensor]) -> float:
    """Return the time of a layer's four expands in milliseconds."""

    def run(index: int, gemm: Gemm) -> None:
        held = empty_intermediates(xs[index], gemm, pool.buffers, pool.features)
        launch_decode.expand(outputs[index], held, None, pool.tensors, pool.buffers, gemm, pool.features, len(xs[0]))

    outputs = [normal(len(xs[0]), sum(widths)) for _, _, widths in GEMMS]
    return kernel_ms(run)


if __name__ == "__main__":
    kernel_table(__doc__, MIXES, expand_ms, attrgetter("expand"))

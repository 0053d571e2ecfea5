"""Times reads through the page map, beside reads of as many contiguous bytes: one GPU, one call.

    PYTHONPATH=. python benchmarks/paging.py --tenants 20

Each program adds up 4096 values, by `load_row` in pages in random order, or by the kernel of `time_model.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from decode_step import DEVICE, DTYPE, kernel_options, median_ms
from time_model import READ_VALUES, read_kernel

from scute_compile.runtime_min.pool.directory import PAGE_BYTES
from scute_compile.runtime_min.step.kernels.paging import load_row

BYTES_PER_TENANT = tuple(1 << power for power in (18, 20, 22))


@triton.jit
def paged_kernel(pages_ptr, page_map_ptr, out_ptr, COUNT: tl.constexpr, VALUES: tl.constexpr):  # noqa: ANN001, ANN201 - Triton gives them no types
    """Add up `COUNT` values per program, read through the page map."""
    granule = tl.program_id(0) * (COUNT // VALUES) + tl.arange(0, COUNT // VALUES)
    values = load_row(pages_ptr, page_map_ptr, 0, granule, granule >= 0, VALUES)
    tl.store(out_ptr + tl.program_id(0), tl.sum(tl.sum(values.to(tl.float32), axis=1), axis=0))


def read_ms(size: int) -> tuple[float, float]:
    """Return the times of reading `size` bytes through the page map and without it, in milliseconds."""
    values = torch.randn(size // DTYPE.itemsize, device=DEVICE).to(DTYPE)
    page_map = torch.randperm(size // PAGE_BYTES, device=DEVICE).to(torch.int32)
    programs = len(values) // READ_VALUES
    out = torch.empty(programs, device=DEVICE)
    per_granule = 16 // DTYPE.itemsize
    paged = median_ms(lambda: paged_kernel[(programs,)](values, page_map, out, COUNT=READ_VALUES, VALUES=per_granule))
    return paged, median_ms(lambda: read_kernel[(programs,)](values, out, VALUES=READ_VALUES))


def main() -> None:
    """Measure and print the table."""
    tenants = kernel_options(__doc__)
    for size in BYTES_PER_TENANT:
        paged, contiguous = read_ms(tenants * size)
        print(f"{tenants * size / 1e6:7.1f} MB: {paged:6.3f} ms in pages, {contiguous:6.3f} ms contiguous")


if __name__ == "__main__":
    main()

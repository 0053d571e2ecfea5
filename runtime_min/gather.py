"""Reading tensors back out of pages, through the page map, on any device: what the kernels' addressing means."""

from __future__ import annotations

import torch

from scute_compile.runtime_min.record import GRANULE_BYTES, PAGE_GRANULES, granules


def read_rows(
    pages: torch.Tensor,
    page_map: torch.Tensor,
    *,
    first_page: int,
    offset: int,
    stride: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return a matrix whose rows start `stride` granules apart.

    **Semantics**: logical granule g lies in page `page_map[first_page + g // 128]`, at granule `g % 128` of it.

    Args:
        pages: All pages, `(num_pages, values per page)`.
        page_map: Physical pages by logical page, int32, flat.
        first_page: Where the image's pages start in `page_map`.
        offset: First granule of the matrix inside the image.
        stride: Granules per row.
        shape: Rows and values per row.
        dtype: Dtype of the values; it may differ from that of `pages`, whose bytes are taken as they are.
    """
    rows, width = shape
    lanes = torch.arange(granules(width, dtype), device=pages.device)
    granule = offset + torch.arange(rows, device=pages.device)[:, None] * stride + lanes
    physical = page_map[first_page + granule // PAGE_GRANULES].long()
    raw = pages.view(torch.uint8).view(-1, PAGE_GRANULES, GRANULE_BYTES)[physical, granule % PAGE_GRANULES]
    return raw.reshape(rows, -1).view(dtype)[:, :width].contiguous()


def read_run(
    pages: torch.Tensor,
    page_map: torch.Tensor,
    *,
    first_page: int,
    offset: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return a tensor whose values lie without gaps from granule `offset` on; see `read_rows`."""
    count = torch.Size(shape).numel()
    row = read_rows(
        pages, page_map, first_page=first_page, offset=offset, stride=0, shape=(1, count), dtype=dtype
    )  # fmt: skip
    return row.reshape(shape)

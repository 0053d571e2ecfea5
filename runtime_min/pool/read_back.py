"""Reading tensors back from pages through the page map, on any device: the reference for the kernels' addressing."""

from __future__ import annotations

from typing import Protocol

import torch

from scute_compile.runtime_min.pool.directory import GRANULE_BYTES, PAGE_GRANULES, Field, granules, values_per_granule


class Tables(Protocol):
    """The tensors that lead to an adapter, as in `DeviceMemory`."""

    @property
    def pages(self) -> torch.Tensor: ...

    @property
    def page_map(self) -> torch.Tensor: ...

    @property
    def directory(self) -> torch.Tensor: ...

    @property
    def shared(self) -> torch.Tensor: ...


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
        first_page: The adapter's first entry in `page_map`.
        offset: First granule of the matrix, from the adapter's first granule.
        stride: Granules per row.
        shape: Rows and values per row.
        dtype: Dtype of the values. It may differ from the dtype of `pages`, whose bytes are reinterpreted.
    """
    rows, width = shape
    lanes = torch.arange(granules(width, dtype), device=pages.device)
    granule = (offset + torch.arange(rows, device=pages.device)[:, None] * stride + lanes).flatten()
    physical = page_map[first_page + granule // PAGE_GRANULES].long() * PAGE_GRANULES + granule % PAGE_GRANULES
    # int64 views: the granules are only moved
    raw = pages.view(torch.int64).view(-1, GRANULE_BYTES // 8).index_select(0, physical)
    return raw.view(rows, -1).view(dtype)[:, :width].contiguous()


def read_run(
    pages: torch.Tensor,
    page_map: torch.Tensor,
    *,
    first_page: int,
    offset: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return a tensor whose values are contiguous from granule `offset` on; arguments as for `read_rows`."""
    count = torch.Size(shape).numel()
    row = read_rows(pages, page_map, first_page=first_page, offset=offset, stride=0, shape=(1, count), dtype=dtype)
    return row.reshape(shape)


_FACTORS = {
    Field.A_OFFSET: (Field.A_PAGES, Field.A_STRIDE),
    Field.B_OFFSET: (Field.B_PAGES, Field.B_STRIDE),
}


def read_field(memory: Tables, index: int, site: int, field: Field, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of a resident adapter, found through the directory.

    Args:
        memory: The device's tensors.
        index: The adapter index.
        site: Index of the directory entry.
        field: One of the fields `*_OFFSET`.
        shape: Shape of the result: two dimensions for A and B, any for the others.

    Raises:
        ValueError: when the tensor is absent, or `field` is not an offset.
    """
    row = memory.directory[index, site].tolist()
    if not field.name.endswith("_OFFSET") or row[field] < 0:
        raise ValueError(f"{field.name} of site {site} is absent in the adapter at index {index}")
    if field in _FACTORS:
        first_page, stride = (row[part] for part in _FACTORS[field])
        rows, width = shape
        if row[Field.PAIR] >= 0:
            start = row[field] * values_per_granule(memory.shared.dtype)
            step = stride * values_per_granule(memory.shared.dtype)
            return memory.shared.reshape(-1)[start : start + rows * step].view(rows, step)[:, :width].contiguous()
        return read_rows(
            memory.pages,
            memory.page_map,
            first_page=first_page,
            offset=row[field],
            stride=stride,
            shape=(rows, width),
            dtype=memory.pages.dtype,
        )
    return read_run(
        memory.pages,
        memory.page_map,
        first_page=row[Field.OWN_PAGES],
        offset=row[field],
        shape=shape,
        dtype=torch.float32 if field is Field.SHIFT_OFFSET else memory.pages.dtype,
    )

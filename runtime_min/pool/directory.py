"""The layout of adapters in device memory: pages, granules, and the fields of a directory row.

An adapter is a contiguous sequence of granules of 16 bytes. Every tensor starts at a granule, and rows of A and B are
padded to whole granules. `page_map` holds the physical page of each 2 KiB of the sequence, so an adapter's pages may
lie anywhere. Shared factors lie in separate memory, in which each factor is contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

PAGE_BYTES = 2048
GRANULE_BYTES = 16
PAGE_GRANULES = PAGE_BYTES // GRANULE_BYTES
FIELDS = 16
"""int32 values of a directory row."""


class Field(IntEnum):
    """Fields of the row `directory[adapter index, site]`. Offsets count granules; -1 stands for an absent tensor."""

    RANK = 0
    """0 without a low-rank term."""
    A_PAGES = 1
    """First entry in `page_map` of the pages that hold A; -1 for a shared factor."""
    A_OFFSET = 2
    """From the adapter's first granule; from the start of the shared memory where `PAIR` is not -1."""
    A_STRIDE = 3
    """Granules per row."""
    B_PAGES = 4
    B_OFFSET = 5
    B_STRIDE = 6
    OWN_PAGES = 7
    """First entry in `page_map` of the adapter's pages."""
    DS_OFFSET = 8
    SHIFT_OFFSET = 9
    """The values are float32, whatever the pool's dtype."""
    D_OFFSET = 10
    E_OFFSET = 11
    R_OFFSET = 12
    R_BLOCK = 13
    """Width of a rotation block; 1 for a diagonal, 0 without a rotation."""
    R_SHARED = 14
    """1 where one stored block repeats."""
    PAIR = 15
    """Index of the shared pair; -1 where the adapter owns its factors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryEntry:
    """A linear layer, or a part of its outputs, as one rank holds it; its index is its position in the sequence."""

    name: str
    in_features: int
    out_features: int
    gemm: str
    """The fused site; slices of one GEMM are consecutive entries."""
    part: tuple[int, int] | None = None
    """The interval of the layer's outputs, where a layer has several entries; None for all outputs."""

    @property
    def key(self) -> str:
        """The unique name of the entry.

        >>> DirectoryEntry(name="o_proj", in_features=4, out_features=2, gemm="o_proj", part=(2, 4)).key
        'o_proj[2:4]'
        """
        return self.name if self.part is None else f"{self.name}[{self.part[0]}:{self.part[1]}]"


def values_per_granule(dtype: torch.dtype) -> int:
    """Return the number of values of `dtype` in a granule.

    >>> values_per_granule(torch.bfloat16), values_per_granule(torch.float32)
    (8, 4)
    """
    return GRANULE_BYTES // dtype.itemsize


def granules(values: int, dtype: torch.dtype) -> int:
    """Return the number of granules that a row of `values` values takes.

    >>> granules(20, torch.bfloat16)
    3
    """
    return -(-values // values_per_granule(dtype))


def pages_of(size: int) -> int:
    """Return the number of pages that `size` bytes take.

    >>> pages_of(2049)
    2
    """
    return -(-size // PAGE_BYTES)


def absent_rows(sites: int) -> torch.Tensor:
    """Return the directory rows, int32 `(sites, 16)`, of an adapter without tensors."""
    rows = torch.full((sites, FIELDS), -1, dtype=torch.int32)
    rows[:, [Field.RANK, Field.R_BLOCK, Field.R_SHARED]] = 0
    return rows

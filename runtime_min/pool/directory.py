"""How adapters lie in device memory: pages, granules, and the fields of a directory record.

An adapter is one logical run of granules of 16 bytes. Every tensor starts at a granule, and rows of A and B are padded
to whole granules. `page_map` says which physical page holds each 2 KiB of the run, so that any page serves any adapter.
Shared factors lie apart, each in one piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

PAGE_BYTES = 2048
GRANULE_BYTES = 16
PAGE_GRANULES = PAGE_BYTES // GRANULE_BYTES
FIELDS = 16


class Field(IntEnum):
    """Fields of the record that `directory[slot, site]` holds; offsets count granules, -1 says absent."""

    RANK = 0
    """0: no low-rank term."""
    A_PAGES = 1
    """Where the pages of A's packed start in `page_map`; -1 for a shared factor."""
    A_OFFSET = 2
    """In the packed; in the memory of shared factors where `PAIR` is not -1."""
    A_STRIDE = 3
    """Granules per row."""
    B_PAGES = 4
    B_OFFSET = 5
    B_STRIDE = 6
    OWN_PAGES = 7
    """Where the pages of the adapter's own packed start in `page_map`."""
    DS_OFFSET = 8
    SHIFT_OFFSET = 9
    """Of float32 values, whatever the pool's dtype."""
    D_OFFSET = 10
    E_OFFSET = 11
    R_OFFSET = 12
    R_BLOCK = 13
    """Width of a rotation block; 1: a diagonal; 0: no rotation."""
    R_SHARED = 14
    """1: one stored block repeats."""
    PAIR = 15
    """Index of the shared pair; -1: the factors are the adapter's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectoryEntry:
    """One linear layer that adapters may touch, as one rank holds it; its place in the sequence is its index."""

    name: str
    in_features: int
    out_features: int
    gemm: str
    """The fused site; slices of one GEMM stand side by side."""
    part: tuple[int, int] | None = None
    """Which of the layer's outputs it is, where a layer is several slots; None: all of them."""

    @property
    def key(self) -> str:
        """What tells it from all others.

        >>> DirectoryEntry(name="o_proj", in_features=4, out_features=2, gemm="o_proj", part=(2, 4)).key
        'o_proj[2:4]'
        """
        return self.name if self.part is None else f"{self.name}[{self.part[0]}:{self.part[1]}]"


def values_per_granule(dtype: torch.dtype) -> int:
    """Return how many values of `dtype` a granule holds.

    >>> values_per_granule(torch.bfloat16), values_per_granule(torch.float32)
    (8, 4)
    """
    return GRANULE_BYTES // dtype.itemsize


def granules(values: int, dtype: torch.dtype) -> int:
    """Return how many granules `values` in a row take.

    >>> granules(20, torch.bfloat16)
    3
    """
    return -(-values // values_per_granule(dtype))


def pages_of(size: int) -> int:
    """Return how many pages `size` bytes take.

    >>> pages_of(2049)
    2
    """
    return -(-size // PAGE_BYTES)


def absent_records(sites: int) -> torch.Tensor:
    """Return the int32 records `(sites, 16)` of an adapter that touches nothing."""
    records = torch.full((sites, FIELDS), -1, dtype=torch.int32)
    records[:, [Field.RANK, Field.R_BLOCK, Field.R_SHARED]] = 0
    return records

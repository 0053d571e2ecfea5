"""The device functions that read paged adapters, each called by a small kernel that stores what it reads."""

from __future__ import annotations

import pytest
import torch

from scute_compile.runtime_min.pool.directory import PAGE_GRANULES, Field
from scute_compile.runtime_min.step.kernels import paging
from tests.kernels.probes import field_kernel, place_kernel, slice_kernel, tensor_kernel
from tests.kernels.steps import GEMMS, SITES, pool
from tests.runtime_min.pool.small_adapters import read_back

VALUES = 4
"""Values of a granule in float32."""


@pytest.mark.parametrize("known", Field, ids=lambda known: known.name)
def test_kernels_and_the_pool_have_the_same_fields(known: Field) -> None:
    directory = pool().memory.directory
    out = torch.empty(directory.shape[0] * directory.shape[1], dtype=torch.int32)
    constant = getattr(paging, known.name)
    field_kernel[(len(out),)](out, directory, directory.shape[2], FIELD=constant)
    assert torch.equal(out, directory[:, :, known].flatten())


def test_a_granule_lies_in_the_page_that_the_map_gives() -> None:
    memory = pool().memory
    row = memory.directory[pool().resident["dora-16"], 3]
    first, count = int(row[Field.OWN_PAGES]), 4 * PAGE_GRANULES
    out = torch.empty(count, dtype=torch.int64)
    place_kernel[(1,)](out, memory.page_map, first, COUNT=count)
    pages = memory.page_map[first : first + 4].long()
    assert out.tolist() == [int(page) * PAGE_GRANULES + inside for page in pages for inside in range(PAGE_GRANULES)]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("dora-16", Field.DS_OFFSET),
        ("dora-16", Field.SHIFT_OFFSET),
        ("ia3", Field.DS_OFFSET),
        ("vera", Field.E_OFFSET),
        ("vera-2", Field.E_OFFSET),
    ],
)
def test_every_load_reads_what_the_pool_wrote(name: str, known: Field) -> None:
    memory, adapter = pool().memory, pool().resident[name]
    for number, site in enumerate(SITES):
        row = memory.directory[adapter, number].tolist()
        size, count = site.out_features, 64
        out = torch.empty(4, count)
        tensor_kernel[(1,)](
            out, memory.pages, memory.page_map, row[Field.OWN_PAGES], row[known], size, COUNT=count, VALUES=VALUES
        )
        exact = read_back(pool(), adapter, site.key, known, (size,))
        assert all(torch.equal(loaded[:size], exact) for loaded in out)
        assert not out[0, size:].any()


def test_no_block_of_columns_spans_two_slices() -> None:
    widths = GEMMS[0][1]
    blocks = [-(-width // 48) for width in widths]
    out = torch.empty(sum(blocks), 4, dtype=torch.int32)
    slice_kernel[(len(out),)](out, BLOCK=48, N0=widths[0], N1=widths[1], N2=widths[2])
    assert out.tolist() == [
        [which, 48 * block, width, sum(widths[:which])]
        for which, width in enumerate(widths)
        for block in range(blocks[which])
    ]

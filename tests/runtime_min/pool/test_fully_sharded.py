"""Rows of fully sharded terms in the pool's layout give whole intermediates after an all-gather."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scute_compile.base.cuts import shares
from scute_compile.diagnostics import ScuteError
from scute_compile.formats.manifest import SiteRecord, TermRecord
from scute_compile.ir.linear import Split
from scute_compile.runtime_min.pool.directory import DirectoryEntry
from scute_compile.runtime_min.pool.fully_sharded import owned_term, pair_rows, split_outputs
from scute_compile.runtime_min.pool.packed_adapter import SiteContent
from scute_compile.runtime_min.ranks.cut import LayerCut, exchanges_of
from scute_compile.runtime_min.ranks.exchange import take_rows
from scute_compile.runtime_min.ranks.group import RankGroup
from tests.runtime_min.oracle.test_adapted_model import drawn

WHOLE = TermRecord(rank=7, a=None, b=None, d=False, e=False, rows=None, columns=None)


def all_gathered(held: list[torch.Tensor]) -> torch.Tensor:
    """Return whole intermediates `(T, R)` from the ranks' entries, as `TermExchange.complete` does."""
    flat = torch.stack([part.reshape(-1) for part in held])
    return flat.t().reshape(held[0].shape[0], -1)


@given(st.integers(1, 40), st.integers(2, 5))
def test_ranks_rows_give_the_whole_product_from_equally_many_entries(rank: int, tp: int) -> None:
    x, a, b, d = drawn(3, 8, seed=1), drawn(rank, 8, seed=2), drawn(rank, 6, seed=3), drawn(rank, seed=4)
    term = WHOLE.model_copy(update={"rank": rank, "rows": shares(rank, tp)})
    assert term.rows is not None
    terms = [owned_term(a[start:stop], b, term, number) for number, (start, stop) in enumerate(term.rows)]
    assert {len(part.a) for part in terms} == {-(-rank // tp)}
    assert (all_gathered([x @ part.a.T for part in terms]) @ terms[0].b - x @ a.T @ b).abs().max() < 1e-4
    held = []
    for number, (start, stop) in enumerate(term.rows):
        rows = pair_rows(term, number)
        assert rows is not None
        held.append(x @ take_rows(a, rows.a.order).T * rows.d_of(d[start:stop]))
        last = take_rows(b, rows.b.order)
    assert (all_gathered(held) @ last - x @ a.T * d @ b).abs().max() < 1e-4


def test_a_pair_has_the_same_rank_at_column_and_row_parallel_layers() -> None:
    row = pair_rows(WHOLE.model_copy(update={"columns": ((0, 2), (2, 4), (4, 6))}), 1)
    column = pair_rows(WHOLE.model_copy(update={"rows": shares(7, 3)}), 1)
    assert row is not None
    assert column is not None
    assert len(row.a.order) == len(row.b.order) == len(column.b.order) == 3 * len(column.a.order) == 9
    # equal windows of one factor are packed once only if their rows are equal
    assert row.b.name != column.b.name
    assert row.a.name != column.a.name


def test_terms_for_outputs_without_a_directory_entry_are_refused() -> None:
    term = WHOLE.model_copy(update={"columns": ((0, 3), (3, 6))})
    record = SiteRecord(
        name="down",
        in_features=8,
        out_features=6,
        gemm="down",
        split=Split.ROW,
        inputs=(((0, 4),), ((4, 8),)),
        outputs=(((0, 6),), ((0, 6),)),
        rotation=None,
        scale=False,
        shift=False,
        shift_rank=0,
        terms=(term,),
        live=(),
    )
    content = SiteContent(in_features=4, out_features=6)
    parts = [
        DirectoryEntry(name="down", in_features=4, out_features=3, gemm="down", part=part) for part in ((0, 3), (3, 6))
    ]
    assert list(split_outputs(record, 1, content, parts)) == ["down[0:3]", "down[3:6]"]
    with pytest.raises(ScuteError, match="SC402") as refused:
        split_outputs(record, 1, content, [replace(part, part=(0, 2)) for part in parts])
    assert "outputs 3 to 6 on rank 1" in str(refused.value)


def test_a_layer_with_fewer_outputs_than_ranks_is_refused() -> None:
    cut = LayerCut(split=Split.ROW, inputs=(), outputs=(), out_features=0, local=False)
    with pytest.raises(ScuteError, match="SC501"):
        exchanges_of({"down": cut}, RankGroup())
    wide = replace(cut, out_features=2)
    assert exchanges_of({"down": wide}, RankGroup())["down"].part == (0, 2)

"""Defines the tensors of a rank file and their shapes, for the writer and for readers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from scute_compile.formats.manifest import SiteRecord, TermRecord
from scute_compile.ir.dtypes import DType
from scute_compile.ir.expressions import Ranges, Shape, width
from scute_compile.ir.program import RotationKind

SHIFT_DTYPE = DType.FLOAT32
"""The dtype of `b`. It cancels against the base's bias, which may be a hundred times the adapter's effect."""


def tensor_name(site: str, slot: str, term: int | None = None) -> str:
    """Return the name of a slot's tensor.

    >>> tensor_name("mlp.up_proj", "ds"), tensor_name("mlp.up_proj", "A", 0)
    ('mlp.up_proj.ds', 'mlp.up_proj.terms.0.A')
    """
    return f"{site}.{slot}" if term is None else f"{site}.terms.{term}.{slot}"


def rank_layout(site: SiteRecord, rank: int, dtype: DType) -> Mapping[str, tuple[DType, Shape]]:
    """Return dtype and shape of every tensor of a site in the file of `rank`, which holds no shared factors.

    Returns:
        By tensor name: `dR` is `(blocks, size, size)` or `(in,)`, `ds` and `b` are `(out,)`, `A` is `(rank, in)`, `B`
        is `(rank, out)`, `d` is `(rank,)`, `e` is `(out,)`. `in` and `out` are widths on this rank; in a fully sharded
        term so are `rank` of A and d, or `out` of B and e.
    """
    inputs, outputs = width(site.inputs[rank]), width(site.outputs[rank])
    tensors: dict[str, tuple[DType, Shape]] = {}
    if site.rotation is not None:
        tensors[tensor_name(site.name, "dR")] = (dtype, _rotation_shape(site, inputs))
    if site.scale:
        tensors[tensor_name(site.name, "ds")] = (dtype, (outputs,))
    if site.shift:
        tensors[tensor_name(site.name, "b")] = (SHIFT_DTYPE, (outputs,))
    for number, term in enumerate(site.terms):
        rows = width(term_rows(term, rank))
        columns = width(term_columns(site, term, rank))
        shapes: tuple[tuple[str, bool, Shape], ...] = (
            ("A", term.a is None, (rows, inputs)),
            ("B", term.b is None, (term.rank, columns)),
            ("d", term.d, (rows,)),
            ("e", term.e, (columns,)),
        )
        for slot, held, shape in shapes:
            if held:
                tensors[tensor_name(site.name, slot, number)] = (dtype, shape)
    return tensors


def term_rows(term: TermRecord, rank: int) -> Ranges:
    """Return the ranges of a term's rank whose rows of A and entries of d lie on `rank`."""
    return ((0, term.rank),) if term.rows is None else (term.rows[rank],)


def term_columns(site: SiteRecord, term: TermRecord, rank: int) -> Ranges:
    """Return the ranges of a site's outputs whose columns of B and entries of e lie on `rank`."""
    return site.outputs[rank] if term.columns is None else (term.columns[rank],)


def file_layout(sites: Iterable[SiteRecord], rank: int, dtype: DType) -> Mapping[str, tuple[DType, Shape]]:
    """Return dtype and shape of every tensor in the file of `rank`."""
    return {name: entry for site in sites for name, entry in rank_layout(site, rank, dtype).items()}


def _rotation_shape(site: SiteRecord, inputs: int) -> Shape:
    if site.rotation is None or site.rotation.kind is RotationKind.DIAGONAL:
        return (inputs,)
    size = site.rotation.block
    return (1 if site.rotation.blocks == 1 else inputs // size, size, size)

"""A rank's part of one linear layer of a model, with the adapters of the batch: reference operations and collectives.

All ranks run the same layers on the same batch, so that each meets the others in every transfer. What an adapter adds
is computed in float32 or wider, from the base's product in the dtype of the model. Row-parallel: partial sums are added
up in `reduce_dtype`, with whatever adapters put into them. Shape suffixes are those of
`scute_compile.runtime_min.reference`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from scute_compile.diagnostics import Code, fail
from scute_compile.ir.expressions import width
from scute_compile.ir.linear import Split
from scute_compile.runtime_min.oracle.fully_sharded import FullyShardedTerm, add_part, shrink_part
from scute_compile.runtime_min.oracle.site_tensors import RankSite
from scute_compile.runtime_min.ranks.cut import CutLayer, join_outputs
from scute_compile.runtime_min.ranks.group import Purpose, RankGroup
from scute_compile.runtime_min.reference import apply_site, rotate, take, wide


@dataclass(slots=True, kw_only=True, eq=False)
class RankStep:
    """The adapters of one call, shared by all layers."""

    rows: tuple[str | None, ...] = ()
    """One adapter id, or None, per row of the batch."""
    _places: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)

    def set(self, rows: Sequence[str | None]) -> None:
        """Begin a step."""
        self.rows = tuple(rows)
        self._places = {}

    def places(self, adapter: str, length: int, device: torch.device) -> torch.Tensor:
        """Return which entries of a first dimension of `length` belong to an adapter; it may hold several per row."""
        if length % len(self.rows):
            fail(
                Code.SC703,
                where="adapter_names",
                found=f"{len(self.rows)} adapter ids for {length} rows",
                expected="one id per row of the batch",
                next="pass None for rows that the base serves alone",
            )
        key = (adapter, length)
        if key not in self._places:
            each = length // len(self.rows)
            owned = [row * each + i for row, owner in enumerate(self.rows) if owner == adapter for i in range(each)]
            self._places[key] = torch.tensor(owned, device=device)
        return self._places[key]


class RankLinear(torch.nn.Module):
    """Stands in the place of a linear layer and holds one rank's part of its weight.

    Args:
        layer: The rank's part of the base.
        ranks: The ranks together.
        step: What all layers read.
        reduce_dtype: In which partial sums are added up; None: float32 or wider.
    """

    def __init__(
        self, layer: CutLayer, ranks: RankGroup, step: RankStep, *, reduce_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(layer.weight, requires_grad=False)
        self.bias = None if layer.bias is None else torch.nn.Parameter(layer.bias, requires_grad=False)
        self.cut, self.ranks, self.step, self.reduce_dtype = layer.cut, ranks, step, reduce_dtype
        self.sites: dict[str, RankSite] = {}
        """What the rank holds of each adapter at this layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output `(..., out)`, or this rank's part of it; rounded once, to the dtype of `x`."""
        cut, rank = self.cut, self.ranks.rank
        part = x if cut.split is not Split.ROW or cut.arrives_cut else take(x, -1, cut.inputs[rank])
        y = torch.nn.functional.linear(part, self.weight, self.bias)
        touched = [name for name in sorted(self.sites) if name in self.step.rows]
        out = self._adapted(part, y, touched) if touched else y
        if cut.split is Split.ROW:
            dtype = wide(out) if self.reduce_dtype is None else self.reduce_dtype
            return self.ranks.all_reduce(out.to(dtype), Purpose.BASE).to(x.dtype)
        out = out.to(x.dtype)
        whole = cut.split is not Split.COLUMN or cut.leaves_cut
        return out if whole else join_outputs(self.ranks.gather(out, Purpose.OUTPUTS), cut)

    def _adapted(self, x: torch.Tensor, y: torch.Tensor, touched: Sequence[str]) -> torch.Tensor:
        """Return what this rank computes for all rows, in the wide dtype."""
        sites = [self.sites[name] for name in touched]
        places = [self.step.places(name, x.shape[0], x.device) for name in touched]
        inputs = [x[rows] for rows in places]
        hs = self._exchanged(inputs, sites)
        out = y.to(wide(y), copy=True)
        for own_x, rows, site, whole in zip(inputs, places, sites, hs, strict=True):
            tensors, delta_y = site.tensors, None
            if tensors.rotation is not None and tensors.delta is not None:
                turned = rotate(own_x, tensors.delta, tensors.rotation).to(self.weight.dtype)
                delta_y = torch.nn.functional.linear(turned, self.weight)
            own = apply_site(out[rows], own_x, delta_y, tensors, out_dtype=out.dtype)
            for h, term in zip(whole, site.sharded, strict=True):
                own = add_part(own, h, term)
            out[rows] = own
        return out

    def _exchanged(self, inputs: Sequence[torch.Tensor], sites: Sequence[RankSite]) -> list[list[torch.Tensor]]:
        """Return the whole intermediates of every site's fully sharded terms, `(..., R)`: one transfer for all."""
        terms = [(x, term) for x, site in zip(inputs, sites, strict=True) for term in site.sharded]
        if not terms:
            return [[] for _ in sites]
        parts = [shrink_part(x, term) for x, term in terms]
        if self.cut.split is Split.COLUMN:
            whole = iter(self._gathered(parts, [term for _, term in terms]))
        else:
            flat = self.ranks.all_reduce(torch.cat([part.flatten() for part in parts]), Purpose.ADAPTERS)
            pieces = torch.split(flat, [part.numel() for part in parts])
            whole = iter([piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)])
        return [[next(whole) for _ in site.sharded] for site in sites]

    def _gathered(self, parts: Sequence[torch.Tensor], terms: Sequence[FullyShardedTerm]) -> list[torch.Tensor]:
        """Put the ranks' entries of each intermediate side by side; where ranks hold fewer, they send some zeros."""
        ranks = range(self.ranks.size)
        lengths = [
            [part.shape[:-1].numel() * (stop - start) for start, stop in term.shares]
            for part, term in zip(parts, terms, strict=True)
        ]
        sums = [sum(length[rank] for length in lengths) for rank in ranks]
        flat = torch.cat([part.flatten() for part in parts])
        padded = torch.nn.functional.pad(flat, (0, max(sums) - flat.numel()))
        every = self.ranks.gather(padded, Purpose.ADAPTERS)
        cuts = [torch.split(every[rank][: sums[rank]], [length[rank] for length in lengths]) for rank in ranks]
        shapes = [
            [(*part.shape[:-1], stop - start) for start, stop in term.shares]
            for part, term in zip(parts, terms, strict=True)
        ]
        return [torch.cat([cuts[rank][i].view(shape[rank]) for rank in ranks], -1) for i, shape in enumerate(shapes)]

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        rank = self.ranks.rank
        held = f"in={width(self.cut.inputs[rank])}, out={width(self.cut.outputs[rank])}"
        return f"{held}, {self.cut.split}, rank {rank} of {self.ranks.size}"

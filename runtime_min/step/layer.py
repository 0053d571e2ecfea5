"""A linear layer of a served model: the custom operator where the step's adapters change it, else the plain layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from scute_compile.diagnostics import Code, fail
from scute_compile.runtime_min.pool.directory import Field
from scute_compile.runtime_min.pool.packed_adapter import PackedAdapter
from scute_compile.runtime_min.ranks.exchange import TermExchange
from scute_compile.runtime_min.step.arguments import Features, PoolTensors, capacity_numbers
from scute_compile.runtime_min.step.op import adapted_linear, exchanged_linear
from scute_compile.runtime_min.step.plan import StepBuffers


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedFacts:
    """Facts about a loaded adapter. Layers are identified by the indices of their directory entries."""

    sites: frozenset[int]
    """The layers that it changes."""
    terms: frozenset[int]
    """The layers where it has low-rank terms."""

    @classmethod
    def of(cls, packed: PackedAdapter) -> LoadedFacts:
        """Return the facts about a packed adapter, from its directory rows."""
        rows = packed.rows
        has_term = rows[:, Field.RANK] > 0
        has_vector = (rows[:, [Field.R_OFFSET, Field.DS_OFFSET, Field.SHIFT_OFFSET]] >= 0).any(1)
        sites, terms = (mask.nonzero().flatten().tolist() for mask in (has_term | has_vector, has_term))
        return cls(sites=frozenset(sites), terms=frozenset(terms))


@dataclass(slots=True, kw_only=True, eq=False)
class StepState:
    """What all layers read in one step; the tensors keep their addresses from step to step."""

    tables: PoolTensors
    buffer: torch.Tensor
    """The step's metadata, int32."""
    capacity: list[int] = field(default_factory=list)
    features: list[int] = field(default_factory=list)
    tokens: int = 0
    """Number of rows of each call of an adapted layer."""

    def set_launch(self, buffers: StepBuffers, features: Features) -> None:
        """Set the step that the layers read in their next calls."""
        self.buffer = buffers.device_copy
        self.capacity, self.features = list(capacity_numbers(buffers.capacity)), list(features.numbers())


class ServedLinear(torch.nn.Module):
    """Replaces one layer and shares its parameters, under the same names.

    Args:
        layer: `nn.Linear` or transformers' `Conv1D`.
        site: Index of its directory entry; the first index if the layer has several entries.
        name: Its path in the model.
        step: The state of the step, which all layers share.
        exchange: How ranks complete the intermediates of its terms; None where they exchange nothing.
    """

    def __init__(
        self, layer: torch.nn.Module, site: int, name: str, step: StepState, exchange: TermExchange | None = None
    ) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.training = layer.training
        self.plain = (layer,)
        """The replaced layer, in a tuple, so that its parameters are not listed twice."""
        self.transposed = not isinstance(layer, torch.nn.Linear)
        self.site, self.name, self.step = site, name, step
        self.active = False
        """Whether an adapter of the step changes the layer."""
        self.exchange = exchange
        self.exchanges = False
        """Whether an adapter of the step has terms at the layer."""
        outputs = int(self.weight_NK.shape[0])
        parts = (None,) if exchange is None else exchange.parts(outputs)
        self.widths = [outputs if part is None else part[1] - part[0] for part in parts]

    @property
    def sites(self) -> range:
        """Indices of its directory entries."""
        return range(self.site, self.site + len(self.widths))

    @property
    def weight_NK(self) -> torch.Tensor:  # noqa: N802 - the suffix is a shape
        """The weight as `(out, in)`; a view for a Conv1D, which stores `(in, out)`, since GEMMs take either order."""
        weight = self.weight
        assert isinstance(weight, torch.Tensor)  # noqa: S101 - narrows the type of a module's attribute
        return weight.T if self.transposed else weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output `(..., out)` for `(..., in)`."""
        if not self.active:
            y: torch.Tensor = self.plain[0](x)
            return y
        step, bias = self.step, self.bias
        assert bias is None or isinstance(bias, torch.Tensor)  # noqa: S101 - likewise
        rows = x.reshape(-1, x.shape[-1])
        if rows.shape[0] != step.tokens:
            self._refuse(rows.shape[0])
        tables = step.tables
        tensors = (tables.pages, tables.page_map, tables.directory, tables.shared, step.buffer)
        numbers = (self.site, self.widths, step.capacity, step.features)
        out: torch.Tensor
        if self.exchange is not None and self.exchanges:
            out = exchanged_linear(rows, self.weight_NK, bias, *tensors, *numbers, self.exchange)
        else:
            out = adapted_linear(rows, self.weight_NK, bias, *tensors, *numbers)
        return out.reshape(*x.shape[:-1], -1)

    def extra_repr(self) -> str:
        """Return what `print(model)` shows."""
        return f"{self.name}, out={sum(self.widths)}"

    def _refuse(self, rows: int) -> None:
        fail(
            Code.SC703,
            where=self.name,
            found=f"{rows} rows in a step of {self.step.tokens} tokens",
            expected="a layer that runs once on every token of the batch",
            next="serve a model that runs its adapted layers on all tokens, or leave the layer out when training",
        )

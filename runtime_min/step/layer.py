"""A linear layer of a served model: the custom op where the step's adapters touch it, the plain layer elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from scute_compile.diagnostics import Code, fail
from scute_compile.runtime_min.ranks.exchange import TermExchange
from scute_compile.runtime_min.step.op import adapted_linear, exchanged_linear


@dataclass(slots=True, kw_only=True, eq=False)
class StepState:
    """What all layers read in one step; the tensors keep their places from step to step."""

    pages: torch.Tensor
    page_map: torch.Tensor
    directory: torch.Tensor
    shared: torch.Tensor
    buffer: torch.Tensor
    """The step's metadata, int32."""
    capacity: list[int] = field(default_factory=list)
    features: list[int] = field(default_factory=list)
    tokens: int = 0
    """Rows that every adapted layer must see."""


class ServedLinear(torch.nn.Module):
    """Stands in the place of one layer and shares its parameters, under the same names.

    Args:
        layer: `nn.Linear` or transformers' `Conv1D`.
        site: Its index in the directory; of its first part, where it is several.
        name: Its path in the model.
        step: What all layers read.
        exchange: How ranks complete the intermediates of its terms; None where they exchange none.
    """

    def __init__(
        self, layer: torch.nn.Module, site: int, name: str, step: StepState, exchange: TermExchange | None = None
    ) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.training = layer.training
        self.plain = (layer,)
        """In a tuple, so that its parameters aren't listed twice."""
        self.transposed = not isinstance(layer, torch.nn.Linear)
        self.site, self.name, self.step = site, name, step
        self.active = False
        """Whether an adapter of the step touches the layer."""
        self.exchange, self.exchanges = exchange, False
        """The second: whether an adapter of the step has terms here."""
        outputs = int(self.weight_NK.shape[0])
        parts = (None,) if exchange is None else exchange.parts(outputs)
        self.widths = [outputs if part is None else part[1] - part[0] for part in parts]

    @property
    def sites(self) -> range:
        """Its indices in the directory."""
        return range(self.site, self.site + len(self.widths))

    @property
    def weight_NK(self) -> torch.Tensor:  # noqa: N802 - the suffix is a shape
        """The weight as `(out, in)`; of a Conv1D, which stores `(in, out)`, a view: GEMMs take either order."""
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
        tensors = (step.pages, step.page_map, step.directory, step.shared, step.buffer)
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
            expected="a layer that sees every token of the batch once",
            next="serve a model that runs its adapted layers on all tokens, or leave the layer out when training",
        )

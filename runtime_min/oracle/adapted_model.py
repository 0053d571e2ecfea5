"""A transformers model that serves an adapter per batch row, computed by the reference operations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from scute_compile.diagnostics import Code, fail
from scute_compile.formats.artifact import Artifact, open_artifact
from scute_compile.runtime_min.layers import linear_layers, match_sites, weight_and_bias
from scute_compile.runtime_min.oracle.simulated_ranks import run_site
from scute_compile.runtime_min.oracle.site_tensors import LoadedSite, load_sites


class AdaptedModel:
    """Adapts the linear layers of a model in place, row by row of the batch.

    The model's own layers run first and are left as they are for rows without an adapter, bit for bit; the other rows
    are computed anew from the layer's weight, with all of a site's tensors and one rounding. An artifact for several
    ranks is executed by simulated ranks, each with its own file.

    Args:
        model: A transformers model (or any module) whose layers the artifacts name; it keeps its own forward.
        adapters: Adapter id -> artifact, or the folder of one.

    Raises:
        ScuteError: the artifact's own faults (SC6xx), or SC402 when its sites aren't layers of this model.
    """

    def __init__(self, model: torch.nn.Module, adapters: Mapping[str, Artifact | Path | str]) -> None:
        self.model = model
        self._sites: dict[str, dict[str, LoadedSite]] = {}
        self._rows: tuple[str | None, ...] = ()
        self._ids = tuple(adapters)
        factors: dict[str, torch.Tensor] = {}
        device = next(model.parameters()).device
        linears = linear_layers(model)
        for adapter, source in adapters.items():
            artifact = source if isinstance(source, Artifact) else open_artifact(source, verify_hashes=False)
            found = match_sites(artifact, linears).mapping
            for name, site in load_sites(artifact, factors, device).items():
                _check_shape(site, linears[found[name]], artifact.manifest.name)
                self._sites.setdefault(found[name], {})[adapter] = site
        self._handles = [
            linears[layer].register_forward_hook(_Hook(self, sites), with_kwargs=True)
            for layer, sites in self._sites.items()
        ]

    @property
    def rows(self) -> tuple[str | None, ...]:
        """The adapter of each batch row in the current call."""
        return self._rows

    def forward(self, *args: object, adapter_names: Sequence[str | None], **kwargs: object) -> object:
        """Run the model with one adapter id, or None for the base alone, per row of the batch."""
        with self.using(adapter_names):
            return self.model(*args, **kwargs)

    __call__ = forward

    @contextmanager
    def using(self, adapter_names: Sequence[str | None]) -> Iterator[None]:
        """Set the adapters of the batch rows for every call of the model inside the block.

        Raises:
            ScuteError: SC703 for an id that no adapter has.
        """
        if unknown := next((one for one in adapter_names if one is not None and one not in self._ids), None):
            fail(
                Code.SC703,
                where="adapter_names",
                found=f"the adapter id `{unknown}`",
                expected="one of " + ", ".join(f"`{one}`" for one in self._ids) + ", or None for the base",
                next="load the adapter when the model is made",
            )
        before, self._rows = self._rows, tuple(adapter_names)
        try:
            yield
        finally:
            self._rows = before

    def remove(self) -> None:
        """Give the model back as it was."""
        for hook in self._handles:
            hook.remove()
        self._handles = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


class _Hook:
    """Replaces the adapted rows of one layer's output."""

    __slots__ = ("owner", "sites")

    def __init__(self, owner: AdaptedModel, sites: Mapping[str, LoadedSite]) -> None:
        self.owner = owner
        self.sites = sites

    def __call__(
        self, layer: torch.nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor], y: torch.Tensor
    ) -> torch.Tensor:
        adapters = self.owner.rows
        if not any(adapter in self.sites for adapter in adapters):
            return y
        x = args[0] if args else next(iter(kwargs.values()))
        rows = _rows_of(adapters, x.shape[0])
        weight, bias = weight_and_bias(layer)
        out = y.clone()
        for adapter, site in self.sites.items():
            chosen = torch.tensor([row for row, owner in enumerate(rows) if owner == adapter], device=x.device)
            if len(chosen):
                out[chosen] = run_site(x[chosen], weight, bias, site).to(y.dtype)
        return out


def _rows_of(adapters: tuple[str | None, ...], rows: int) -> tuple[str | None, ...]:
    """Return the adapter of each entry of a layer's first dimension; some layers flatten batch and position into it."""
    if not adapters or rows % len(adapters):
        fail(
            Code.SC703,
            where="adapter_names",
            found=f"{len(adapters)} adapter ids for {rows} rows",
            expected="one id per row of the batch",
            next="pass None for rows that the base serves alone",
        )
    return tuple(adapter for adapter in adapters for _ in range(rows // len(adapters)))


def _check_shape(site: LoadedSite, layer: torch.nn.Module, adapter: str) -> None:
    weight, _ = weight_and_bias(layer)
    expected = (site.record.out_features, site.record.in_features)
    if tuple(weight.shape) != expected:
        fail(
            Code.SC402,
            where=f"{adapter}: {site.record.name}",
            found=f"a layer of {weight.shape[1]} inputs and {weight.shape[0]} outputs",
            expected=f"{expected[1]} inputs and {expected[0]} outputs",
            next="load the model that the artifact was compiled for",
        )

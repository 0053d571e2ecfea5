"""A transformers model with an adapter per batch row, computed by the reference operations."""

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
    """Adapts the linear layers of a model by hooks, one adapter or none per row of the batch.

    The model's layers run first, and their output is kept bit for bit for rows without an adapter. The other rows are
    recomputed from the layer's weight with all of the site's tensors and one rounding. Artifacts for several ranks run
    on simulated ranks, each with its own file.

    Args:
        model: A transformers model, or any module whose layers the artifacts name.
        adapters: Opened artifacts, or their folders, by adapter name.

    Raises:
        ScuteError: SC402 when sites aren't layers of this model, and the artifact's faults (SC6xx).
    """

    def __init__(self, model: torch.nn.Module, adapters: Mapping[str, Artifact | Path | str]) -> None:
        self.model = model
        self._sites: dict[str, dict[str, LoadedSite]] = {}
        self._rows: tuple[str | None, ...] = ()
        self._names = tuple(adapters)
        factors: dict[str, torch.Tensor] = {}
        device = next(model.parameters()).device
        linears = linear_layers(model)
        for adapter_name, source in adapters.items():
            artifact = source if isinstance(source, Artifact) else open_artifact(source, verify_hashes=False)
            found = match_sites(artifact, linears).mapping
            for name, site in load_sites(artifact, factors, device).items():
                _check_shape(site, linears[found[name]], artifact.manifest.name)
                self._sites.setdefault(found[name], {})[adapter_name] = site
        self._handles = [
            linears[layer].register_forward_hook(_Hook(self, sites), with_kwargs=True)
            for layer, sites in self._sites.items()
        ]

    @property
    def rows(self) -> tuple[str | None, ...]:
        """The adapter of each row of the batch, None for the base."""
        return self._rows

    def forward(self, *args: object, adapter_names: Sequence[str | None], **kwargs: object) -> object:
        """Run the model with one adapter name per row of the batch, None for the base."""
        with self.using(adapter_names):
            return self.model(*args, **kwargs)

    __call__ = forward

    @contextmanager
    def using(self, adapter_names: Sequence[str | None]) -> Iterator[None]:
        """Set the adapters of the batch rows for all calls of the model inside the block.

        Raises:
            ScuteError: SC703 for an unknown name.
        """
        if unknown := next((name for name in adapter_names if name is not None and name not in self._names), None):
            fail(
                Code.SC703,
                where="adapter_names",
                found=f"the adapter name `{unknown}`",
                expected="one of " + ", ".join(f"`{name}`" for name in self._names) + ", or None for the base",
                next="pass the adapter when the AdaptedModel is made",
            )
        before, self._rows = self._rows, tuple(adapter_names)
        try:
            yield
        finally:
            self._rows = before

    def remove(self) -> None:
        """Remove the hooks from the model."""
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
    """Replaces the rows with adapters in one layer's output."""

    __slots__ = ("owner", "sites")

    def __init__(self, owner: AdaptedModel, sites: Mapping[str, LoadedSite]) -> None:
        self.owner = owner
        self.sites = sites

    def __call__(
        self, layer: torch.nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor], y: torch.Tensor
    ) -> torch.Tensor:
        names = self.owner.rows
        if not any(name in self.sites for name in names):
            return y
        x = args[0] if args else next(iter(kwargs.values()))
        rows = _spread(names, x.shape[0])
        weight, bias = weight_and_bias(layer)
        out = y.clone()
        for adapter_name, site in self.sites.items():
            chosen = torch.tensor([row for row, name in enumerate(rows) if name == adapter_name], device=x.device)
            if len(chosen):
                out[chosen] = run_site(x[chosen], weight, bias, site).to(y.dtype)
        return out


def _spread(adapter_names: tuple[str | None, ...], rows: int) -> tuple[str | None, ...]:
    """Return the adapter of each index of a layer's first axis, into which some models flatten batch and position."""
    if not adapter_names or rows % len(adapter_names):
        fail(
            Code.SC703,
            where="adapter_names",
            found=f"{len(adapter_names)} adapter names for {rows} rows",
            expected="one name per row of the batch",
            next="pass None for rows that the base serves alone",
        )
    return tuple(name for name in adapter_names for _ in range(rows // len(adapter_names)))


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

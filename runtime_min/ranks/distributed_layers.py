"""A transformers model on several processes, one rank each, with an adapter per batch row: both layouts of terms.

Each process loads the whole base, keeps its rank's part of every linear layer that ranks share, and its own file of
each artifact. Processes meet through `torch.distributed`: gloo on CPUs, NCCL on GPUs; the tensors say which. One rank
is the plain case: no process group is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scute_compile.base.rerooting import Unrooted, reroot
from scute_compile.diagnostics import Code, fail
from scute_compile.formats.artifact import Artifact, open_artifact
from scute_compile.formats.manifest import SiteRecord
from scute_compile.runtime_min.oracle.site_tensors import RankSite, load_rank_sites
from scute_compile.runtime_min.ranks.cut import cut_layers, put_layers
from scute_compile.runtime_min.ranks.group import RankGroup, Traffic
from scute_compile.runtime_min.ranks.rank_linear import RankLinear, RankStep


class RankModel:
    """One rank of a model that serves an adapter per batch row; all ranks make the same calls in the same order.

    The model's layers are cut in place and for good.

    Args:
        model: A transformers model, the same on every rank.
        group: The ranks' process group; None: the default one, or none for one rank.
        reduce_dtype: In which row-parallel layers add up partial sums. None: float32 or wider, one rounding at the end;
            the model's own dtype halves the bytes, as engines do, and rounds each rank's part.

    Raises:
        ScuteError: SC501 when a layer doesn't divide over the ranks.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        group: dist.ProcessGroup | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.model = model
        self.ranks = RankGroup(group)
        self._step = RankStep()
        self._factors: dict[str, torch.Tensor] = {}
        self._device = next(model.parameters()).device
        self._loaded: set[str] = set()
        cuts = cut_layers(model, self.ranks.rank, self.ranks.size)
        self.layers = {
            name: RankLinear(layer, self.ranks, self._step, reduce_dtype=reduce_dtype) for name, layer in cuts.items()
        }
        put_layers(model, cuts, self.layers)

    @property
    def traffic(self) -> Traffic:
        """Bytes that this rank has sent."""
        return self.ranks.traffic

    def load(self, name: str, source: Artifact | Path | str) -> None:
        """Add an adapter from this rank's file of an artifact, of either layout.

        Raises:
            ScuteError: SC806 (the name is taken), SC801 (another number of ranks), SC402 (sites that aren't layers of
                this model, or are cut otherwise), SC815 (another rank refused it), and an artifact's own faults
                (SC6xx).
        """
        with self.ranks.together(name, self._device):
            artifact = source if isinstance(source, Artifact) else open_artifact(source, verify_hashes=False)
            found, held = self._read(name, artifact)
        self.ranks.check_same(name, artifact.manifest.digest, self._device)
        for site, tensors in held.items():
            self.layers[found[site]].sites[name] = tensors
        self._loaded.add(name)

    def _read(self, name: str, artifact: Artifact) -> tuple[Mapping[str, str], Mapping[str, RankSite]]:
        """Return the layer of each site, and what this rank holds of it."""
        if name in self._loaded:
            fail(
                Code.SC806,
                where=name,
                found="an adapter of that name",
                expected="a new name",
                next="unload it first, or load this one under another name",
            )
        if artifact.manifest.tp != self.ranks.size:
            fail(
                Code.SC801,
                where=name,
                found=f"an artifact for tp {artifact.manifest.tp}",
                expected=f"tp {self.ranks.size}, on which this model runs",
                next=f"compile the adapter again with --tp {self.ranks.size}",
            )
        found = _layers_of(artifact, self.layers)
        for site, layer in found.items():
            _check_cut(artifact.sites[site], self.layers[layer], name)
        return found, load_rank_sites(artifact, self.ranks.rank, self._factors, self._device)

    def unload(self, name: str) -> None:
        """Forget an adapter. Raises SC802 when it isn't loaded."""
        self._check_known([name])
        for layer in self.layers.values():
            layer.sites.pop(name, None)
        self._loaded.remove(name)

    def forward(self, *args: object, adapter_names: Sequence[str | None], **options: object) -> Any:  # noqa: ANN401 - the model's own output
        """Run the model with one adapter id, or None for the base alone, per row of the batch."""
        with self.using(adapter_names):
            return self.model(*args, **options)

    __call__ = forward

    @contextmanager
    def using(self, adapter_names: Sequence[str | None]) -> Iterator[None]:
        """Set the adapters of the batch rows for every call of the model inside the block. Raises SC802."""
        self._check_known([name for name in adapter_names if name is not None])
        self._step.set(adapter_names)
        try:
            with torch.no_grad():
                yield
        finally:
            self._step.set(())

    def _check_known(self, names: Sequence[str]) -> None:
        if unknown := sorted(set(names) - self._loaded):
            fail(
                Code.SC802,
                where="adapter_names",
                found=", ".join(f"`{name}`" for name in unknown),
                expected=f"{len(self._loaded)} loaded adapters, or None for the base",
                next="load the adapter on every rank first",
            )


def _layers_of(artifact: Artifact, layers: Mapping[str, RankLinear]) -> Mapping[str, str]:
    found = reroot(artifact.sites, layers)
    if isinstance(found, Unrooted):
        fail(
            Code.SC402,
            where=artifact.manifest.name,
            found=f"sites such as `{next(iter(artifact.sites))}`; {found.reason}",
            expected="the linear layers of this model, such as " + ", ".join(f"`{name}`" for name in list(layers)[:3]),
            next="load the model that the artifact was compiled for",
        )
    return found.mapping


def _check_cut(record: SiteRecord, layer: RankLinear, adapter: str) -> None:
    """Refuse a site that the compiler cut otherwise than this model is cut: another base, or another plan."""
    ours, theirs = (layer.cut.inputs, layer.cut.outputs), (record.inputs, record.outputs)
    if ours != theirs:
        fail(
            Code.SC402,
            where=f"{adapter}: {record.name}",
            found=f"ranks that hold inputs {theirs[0]} and outputs {theirs[1]}",
            expected=f"inputs {ours[0]} and outputs {ours[1]}, as this model is cut",
            next="load the model that the artifact was compiled for, or compile the adapter again",
        )

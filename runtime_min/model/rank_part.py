"""One rank's part of a served model: how its layers are cut, and what the ranks exchange.

In the default layout ranks exchange nothing for adapters. In the fully sharded layout they complete each layer's
intermediates between the kernels, by one transfer per layer for the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from scute_compile.diagnostics import Code, fail
from scute_compile.formats.artifact import Artifact
from scute_compile.ir.target import LoraSharding
from scute_compile.runtime_min.pool.fully_sharded import check_exchanges
from scute_compile.runtime_min.ranks.cut import LayerCut, connect, cut_layers, exchanges_of, put_parts
from scute_compile.runtime_min.ranks.exchange import TermExchange
from scute_compile.runtime_min.ranks.group import RankGroup


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankPart:
    """The part of a model that this process holds; by default the whole model."""

    ranks: RankGroup = field(default_factory=lambda: RankGroup(distributed=False))
    lora_sharding: LoraSharding = LoraSharding.DEFAULT
    """The layout of low-rank terms over the ranks; a pool holds one layout."""
    cuts: Mapping[str, LayerCut] = field(default_factory=dict)
    """How the ranks share each layer, by path; empty with one rank."""
    exchanges: Mapping[str, TermExchange] = field(default_factory=dict)
    """Exchanges of fully sharded terms, by path of a layer; empty in the default layout."""

    @property
    def shares(self) -> int:
        """Number of ranks that a term's rank is divided among."""
        return self.ranks.size if self.lora_sharding is LoraSharding.FULL else 1

    def connect(self, layers: Mapping[str, torch.nn.Module]) -> None:
        """Register the base's collectives on the parts of the layers that ranks share, by path."""
        for path, layer in layers.items():
            if path in self.cuts:
                connect(layer, self.cuts[path], self.ranks)

    def check(self, artifact: Artifact, name: str, paths: Mapping[str, str]) -> None:
        """Refuse an artifact whose cuts (SC402) or whose exchanges (SC812) differ from this model's.

        Args:
            artifact: An opened artifact. `read_adapter` refuses an artifact for another number of ranks.
            name: The adapter's name.
            paths: Path of each site's layer, by site.
        """
        if artifact.manifest.tp != self.ranks.size:
            return
        for site, record in artifact.sites.items():
            layer_cut = self.cuts.get(paths[site])
            if layer_cut is not None and (record.inputs, record.outputs) != (layer_cut.inputs, layer_cut.outputs):
                fail(
                    Code.SC402,
                    where=f"{name}: {site}",
                    found=f"ranks that hold inputs {record.inputs} and outputs {record.outputs}",
                    expected=f"inputs {layer_cut.inputs} and outputs {layer_cut.outputs}, as this model is cut",
                    next="load the model that the artifact was compiled for, or compile the adapter again",
                )
        if self.lora_sharding is artifact.manifest.lora_sharding is LoraSharding.FULL:
            exchanges = {site: self.exchanges.get(path) for site, path in paths.items()}
            check_exchanges(name, artifact.manifest, self.ranks.rank, exchanges)


def cut_for_rank(
    model: torch.nn.Module, ranks: RankGroup, lora_sharding: LoraSharding | str = LoraSharding.DEFAULT
) -> RankPart:
    """Cut a model's linear layers for this rank, in place, and return the part; the whole weights are not kept.

    Raises:
        ScuteError: SC501 when a layer doesn't divide over the ranks, or has fewer outputs than there are ranks; SC703
            for an unknown layout.
    """
    layout = _layout(lora_sharding)
    cuts = cut_layers(model, ranks)
    exchanges = exchanges_of(cuts, ranks) if layout is LoraSharding.FULL else {}
    put_parts(model, cuts, ranks.rank)
    return RankPart(ranks=ranks, lora_sharding=layout, cuts=cuts, exchanges=exchanges)


def _layout(given: LoraSharding | str) -> LoraSharding:
    """Return a layout by its name.

    >>> _layout("full") is LoraSharding.FULL
    True
    """
    if given not in list(LoraSharding):
        fail(
            Code.SC703,
            where="lora_sharding",
            found=repr(given),
            expected=" or ".join(f"'{layout}'" for layout in LoraSharding),
            next="pass the layout that the artifacts were compiled with",
        )
    return LoraSharding(given)

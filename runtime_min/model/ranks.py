"""One rank of a model that the runtime's kernels serve: the pool holds this rank's part of every adapter.

In the default layout ranks exchange nothing for adapters. In the fully sharded one they complete each layer's
intermediates between the kernels, one transfer per layer for the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from scute_compile.base.cuts import shares
from scute_compile.diagnostics import Code, fail
from scute_compile.ir.linear import Split
from scute_compile.ir.target import LoraSharding
from scute_compile.runtime_min.model.served_model import ServedModel
from scute_compile.runtime_min.ranks.cut import CutLayer, LayerCut, cut_layers, join_outputs, put_layers
from scute_compile.runtime_min.ranks.exchange import TermExchange
from scute_compile.runtime_min.ranks.group import Purpose, RankGroup
from scute_compile.runtime_min.reference import take


def serve_rank(
    model: torch.nn.Module,
    *,
    group: dist.ProcessGroup | None = None,
    lora_sharding: LoraSharding | str = LoraSharding.DEFAULT,
    **options: Any,  # noqa: ANN401 - ServedModel's own
) -> tuple[ServedModel, RankGroup]:
    """Cut a model for this rank, in place and for good, and serve adapters on it; all ranks make the same calls.

    An adapter is loaded on all ranks or on none: where one refuses it, the others do as well (SC815). It takes as much
    room on each, so that all of them evict and refuse alike.
    Row-parallel layers round each rank's partial sums to the model's dtype and add them up in it, as engines do.

    Args:
        model: A transformers model, the same on every rank.
        group: The ranks' process group; None: the default one, or none for one rank.
        lora_sharding: How the artifacts divide low-rank terms among ranks; a pool holds one layout.
        options: What `ServedModel` takes, without `tp`, `rank`, `exchanges` and `peers`.

    Raises:
        ScuteError: SC501 when a layer doesn't divide over the ranks, or has fewer outputs than there are; SC703 for a
            layout that there isn't; what `ServedModel` raises.
    """
    layout = _layout(lora_sharding)
    ranks = RankGroup(group)
    cuts = cut_layers(model, ranks.rank, ranks.size)
    full = layout is LoraSharding.FULL and ranks.size > 1
    exchanges = exchanges_of(cuts, ranks) if full else None
    put_layers(model, cuts, {name: _plain(layer) for name, layer in cuts.items()})
    served = ServedModel(model, tp=ranks.size, rank=ranks.rank, exchanges=exchanges, peers=ranks, **options)
    for name, layer in served.layers.items():
        if name in cuts:
            _join(layer, cuts[name].cut, ranks)
    return served, ranks


def _layout(given: str) -> LoraSharding:
    """Return a layout, also by its name; any other value would serve the default one without a word.

    >>> _layout("full") is LoraSharding.FULL
    True
    """
    if given not in list(LoraSharding):
        names = " or ".join(LoraSharding)
        fail(Code.SC703, where="lora_sharding", found=repr(given), expected=names, next="pass one of these")
    return LoraSharding(given)


def exchanges_of(cuts: Mapping[str, CutLayer], ranks: RankGroup) -> dict[str, TermExchange]:
    """Return how the ranks meet inside each layer that they share.

    Raises:
        ScuteError: SC501 for a layer with fewer outputs than ranks.
    """
    found: dict[str, TermExchange] = {}
    for name, layer in cuts.items():
        if layer.cut.split is Split.COLUMN:
            found[name] = TermExchange(ranks=ranks)
        elif layer.cut.split is Split.ROW:
            if layer.cut.out_features < ranks.size:
                fail(
                    Code.SC501,
                    where=name,
                    found=f"{layer.cut.out_features} outputs",
                    expected=f"one for each of {ranks.size} ranks at least",
                    next="serve it in the default layout",
                )
            found[name] = TermExchange(ranks=ranks, part=shares(layer.cut.out_features, ranks.size)[ranks.rank])
    return found


def _plain(layer: CutLayer) -> torch.nn.Linear:
    outputs, inputs = layer.weight.shape
    plain = torch.nn.Linear(inputs, outputs, bias=layer.bias is not None, device="meta")
    plain.weight = torch.nn.Parameter(layer.weight, requires_grad=False)
    if layer.bias is not None:
        plain.bias = torch.nn.Parameter(layer.bias, requires_grad=False)
    return plain.eval()


def _join(layer: torch.nn.Module, cut: LayerCut, ranks: RankGroup) -> None:
    """Let the ranks meet after a layer, and before it where its input comes whole."""

    def own_inputs(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (take(args[0], -1, cut.inputs[ranks.rank]), *args[1:])

    def together(_: torch.nn.Module, __: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        if cut.split is Split.ROW:
            return ranks.all_reduce(out, Purpose.BASE)
        return join_outputs(ranks.gather(out, Purpose.OUTPUTS), cut)

    if cut.split is Split.ROW and not cut.arrives_cut:
        layer.register_forward_pre_hook(own_inputs)
    if cut.split is Split.ROW or (cut.split is Split.COLUMN and not cut.leaves_cut):
        layer.register_forward_hook(together)

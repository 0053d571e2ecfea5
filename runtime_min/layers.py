"""A model's linear layers: how they are found, read, replaced, and matched with an artifact's sites."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from scute_compile.base.rerooting import Rerooting, Unrooted, reroot
from scute_compile.diagnostics import Code, fail
from scute_compile.formats.artifact import Artifact


def linear_layers(model: torch.nn.Module) -> Mapping[str, torch.nn.Module]:
    """Return the layers that adapters may touch, by path: `nn.Linear` and transformers' `Conv1D`."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
    }


def weight_and_bias(layer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the weight as `(out, in)`, and the bias; of a Conv1D, which stores `(in, out)`, a transposed view.

    >>> weight, bias = weight_and_bias(torch.nn.Linear(3, 2))
    >>> weight.shape, bias.shape
    (torch.Size([2, 3]), torch.Size([2]))
    """
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, torch.Tensor)  # noqa: S101 - narrows the type of a module's attribute
    assert bias is None or isinstance(bias, torch.Tensor)  # noqa: S101 - likewise
    return (weight if isinstance(layer, torch.nn.Linear) else weight.T), bias


def put_layer(model: torch.nn.Module, path: str, layer: torch.nn.Module) -> None:
    """Replace the module at `path`."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, layer)


def match_sites(artifact: Artifact, layers: Collection[str]) -> Rerooting:
    """Return the layer of each site: of the same path, or of the path after one unique change of the prefix.

    Args:
        artifact: An opened artifact.
        layers: Paths of the model's linear layers, in order.

    Raises:
        ScuteError: SC402 when there is no such change, or several.
    """
    found = reroot(artifact.sites, layers)
    if isinstance(found, Unrooted):
        known = frozenset(layers)
        stray = next((site for site in artifact.sites if site not in known), next(iter(artifact.sites)))
        fail(
            Code.SC402,
            where=artifact.manifest.name,
            found=f"sites such as `{stray}`; {found.reason}",
            expected="the linear layers of this model, such as " + ", ".join(f"`{path}`" for path in list(layers)[:3]),
            next="load the model that the artifact was compiled for",
        )
    return found

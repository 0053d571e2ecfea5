"""The layers of a model that adapters touch, and how an artifact's sites are matched with them."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def linear_layers(model: torch.nn.Module) -> Mapping[str, torch.nn.Module]:
    """Return the layers that can be adapted by their path: `nn.Linear` and transformers' `Conv1D`."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"
    }

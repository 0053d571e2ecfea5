"""The minimal runtime: executes artifacts on a transformers model, without a serving engine."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if __name__ != "scute_compile.runtime_min":
    raise ImportError(
        f"import this room as `scute_compile.runtime_min`, not as `{__name__}`: a second copy would shadow the first"
    )

if TYPE_CHECKING:
    from scute_compile.runtime_min.batching.continuous_batch import ContinuousBatch
    from scute_compile.runtime_min.batching.policy import Policy
    from scute_compile.runtime_min.batching.requests import Request
    from scute_compile.runtime_min.model.served_model import ServedModel

__all__ = ["ContinuousBatch", "Policy", "Request", "ServedModel"]

_MODULES = {
    "ContinuousBatch": "batching.continuous_batch",
    "Policy": "batching.policy",
    "Request": "batching.requests",
    "ServedModel": "model.served_model",
}


def __getattr__(name: str) -> object:
    """Import a public class when it is first used: importing this package imports no torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

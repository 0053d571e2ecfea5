"""The inputs of passes beside the program: the adapter's configuration and tensors, their facts, and the base."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from scute_compile.base.structure import ModelStructure
from scute_compile.diagnostics import Findings
from scute_compile.ir.expressions import Ref
from scute_compile.passes.scan import Facts

SameValues = Callable[[Ref, Ref], bool | None]
"""Whether an adapter tensor equals a base tensor; None where the two can't be compared."""


def incomparable(adapter_tensor: Ref, base_tensor: Ref) -> None:
    """Return None for every pair of tensors, as when the base's weights are absent."""
    del adapter_tensor, base_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The inputs of all passes of one adapter. Passes only read it, and append to its findings."""

    config: Mapping[str, object] = field(default_factory=dict)
    """The content of `adapter_config.json`."""
    tensors: Mapping[str, Ref] = field(default_factory=dict)
    """The adapter's tensors by checkpoint key."""
    facts: Facts
    structure: ModelStructure | None
    """The base; None when the adapter is planned without its base."""
    weights: bool = True
    """Whether packing can read the base's weights; False when the base is a configuration only."""
    same_values: SameValues = incomparable
    findings: Findings = field(default_factory=Findings)

    @property
    def base(self) -> ModelStructure:
        """The base, for passes that don't run without one."""
        if self.structure is None:
            raise AssertionError("this pass needs a base")
        return self.structure

"""The interface of a front end: the checkpoint that it reads, and the sites that it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from scute_compile.base.structure import ModelStructure
from scute_compile.diagnostics import Code, Findings
from scute_compile.ir.expressions import Ref
from scute_compile.ir.linear import Linear
from scute_compile.ir.method import Method
from scute_compile.ir.program import Site
from scute_compile.passes.parse.keys import Parameter
from scute_compile.passes.parse.settings import Rule, Settings
from scute_compile.passes.scan import Facts

Tensors = Mapping[str, Ref]
"""Parameter -> tensor, for one module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """An adapter's configuration and tensors, sorted by the modules of the base."""

    config: Mapping[str, object]
    modules: Mapping[str, Tensors]
    """By the base's module path, in the base's order."""
    shared: Tensors
    facts: Facts
    structure: ModelStructure
    """The base, with only the layers under the adapter's root."""
    names: Mapping[str, str]
    """Base module path -> module path in the adapter's keys, patterns and targets, where the two differ."""
    findings: Findings

    def trained_name(self, path: str) -> str:
        """Return the module path that the configuration's patterns were written for."""
        return self.names.get(path, path)

    def linear(self, path: str) -> Linear:
        """Return the base's layer at `path`."""
        return self.structure.linears[path]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The result of a front end."""

    method: Method
    sites: tuple[Site, ...]
    settings: tuple[tuple[str, str], ...] = ()
    """For display: `rank`, `alpha`, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontEnd:
    """One PEFT method: the layout of its files, and how they become sites."""

    method: Method
    """The method, whose name in capitals is the `peft_type` of `adapter_config.json`."""
    parameters: tuple[Parameter, ...]
    shared: tuple[Parameter, ...] = ()
    settings: type[Settings]
    inert: frozenset[str] = frozenset()
    rules: tuple[Rule, ...] = ()
    may_be_empty: frozenset[str] = frozenset()
    """Parameters that may have a dimension of zero."""
    inert_keys: tuple[str, ...] = ()
    """Words in the keys of training-time buffers."""
    dimensions: Callable[[Tensors], tuple[int, int]]
    """Return `(in, out)` as one module's tensors give them; 0 where they don't."""
    build: Callable[[Checkpoint, Settings], Reading]
    """Rewrite the checkpoint into sites; faults go to its findings."""

    @property
    def peft_type(self) -> str:
        """The method's name in `adapter_config.json`."""
        return self.method.name


def require(checkpoint: Checkpoint, path: str, *wanted: str) -> bool:
    """Return whether a module has all `wanted` parameters, and record those that are missing."""
    tensors = checkpoint.modules[path]
    missing = [name for name in wanted if name not in tensors]
    for name in missing:
        checkpoint.findings.error(
            Code.SC305,
            where=path,
            found=f"no `{name}`; only {', '.join(f'`{ref.key}`' for ref in tensors.values())}",
            expected=f"{', '.join(f'`{name}`' for name in wanted)} for every adapted module",
        )
    return not missing

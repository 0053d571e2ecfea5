"""The pipeline: the passes in their order, and `plan`, which takes one adapter through them.

Planning reads the adapter, and of the base only names and shapes. Weights are read when the planned program is packed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from scute_compile.base.structure import ModelStructure
from scute_compile.diagnostics import Diagnostic, Findings, as_scute_error
from scute_compile.formats.peft_folder import AdapterFolder, open_adapter
from scute_compile.ir.expressions import Ref, Source
from scute_compile.ir.program import Program, Stage
from scute_compile.ir.spec import verify
from scute_compile.ir.target import Target
from scute_compile.passes.context import Context, incomparable
from scute_compile.passes.fold import fold
from scute_compile.passes.parse.checkpoint import front_end_of, parse
from scute_compile.passes.place import place
from scute_compile.passes.route import route
from scute_compile.passes.scale import scale
from scute_compile.passes.scan import Scan, scan
from scute_compile.passes.shard import shard

Pass = Callable[[Program, Context], Program]

PIPELINE: tuple[Pass, ...] = (parse, place, fold, scale, shard, route)
"""Every pass, in order. The spec is verified after each."""

NEED_BASE: frozenset[Pass] = frozenset({place, scale, shard, route})
"""Passes that are left out when an adapter is planned without its base."""


class Base(Protocol):
    """A base model as planning uses it."""

    @property
    def structure(self) -> ModelStructure:
        """Names, shapes and cuts of the base's layers."""

    @property
    def has_tensors(self) -> bool:
        """Whether the base has weights, and not only a configuration."""

    def same_values(self, adapter: AdapterFolder, adapter_tensor: Ref, base_tensor: Ref) -> bool | None:
        """Return whether two tensors hold equal numbers; None where they can't be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """An adapter after planning: a program, or the findings that refuse it."""

    source: str
    name: str
    adapter: AdapterFolder | None
    scan: Scan | None
    program: Program | None
    findings: tuple[Diagnostic, ...]

    @property
    def refused(self) -> bool:
        """Whether the findings contain an error."""
        return self.program is None


def plan(
    source: str,
    base: Base | None,
    target: Target,
    *,
    hash_files: bool = False,
    name: str = "",
    adapter: AdapterFolder | None = None,
) -> Planned:
    """Take one adapter through the pipeline.

    Args:
        source: An adapter folder or Hub id.
        base: The base; None to plan the adapter alone, without the passes of `NEED_BASE`.
        target: What to compile for.
        hash_files: Whether the scan hashes the adapter's files as well.
        name: The adapter's name; by default the name of its folder.
        adapter: The adapter of `source`, when it is open already.
    """
    try:
        adapter = adapter or open_adapter(source)
        scanned = scan(adapter, hash_files=hash_files)
        context = _context(adapter, scanned, base)
        program = run(_opened(adapter, target), context)
    except Exception as error:  # noqa: BLE001 - the fault of one adapter must not end the work on others
        label = name or (adapter.name if adapter else Path(source).name)
        found = as_scute_error(error).diagnostics
        return Planned(source=source, name=label, adapter=adapter, scan=None, program=None, findings=found)
    findings = tuple(context.findings)
    return Planned(
        source=source,
        name=name or adapter.name,
        adapter=adapter,
        scan=scanned,
        program=replace(program, findings=findings),
        findings=findings,
    )


def run(program: Program, context: Context) -> Program:
    """Run the passes on an opened program.

    Raises:
        ScuteError: with all findings so far, after the first pass that finds an error.
        AssertionError: when a pass breaks the spec.
    """
    for step in PIPELINE:
        if context.structure is None and step in NEED_BASE:
            continue
        program = step(program, context)
        context.findings.raise_if_errors()
        verify(program)
    return program


def _opened(adapter: AdapterFolder, target: Target) -> Program:
    return Program(method=front_end_of(adapter.config).method, stage=Stage.OPENED, sites=(), target=target)


def _context(adapter: AdapterFolder, scanned: Scan, base: Base | None) -> Context:
    return Context(
        config=adapter.config,
        tensors={key: Ref(Source.ADAPTER, key, entry.shape, entry.dtype) for key, entry in adapter.tensors.items()},
        facts=scanned.facts,
        structure=None if base is None else base.structure,
        weights=base is not None and base.has_tensors,
        same_values=incomparable if base is None else partial(base.same_values, adapter),
        findings=Findings(),
    )

"""Compiles many adapters in one call: plans each, looks for name clashes, and packs them base by base."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from scute_compile.diagnostics import Code, Findings, ScuteError, fail
from scute_compile.driver.bases import OpenBase
from scute_compile.driver.packing import compile_planned
from scute_compile.driver.planning import Bases, plan_adapter
from scute_compile.driver.reports import CompileReport, Outcome, outcome_of
from scute_compile.formats.artifact import FACTORS
from scute_compile.ir.target import Target
from scute_compile.pipeline import Planned

Progress = Callable[[str, int, int], None]
"""Called with the kind of work (`base`: bytes of base weights read; `adapters`: artifacts written), the amount done and
the total. Each base of a call starts anew."""


def compile_adapters(
    sources: Sequence[str],
    *,
    base: str | None,
    target: Target,
    store: Path,
    name: str = "",
    progress: Progress = lambda *_: None,
) -> CompileReport:
    """Plan every adapter, and pack those that are exact.

    Args:
        sources: PEFT folders or Hub ids.
        base: The base of all of them; None: the base that each configuration names.
        target: What to compile for.
        store: The folder for artifacts and shared factors.
        name: The artifact's name, for a call with one adapter; by default the folder's.
        progress: Called as weights are read and artifacts are written.

    Raises:
        ScuteError: SC703 for a name that can't be used, SC4xx when the base can't be opened and it was given or the
            call has one adapter, SC701 without torch.
    """
    _check_name(name, sources)
    bases = Bases(given=base, weights=True)
    plans = [
        plan_adapter(source, bases, target, alone=len(sources) == 1, hash_files=True, name=name) for source in sources
    ]
    counts = Counter(planned.name for planned, _ in plans)
    checked = [(_without_clash(planned, counts), opened) for planned, opened in plans]
    outcomes = [outcome_of(planned) for planned, _ in checked]
    for opened, positions in _by_base(checked):
        results = compile_planned([checked[position][0] for position in positions], opened, store, progress)
        for position, result in zip(positions, results, strict=True):
            outcomes[position] = _with_result(outcomes[position], result)
    return CompileReport(adapters=tuple(outcomes), store=store)


def _check_name(name: str, sources: Sequence[str]) -> None:
    if name and len(sources) > 1:
        fail(
            Code.SC703,
            where="--name",
            found=f"--name with {len(sources)} adapters",
            expected="one adapter",
            next="leave --name out; each artifact takes its folder's name",
        )
    if name and (name != Path(name).name or name.startswith(".") or name == FACTORS):
        fail(Code.SC703, where="--name", found=name, expected="a plain folder name", next="choose another name")


def _without_clash(planned: Planned, counts: Counter[str]) -> Planned:
    """Refuse an adapter whose name other adapters of the call have, or that a store reserves."""
    count = counts[planned.name]
    if count == 1 and planned.name != FACTORS:
        return planned
    findings = Findings(list(planned.findings))
    findings.error(
        Code.SC607,
        where=planned.source,
        found=f"the name `{planned.name}` for {count} adapters of this call"
        if count > 1
        else f"the name `{planned.name}`, which a store reserves",
        expected="one name per adapter",
    )
    return replace(planned, program=None, findings=tuple(findings))


def _by_base(plans: Sequence[tuple[Planned, OpenBase | None]]) -> list[tuple[OpenBase, list[int]]]:
    """Return, for each base in order of appearance, the positions of its adapters that were not refused."""
    groups: dict[int, tuple[OpenBase, list[int]]] = {}
    for position, (planned, base) in enumerate(plans):
        if base is not None and not planned.refused:
            groups.setdefault(id(base), (base, []))[1].append(position)
    return list(groups.values())


def _with_result(outcome: Outcome, result: Path | ScuteError) -> Outcome:
    if isinstance(result, ScuteError):
        return replace(outcome, findings=outcome.findings + result.diagnostics)
    return replace(outcome, artifact=str(result))

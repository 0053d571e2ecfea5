"""What the commands do, apart from reading arguments and printing."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from scute_compile.cli.outcomes import Outcome
from scute_compile.diagnostics import Code, Diagnostic, Findings, ScuteError, fail
from scute_compile.driver.artifact_checks import Asked, other_base, other_target
from scute_compile.driver.bases import OpenBase, open_model
from scute_compile.driver.packing import compile_planned
from scute_compile.formats.artifact import Artifact, is_artifact, open_artifact
from scute_compile.ir.dtypes import DType
from scute_compile.ir.target import LoraSharding, Target, Workload
from scute_compile.pipeline import Planned, plan

if TYPE_CHECKING:
    from scute_compile.cli.cost.report import CostReport
    from scute_compile.cli.demo.report import DemoReport
    from scute_compile.cli.explain.report import ExplainReport
    from scute_compile.cli.inspect.report import InspectReport
    from scute_compile.cli.run.request import RunReport
    from scute_compile.cli.verify.report import VerifyReport

Advance = Callable[[str, int, int], None]


def compile_adapters(
    sources: Sequence[str], base: str | None, target: Target, store: Path, *, name: str = "", quiet: bool = False
) -> tuple[Outcome, ...]:
    """Plan every adapter, pack those that can be exact, and report on all in the order given."""
    if name and len(sources) > 1:
        fail(
            Code.SC703,
            where="--name",
            found=f"--name with {len(sources)} adapters",
            expected="one adapter",
            next="leave --name out; each artifact takes its folder's name",
        )
    if name and (name != Path(name).name or name.startswith(".") or name == "factors"):
        fail(Code.SC703, where="--name", found=name, expected="a plain folder name", next="choose another name")
    done: dict[int, Outcome] = {}
    for base_source, positions in _by_base(sources, base, done).items():
        try:
            opened = _open_base(base_source, base, weights=True)
        except ScuteError as error:
            if base is not None or len(sources) == 1:
                raise
            done.update((position, _refused(sources[position], error)) for position in positions)
            continue
        planned = {
            position: plan(sources[position], opened, target, hash_files=True, name=name) for position in positions
        }
        planned = _without_clashes(planned)
        done.update((position, _outcome(item)) for position, item in planned.items() if item.refused)
        ready = {position: item for position, item in planned.items() if not item.refused}
        if not ready:
            continue
        with _progress(quiet=quiet) as advance:
            results = compile_planned(tuple(ready.values()), opened, store, advance)
        for (position, item), result in zip(ready.items(), results, strict=True):
            outcome = _outcome(item)
            if isinstance(result, ScuteError):
                done[position] = replace(outcome, findings=outcome.findings + result.diagnostics)
            else:
                done[position] = replace(outcome, artifact=str(result))
    return tuple(done[position] for position in sorted(done))


def _by_base(sources: Sequence[str], base: str | None, done: dict[int, Outcome]) -> Mapping[str, list[int]]:
    """Group adapters by their base; one that names none is reported as done."""
    groups: dict[str, list[int]] = {}
    for position, source in enumerate(sources):
        try:
            groups.setdefault(_own_base(source) if base is None else base, []).append(position)
        except ScuteError as error:
            if len(sources) == 1:
                raise
            done[position] = _refused(source, error)
    return groups


def _refused(source: str, error: ScuteError) -> Outcome:
    return Outcome(path=source, name=Path(source).name, findings=error.diagnostics)


def _own_base(source: str) -> str:
    from scute_compile.formats.peft_folder import open_adapter

    said = open_adapter(source).config.get("base_model_name_or_path")
    if not isinstance(said, str) or not said:
        fail(
            Code.SC406,
            where=source,
            found=f"base_model_name_or_path = {said!r} and no --base",
            expected="a base model",
            next="pass the base with --base",
        )
    return said


def _open_base(source: str, given: str | None, *, weights: bool) -> OpenBase:
    """Open a base; where it isn't there, say that the adapter named it, if nobody else did."""
    try:
        return open_model(source, weights=weights)
    except ScuteError as error:
        if given is not None:
            raise
        way = "; the adapter names this base, and --base can name another place"
        lost = (replace(one, next=one.next + way) if one.code is Code.SC401 else one for one in error.diagnostics)
        raise ScuteError(lost) from None


def _without_clashes(planned: Mapping[int, Planned]) -> dict[int, Planned]:
    times = Counter(item.name for item in planned.values())
    return {
        position: item if times[item.name] == 1 and item.name != "factors" else _clash(item)
        for position, item in planned.items()
    }


def _clash(item: Planned) -> Planned:
    findings = Findings(list(item.findings))
    findings.error(
        Code.SC607,
        where=item.source,
        found=f"the name `{item.name}` more than once in this call, or reserved",
        expected="one name per adapter",
        next="rename the folders, or compile them in calls of their own with --name",
    )
    return replace(item, program=None, findings=tuple(findings))


def _outcome(item: Planned) -> Outcome:
    method = item.program.method if item.program else ""
    sites = (("sites", len(item.program.sites)),) if item.program else ()
    return Outcome(path=item.source, name=item.name, method=method, findings=item.findings, details=sites)


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Advance]:
    """Show bars on a terminal; do nothing in a pipe."""
    if quiet or not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    labels = {"base": "reading base weights", "adapters": "packing adapters"}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bars:
        tasks: dict[str, TaskID] = {}

        def advance(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(labels[what], total=total)
            bars.update(tasks[what], completed=done)

        yield advance


def check_paths(
    sources: Sequence[str], base: str | None, *, tp: int | None = None, lora_sharding: LoraSharding | None = None
) -> tuple[Outcome, ...]:
    """Plan adapters, and open artifacts with every check that a reader makes; nothing is written.

    Args:
        sources: Adapter folders, Hub ids, artifacts.
        base: The base of all of them; None: each adapter's own.
        tp: Ranks; None: one for adapters, and for artifacts whatever they were compiled for.
        lora_sharding: How terms are cut; None likewise.
    """
    asked = Asked(tp=tp, lora_sharding=lora_sharding)
    opened: dict[str, OpenBase] = {}

    def model(source: str) -> OpenBase:
        if source not in opened:
            opened[source] = _open_base(source, base, weights=False)
        return opened[source]

    outcomes = []
    for source in sources:
        if is_artifact(source):
            outcomes.append(_check_artifact(source, None if base is None else model(base), asked))
            continue
        try:
            outcomes.append(_outcome(plan(source, model(_own_base(source) if base is None else base), asked.target)))
        except ScuteError as error:
            if base or len(sources) == 1:
                raise
            outcomes.append(_refused(source, error))
    return tuple(outcomes)


def _check_artifact(source: str, base: OpenBase | None, asked: Asked) -> Outcome:
    try:
        artifact = open_artifact(source)
    except ScuteError as error:
        return _refused(source, error)
    findings = other_base(artifact, base) if base else ()
    findings += other_target(artifact, asked)
    manifest = artifact.manifest
    return Outcome(
        path=source,
        name=manifest.name,
        method=manifest.method.value,
        findings=findings,
        details=(("sites", len(manifest.sites)),),
    )


def _opened_as_asked(source: str, base: str | None, asked: Asked) -> Artifact:
    """Open an artifact; its numbers can't be those of another base, other ranks or another workload."""
    artifact = open_artifact(source)
    wrong = other_target(artifact, asked)
    if base is not None:
        wrong += other_base(artifact, open_model(base, weights=False))
    if wrong:
        raise ScuteError(wrong)
    return artifact


def inspect_path(source: str, base: str | None, asked: Asked) -> InspectReport:
    """Describe an adapter folder or an artifact."""
    from scute_compile.cli.inspect.report import inspect_artifact, inspect_program

    if is_artifact(source):
        return inspect_artifact(_opened_as_asked(source, base, asked))
    opened = None if base is None else open_model(base, weights=False)
    return inspect_program(_servable(plan(source, opened, asked.target)))


def explain_path(source: str, base: str | None, asked: Asked, site: str | None) -> ExplainReport:
    """Say what became of every slot of an adapter, or of an artifact by its recorded notes."""
    from scute_compile.cli.explain.report import explain_artifact, explain_program

    if is_artifact(source):
        return explain_artifact(_opened_as_asked(source, base, asked), site)
    opened = _open_base(_own_base(source) if base is None else base, base, weights=False)
    return explain_program(_servable(plan(source, opened, asked.target)), site)


def _servable(planned: Planned) -> Planned:
    if planned.refused:
        raise ScuteError(planned.findings)
    return planned


def verify_artifact(source: str, adapter: str, base: str | None, tokens: int) -> VerifyReport:
    """Compare an artifact with PEFT."""
    from scute_compile.cli.verify.report import verify

    artifact = open_artifact(source)
    opened = _open_base(_own_base(adapter) if base is None else base, base, weights=True)
    wrong = other_base(artifact, opened)
    if wrong:
        raise ScuteError(wrong)
    return verify(artifact, adapter, opened, tokens)


def cost_report(model: str, workload: Workload, dtype: DType, sizes: tuple[int, int, int]) -> CostReport:
    """Predict bytes and times for a named model shape, or for a base's own."""
    from scute_compile.base.shapes import SHAPES, named_shape, shape_of
    from scute_compile.cli.cost.report import Sizes, cost_table

    known = model in SHAPES or not (Path(model).exists() or "/" in model)
    shape = named_shape(model) if known else shape_of(open_model(model, weights=False).structure)
    rank, vera_rank, oft_block = sizes
    return cost_table(
        shape, workload=workload, dtype=dtype, sizes=Sizes(rank=rank, vera_rank=vera_rank, oft_block=oft_block)
    )


def run_demo(out: Path | None, *, quiet: bool) -> DemoReport:
    """Run the embedded example."""
    from scute_compile.cli.demo.report import demo

    return demo(out, quiet=quiet)


def _of_adapter(name: str, diagnostics: Sequence[Diagnostic]) -> list[Diagnostic]:
    """Say which adapter of a call a diagnostic is about; artifacts of several stores may have one name."""
    return [replace(one, where=f"{name}: {one.where}") for one in diagnostics]


def run_prompts(
    base: str,
    adapters: Sequence[str],
    prompts: Sequence[str],
    max_new_tokens: int,
    say: Callable[[Sequence[str]], None],
) -> RunReport:
    """Continue prompts on a base and its adapters, in one batch."""
    from scute_compile.cli.run.request import RunReport, parse_request

    request = parse_request(adapters, prompts)
    artifacts, findings = {}, Findings()
    for name, source in request.adapters:
        try:
            artifacts[name] = open_artifact(source)
        except ScuteError as error:
            findings.diagnostics.extend(_of_adapter(name, error.diagnostics))
    findings.raise_if_errors()
    opened = open_model(base, weights=True)
    for name, artifact in artifacts.items():
        findings.diagnostics.extend(_of_adapter(name, other_base(artifact, opened)))
    findings.raise_if_errors()
    try:
        from scute_compile.cli.run.continuation import BaseModel, run
    except ModuleNotFoundError as error:
        fail(
            Code.SC701,
            where="run",
            found=f"no module named {error.name!r}",
            expected="torch and transformers",
            next="`pip install torch peft`, or run on another machine",
        )
    if opened.checkpoint.path is None:
        raise AssertionError(base)
    model = BaseModel(
        source=base, folder=opened.checkpoint.path, dtype=opened.structure.dtype, structure=opened.structure_hash()
    )
    answers = run(model, artifacts, request.prompts, max_new_tokens=max_new_tokens, say=say)
    return RunReport(base=base, answers=answers)

"""The parse pass: from configuration and keys to sites and slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from scute_compile.base.rerooting import Rerooting, reroot
from scute_compile.base.structure import ModelStructure
from scute_compile.diagnostics import Code, Findings, fail
from scute_compile.formats.peft_folder import AdapterFolder
from scute_compile.ir.expressions import Ref, Source
from scute_compile.ir.linear import Linear
from scute_compile.ir.program import Program, Site, Stage
from scute_compile.ir.target import Target
from scute_compile.passes.parse.adalora import ADALORA
from scute_compile.passes.parse.checks import check_shapes, check_tensors, drop_unserved
from scute_compile.passes.parse.front_end import Checkpoint, FrontEnd, Reading, Tensors
from scute_compile.passes.parse.ia3 import IA3
from scute_compile.passes.parse.keys import SortedKeys, check_prefix, module_path, sort_keys
from scute_compile.passes.parse.lora import LORA
from scute_compile.passes.parse.oft import OFT
from scute_compile.passes.parse.rest import Rest, claim_rest, with_biases
from scute_compile.passes.parse.settings import read_settings
from scute_compile.passes.parse.targets import check_targets, heads_of, some
from scute_compile.passes.parse.vera import VERA
from scute_compile.passes.scan import Scan

FRONT_ENDS = (LORA, ADALORA, IA3, VERA, OFT)

SameValues = Callable[[Ref, Ref], bool | None]
"""Whether an adapter tensor equals a base tensor; None where the base's bytes are absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rooted:
    """Where the adapter's modules lie in the base."""

    paths: Mapping[str, str]
    """Raw module path -> base module path."""
    dropped: str = ""
    added: str = ""

    def to_base(self, raw: str) -> str:
        """Translate any raw path."""
        rest = after(raw, self.dropped) if self.dropped or self.added else None
        return module_path(raw) if rest is None else join(self.added, rest)

    def trained_name(self, path: str) -> str:
        """Return the name that the adapter knows a base module by; wrappers alone don't change it."""
        rest = after(path, self.added) if self.added else None
        return path if rest is None else join(module_path(f"{self.dropped}.").rstrip("."), rest)


def after(path: str, prefix: str) -> str | None:
    """Return what follows `prefix` and a dot; None when `path` doesn't begin so.

    >>> after("a.b.c", "a.b"), after("a.b", ""), after("ab.c", "a")
    ('c', 'a.b', None)
    """
    if not prefix:
        return path
    return path[len(prefix) + 1 :] if path.startswith(f"{prefix}.") else None


def join(prefix: str, rest: str) -> str:
    """Return `prefix.rest`, or `rest` alone.

    >>> join("", "b"), join("a", "b")
    ('b', 'a.b')
    """
    return f"{prefix}.{rest}" if prefix else rest


def front_end_of(config: Mapping[str, object]) -> FrontEnd:
    """Return the front end of the configuration's method, or refuse by name."""
    peft_type = str(config.get("peft_type")).upper()
    by_type = {front_end.peft_type: front_end for front_end in FRONT_ENDS}
    if peft_type in by_type:
        return by_type[peft_type]
    fail(
        Code.SC202,
        where="peft_type",
        found=f"peft_type = {config.get('peft_type')!r}",
        expected="one of " + ", ".join(front_end.peft_type for front_end in FRONT_ENDS),
        next="serve it with PEFT, or as a merged model where PEFT's merge_and_unload can make one",
    )


def parse(
    adapter: AdapterFolder, scan: Scan, structure: ModelStructure | None, same_values: SameValues, target: Target
) -> tuple[Program, Findings]:
    """Read a checkpoint into a program, going on after faults as far as sense can be made of the rest.

    Args:
        adapter: the opened folder.
        scan: facts about every tensor.
        structure: the base, or None to look at the adapter alone.
        same_values: compares copies of base weights.
        target: what to compile for.

    Returns:
        The program, and everything found; with an error among it the program must not be compiled.
    """
    findings = Findings()
    front_end = front_end_of(adapter.config)
    settings = read_settings(
        adapter.config, front_end.settings, inert=front_end.inert, rules=front_end.rules, findings=findings
    )
    refs = {key: Ref(Source.ADAPTER, key, entry.shape, entry.dtype) for key, entry in adapter.tensors.items()}
    keys = sort_keys(refs, front_end.parameters, front_end.shared, findings)
    nothing = Program(method=front_end.peft_type.lower(), stage=Stage.PARSED, sites=(), target=target)
    usable = check_tensors(keys, refs, scan.facts, front_end, findings)
    raw_paths = drop_unserved(keys.modules, structure or _nothing_known(), findings)
    if not usable:
        return nothing, findings
    modules = {raw: {slot: refs[key] for slot, key in keys.modules[raw].items()} for raw in raw_paths}
    known = structure or _inferred(front_end, modules)
    rooted = _root(modules, keys, known, findings)
    if rooted is None:
        return nothing, findings
    checkpoint = _checkpoint(adapter, scan, known, modules, keys, refs, rooted, findings)
    if structure is not None and checkpoint.modules:
        _check_targets(checkpoint, keys)
    reading = Reading(method=nothing.method, sites=())
    if check_shapes(front_end, checkpoint.modules, known, findings) and settings is not None:
        reading = front_end.build(checkpoint, settings)
    sites = _claim_rest(front_end, checkpoint, keys, refs, rooted, reading, same_values)
    if structure is not None and not checkpoint.modules and not findings.errors:
        _check_targets(checkpoint, keys)  # unless what is wrong with every key has been said
    return _program(nothing, reading, rooted, sites), findings


def _program(nothing: Program, reading: Reading, rooted: Rooted, sites: tuple[Site, ...]) -> Program:
    renamed = {raw: path for raw, path in rooted.paths.items() if module_path(raw) != path}
    return replace(nothing, method=reading.method, sites=sites, renamed=renamed, settings=reading.settings)


def _nothing_known() -> ModelStructure:
    return ModelStructure(model_type="unknown", linears={}, tensors={})


def _inferred(front_end: FrontEnd, modules: Mapping[str, Tensors]) -> ModelStructure:
    """Return what the adapter alone tells about its base: layers' names, and sizes where tensors give them."""
    linears = {}
    for raw, tensors in modules.items():
        path = module_path(raw)
        width, height = front_end.dimensions(tensors)
        weight = Ref(Source.BASE, f"{path}.weight", (height, width), "F32")
        linears[path] = Linear(name=path, in_features=width, out_features=height, weight=weight, gemm=path)
    return ModelStructure(model_type="unknown", linears=linears, tensors={})


def _root(modules: Mapping[str, Tensors], keys: SortedKeys, known: ModelStructure, findings: Findings) -> Rooted | None:
    plain = {raw: module_path(raw) for raw in modules}
    matched = {raw for raw, path in plain.items() if path in known.linears}
    if len(matched) == len(modules):
        if not modules and not findings.errors and not keys.rest:
            _no_match(keys, known, findings)
        return Rooted(paths=plain) if check_prefix(modules, findings) else None
    result = reroot(modules, known.linears.keys())
    if isinstance(result, Rerooting):
        findings.note(
            Code.SC304,
            where=result.dropped or "keys",
            found=f"prefix `{result.dropped}` of all {len(modules)} modules became `{result.added}`"
            + (
                " (PEFT's prefix twice, or a wrapper's)" if not result.added else " (remapped to that part of the base)"
            ),
            expected="keys that begin with `base_model.model.` and the base's own names",
            next="accepted: this is the only change of prefix that makes every key match",
        )
        return Rooted(paths=result.mapping, dropped=result.dropped, added=result.added)
    if matched:
        findings.error(
            Code.SC303,
            where=min(plain[raw] for raw in modules if raw not in matched),
            found=f"{len(modules) - len(matched)} of {len(modules)} modules match nothing in the base: "
            + some(plain[raw] for raw in modules if raw not in matched),
            expected=f"layers of {known.model_type} such as {some(list(known.linears)[:1])}",
            next="check that the base is the one the adapter was trained on; nothing is served in part",
        )
        return Rooted(paths={raw: path for raw, path in plain.items() if raw in matched})
    _no_match(keys, known, findings, ambiguous=result.ambiguous)
    return None


def _no_match(keys: SortedKeys, known: ModelStructure, findings: Findings, *, ambiguous: bool = False) -> None:
    names = [module_path(raw) for raw in keys.modules] or list(keys.rest)
    findings.error(
        Code.SC302,
        where=names[0] if names else "adapter",
        found=f"{len(names)} modules such as {some(names[:1])}; "
        + ("several changes of the prefix would make them match" if ambiguous else "no key matches the base"),
        expected=f"names of {known.model_type} such as {some(list(known.linears)[:1])}",
        next="check that the base is the one the adapter was trained on, or rename the keys",
    )


def _checkpoint(
    adapter: AdapterFolder,
    scan: Scan,
    known: ModelStructure,
    modules: Mapping[str, Tensors],
    keys: SortedKeys,
    refs: Mapping[str, Ref],
    rooted: Rooted,
    findings: Findings,
) -> Checkpoint:
    by_base = {rooted.paths[raw]: modules[raw] for raw in rooted.paths}
    inside = {path: linear for path, linear in known.linears.items() if after(path, rooted.added) is not None}
    return Checkpoint(
        config=adapter.config,
        modules={path: by_base[path] for path in inside if path in by_base},
        shared={slot: refs[key] for slot, key in keys.shared.items()},
        facts=scan.facts,
        structure=replace(known, linears=inside),
        names={path: rooted.trained_name(path) for path in inside} if rooted.added else {},
        findings=findings,
    )


def _check_targets(checkpoint: Checkpoint, keys: SortedKeys) -> None:
    check_targets(
        checkpoint.config,
        linears=[checkpoint.trained_name(path) for path in checkpoint.structure.linears],
        heads=heads_of(checkpoint.structure),
        tensors=[checkpoint.trained_name(path) for path in checkpoint.modules],
        keys=[module_path(key) for key in (*keys.modules, *keys.rest)],
        findings=checkpoint.findings,
    )


def _claim_rest(
    front_end: FrontEnd,
    checkpoint: Checkpoint,
    keys: SortedKeys,
    refs: Mapping[str, Ref],
    rooted: Rooted,
    reading: Reading,
    same_values: SameValues,
) -> tuple[Site, ...]:
    rest = Rest(
        config=checkpoint.config,
        structure=checkpoint.structure,
        adapted=frozenset(checkpoint.modules),
        to_base=rooted.to_base,
        same_values=same_values,
        inert_keys=front_end.inert_keys,
        findings=checkpoint.findings,
    )
    biases = claim_rest({key: refs[key] for key in keys.rest}, rest)
    return with_biases(reading.sites, biases, checkpoint.structure)

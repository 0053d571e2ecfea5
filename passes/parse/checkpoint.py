"""The parse pass: reads an adapter's configuration and keys into sites and slots, by the front end of its method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from scute_compile.base.structure import ModelStructure
from scute_compile.diagnostics import Code, fail
from scute_compile.ir.expressions import Ref, Source
from scute_compile.ir.linear import Linear
from scute_compile.ir.program import Program, Site, Stage
from scute_compile.passes.context import Context
from scute_compile.passes.obstacles import find_obstacles
from scute_compile.passes.parse.adalora import ADALORA
from scute_compile.passes.parse.checks import check_shapes, check_tensors, drop_unserved
from scute_compile.passes.parse.front_end import Checkpoint, FrontEnd, Reading, Tensors
from scute_compile.passes.parse.ia3 import IA3
from scute_compile.passes.parse.keys import SortedKeys, module_path, sort_keys
from scute_compile.passes.parse.lora import LORA
from scute_compile.passes.parse.oft import OFT
from scute_compile.passes.parse.rest import Rest, claim_rest, with_biases
from scute_compile.passes.parse.roots import Root, find_root
from scute_compile.passes.parse.settings import read_settings
from scute_compile.passes.parse.targets import check_targets, heads_of
from scute_compile.passes.parse.vera import VERA

FRONT_ENDS = (LORA, ADALORA, IA3, VERA, OFT)


def front_end_of(config: Mapping[str, object]) -> FrontEnd:
    """Return the front end of a configuration's method.

    Raises:
        ScuteError: SC202 for any other method.
    """
    peft_type = str(config.get("peft_type")).upper()
    by_type = {front_end.peft_type: front_end for front_end in FRONT_ENDS}
    if peft_type in by_type:
        return by_type[peft_type]
    fail(
        Code.SC202,
        where="peft_type",
        found=f"peft_type = {config.get('peft_type')!r}",
        expected="one of " + ", ".join(by_type),
    )


def parse(program: Program, context: Context) -> Program:
    """Read a checkpoint into a program.

    Parsing goes on after faults as long as the rest can be read, so that one run finds as many as possible. When the
    context's findings contain an error, the returned program must not be compiled.

    Args:
        program: An opened program.
        context: The adapter, and the base or None to read the adapter alone.
    """
    front_end, findings, structure = front_end_of(context.config), context.findings, context.structure
    settings = read_settings(
        context.config, front_end.settings, inert=front_end.inert, rules=front_end.rules, findings=findings
    )
    parsed = replace(program, stage=Stage.PARSED)
    keys = sort_keys(context.tensors, front_end.parameters, front_end.shared, findings)
    usable = check_tensors(keys, context.tensors, context.facts, front_end, findings)
    raw_paths = drop_unserved(keys.modules, structure, findings)
    if not usable:
        return parsed
    modules = {raw: {name: context.tensors[key] for name, key in keys.modules[raw].items()} for raw in raw_paths}
    known = structure or _inferred(front_end, modules)
    root = find_root(modules, keys, known, findings)
    if root is None:
        return parsed
    checkpoint = _checkpoint(context, known, modules, keys, root)
    if structure is not None and checkpoint.modules:
        _check_targets(checkpoint, keys)
    reading = Reading(method=program.method, sites=())
    if check_shapes(front_end, checkpoint.modules, known, findings) and settings is not None:
        reading = front_end.build(checkpoint, settings)
    sites = _claim_rest(front_end, checkpoint, keys, context, root, reading)
    if structure is not None and not checkpoint.modules and not findings.errors:
        _check_targets(checkpoint, keys)  # only when the errors of its keys don't explain that there are no modules
    if structure is not None:
        find_obstacles(sites, program.target.tp, findings)
    renamed = {raw: path for raw, path in root.paths.items() if module_path(raw) != path}
    return replace(parsed, method=reading.method, sites=sites, renamed=renamed, settings=reading.settings)


def _inferred(front_end: FrontEnd, modules: Mapping[str, Tensors]) -> ModelStructure:
    """Return the base as far as the adapter shows it: layers' names, and sizes where tensors give them."""
    linears = {}
    for raw, tensors in modules.items():
        path = module_path(raw)
        width, height = front_end.dimensions(tensors)
        weight = Ref(Source.BASE, f"{path}.weight", (height, width), "F32")
        linears[path] = Linear(name=path, in_features=width, out_features=height, weight=weight, gemm=path)
    return ModelStructure(model_type="unknown", linears=linears, tensors={})


def _checkpoint(
    context: Context, known: ModelStructure, modules: Mapping[str, Tensors], keys: SortedKeys, root: Root
) -> Checkpoint:
    by_base = {root.paths[raw]: modules[raw] for raw in root.paths}
    inside = {path: linear for path, linear in known.linears.items() if root.contains(path)}
    return Checkpoint(
        config=context.config,
        modules={path: by_base[path] for path in inside if path in by_base},
        shared={name: context.tensors[key] for name, key in keys.shared.items()},
        facts=context.facts,
        structure=replace(known, linears=inside),
        names={path: root.trained_name(path) for path in inside} if root.added else {},
        findings=context.findings,
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
    front_end: FrontEnd, checkpoint: Checkpoint, keys: SortedKeys, context: Context, root: Root, reading: Reading
) -> tuple[Site, ...]:
    rest = Rest(
        config=checkpoint.config,
        structure=checkpoint.structure,
        adapted=frozenset(checkpoint.modules),
        to_base=root.to_base,
        same_values=context.same_values,
        inert_keys=front_end.inert_keys,
        findings=checkpoint.findings,
    )
    biases = claim_rest({key: context.tensors[key] for key in keys.rest}, rest)
    return with_biases(reading.sites, biases, checkpoint.structure)

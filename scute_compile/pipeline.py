"""The pipeline: open -> scan -> parse -> place -> fold -> scale -> shard -> route -> pack.

Everything up to `route` is planning: it reads the adapter, names and shapes of the base, and no base weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from scute_compile import __version__
from scute_compile.base.structure import ModelStructure, build_structure
from scute_compile.diagnostics import Code, Diagnostic, Findings, ScuteError, fail
from scute_compile.formats.base_checkpoint import BaseCheckpoint, open_base
from scute_compile.formats.fingerprint import content_hash, structure_hash
from scute_compile.formats.peft_folder import AdapterFolder, open_adapter
from scute_compile.formats.safetensors import read_blocks
from scute_compile.ir.dtypes import DType
from scute_compile.ir.expressions import Ref, Source
from scute_compile.ir.program import Program
from scute_compile.ir.spec import verify
from scute_compile.ir.target import Target
from scute_compile.passes.fold import fold
from scute_compile.passes.parse.checkpoint import parse
from scute_compile.passes.parse.checks import NUMBERS
from scute_compile.passes.place import place
from scute_compile.passes.route import route
from scute_compile.passes.scale import scale, site_expressions
from scute_compile.passes.scan import Scan, scan
from scute_compile.passes.shard import find_obstacles, shard


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenBase:
    """A base model that adapters are planned against."""

    checkpoint: BaseCheckpoint
    structure: ModelStructure

    def structure_hash(self) -> str:
        """Return the hash of names, shapes and the fields that matter."""
        tensors = {key: (ref.dtype, ref.shape) for key, ref in self.structure.tensors.items()}
        return structure_hash(self.structure.model_type, self.structure.parameters, tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """An adapter after planning: a routed program, or the findings that refuse it."""

    source: str
    name: str
    adapter: AdapterFolder | None
    scan: Scan | None
    program: Program | None
    findings: tuple[Diagnostic, ...]

    @property
    def refused(self) -> bool:
        """Whether an error stands among the findings."""
        return self.program is None


def open_model(source: str, *, weights: bool) -> OpenBase:
    """Open a base model and derive its structure; weights stay unread.

    Args:
        source: a folder or a Hub id.
        weights: whether a Hub base must bring its weights along (for compiling) or headers suffice.
    """
    if not source:
        fail(
            Code.SC401,
            where="--base",
            found="an empty name",
            expected="a folder or a Hub id",
            next="name the base, or leave --base out for the adapter's own",
        )
    checkpoint = open_base(source, weights=weights)
    if checkpoint.quantized:
        fail(
            Code.SC404,
            where=source,
            found=f"quantization_config: {checkpoint.quantized}",
            expected="weights in float32, bfloat16 or float16",
            next="pass with --base the model that this one was quantized from",
        )
    if checkpoint.tensors:
        tensors = {
            key: Ref(Source.BASE, key, stored.entry.shape, stored.entry.dtype)
            for key, stored in checkpoint.tensors.items()
        }
    else:
        from scute_compile.base.config_only import structure_tensors

        if checkpoint.path is None:
            raise AssertionError(source)
        tensors = dict(structure_tensors(checkpoint.path / "config.json"))
    return OpenBase(checkpoint=checkpoint, structure=build_structure(checkpoint.config, tensors))


def plan(
    source: str,
    base: OpenBase | None,
    target: Target,
    *,
    hash_files: bool = False,
    name: str = "",
    adapter: AdapterFolder | None = None,
) -> Planned:
    """Plan one adapter as far as routes.

    Args:
        source: an adapter folder or Hub id.
        base: the base, or None to look at the adapter alone (then the plan ends after folding).
        target: what to compile for.
        hash_files: whether the scan hashes the adapter's files as well.
        name: what to call the adapter; its folder's name by default.
        adapter: the adapter of `source`, when it is open already.
    """
    try:
        adapter = adapter or open_adapter(source)
        scanned = scan(adapter, hash_files=hash_files)
        compare = _comparison(adapter, base.checkpoint) if base else _never_same
        program, findings = parse(adapter, scanned, base.structure if base else None, compare, target)
        if base:
            find_obstacles(program.sites, target.tp, findings)
        findings.raise_if_errors()
        program = _rewrite(program, scanned, base, findings)
        findings.raise_if_errors()
    except ScuteError as error:
        label = name or (adapter.name if adapter else Path(source).name)
        return Planned(source=source, name=label, adapter=adapter, scan=None, program=None, findings=error.diagnostics)
    found = tuple(findings)
    return Planned(
        source=source,
        name=name or adapter.name,
        adapter=adapter,
        scan=scanned,
        program=replace(program, findings=found),
        findings=found,
    )


def _rewrite(program: Program, scanned: Scan, base: OpenBase | None, findings: Findings) -> Program:
    """Run the passes from place to route in their order, checking the spec between them."""
    facts = scanned.facts
    if base is None:
        return verify(fold(verify(program), facts))
    linears, structure = base.structure.linears, base.structure
    passes: tuple[Callable[[Program], Program], ...] = (
        lambda parsed: place(parsed, linears),
        lambda placed: fold(placed, facts),
        scale,
        shard,
        # delta rows keep a near-identity rotation's digits; exactness comes before a few bytes
        lambda sharded: route(
            sharded, structure=structure, near_identity=[s.name for s in sharded.sites if s.rotation]
        ),
    )
    verify(program)
    sited = bool(program.sites)
    for step in passes:
        program = verify(step(program))
        find_obstacles(program.sites, program.target.tp, findings) if step is passes[0] else None
        findings.raise_if_errors()
    if sited and not program.sites:
        findings.note(
            Code.SC314,
            where="adapter",
            found="every B (or every slot) is zero or the identity: no effect",
            expected="a trained adapter",
            next="compiled all the same; it answers as the base does",
        )
    if not base.checkpoint.tensors:
        _check_needs(program, findings)
    _check_numbers(program, findings)
    return program


def _needed(program: Program) -> dict[Ref, str]:
    """Return the base tensors that values depend on, each with a site that needs it."""
    return {
        ref: site.name
        for site in program.sites
        for value in site_expressions(site)
        for ref in value.references(Source.BASE)
    }


def _check_numbers(program: Program, findings: Findings) -> None:
    """Refuse base tensors that are stored as codes of a quantization which the configuration doesn't mention."""
    coded = {ref: site for ref, site in _needed(program).items() if ref.dtype not in NUMBERS}
    if coded:
        ref, site = next(iter(coded.items()))
        findings.error(
            Code.SC404,
            where=site,
            found=f"{len(coded)} base tensors that are needed, such as `{ref.key}` in {ref.dtype}",
            expected="weights in float32, bfloat16 or float16",
            next="pass with --base the model that this one was quantized from",
        )


def _check_needs(program: Program, findings: Findings) -> None:
    needed = _needed(program)
    if needed:
        key, site = next((ref.key, site) for ref, site in needed.items())
        findings.error(
            Code.SC403,
            where=site,
            found=f"{len(needed)} base tensors are needed, such as `{key}`; the base folder holds only a config.json",
            expected="the base's weights (DoRA's norms) or biases",
            next="pass a base folder with its safetensors files",
        )


def _never_same(adapter_tensor: Ref, base_tensor: Ref) -> bool | None:
    del adapter_tensor, base_tensor
    return None


def _comparison(adapter: AdapterFolder, base: BaseCheckpoint) -> Callable[[Ref, Ref], bool | None]:
    """Return how copies of base weights are compared: block by block, as numbers."""

    def same(adapter_tensor: Ref, base_tensor: Ref) -> bool | None:
        stored = base.tensors.get(base_tensor.key)
        if stored is None or stored.file is None or not {adapter_tensor.dtype, base_tensor.dtype} <= NUMBERS:
            return None
        entry = adapter.tensors[adapter_tensor.key]
        values = 1 << 20
        blocks = zip(
            read_blocks(adapter.weights, entry, values * (entry.nbytes // max(1, entry.size))),
            read_blocks(stored.file, stored.entry, values * (stored.entry.nbytes // max(1, stored.entry.size))),
            strict=True,
        )
        return all(np.array_equal(mine, theirs) for mine, theirs in blocks)

    return same


def dtypes_to_try(target: Target, structure: ModelStructure) -> tuple[DType, ...]:
    """Return the artifact's dtype: the one asked for, or the base's with float32 for values that it can't hold."""
    if target.dtype is not None:
        return (target.dtype,)
    own = DType(structure.dtype)
    return (own,) if own is DType.FLOAT32 else (own, DType.FLOAT32)


def compile_planned(
    planned: Sequence[Planned], base: OpenBase, store: Path, advance: Callable[[str, int, int], None]
) -> tuple[Path | ScuteError, ...]:
    """Pack planned adapters into a store, reading the base once for all of them.

    Args:
        planned: adapters that were not refused.
        base: the base that they were planned against.
        store: the folder that artifacts and shared factors go to.
        advance: called with what is being done, how much was done, and how much there is.

    Returns:
        Per adapter its folder, or what refused it.
    """
    try:
        from scute_compile.pack.pack import Package, pack, read_norms
    except ModuleNotFoundError as error:
        fail(
            Code.SC701,
            where="compile",
            found=f"no module named {error.name!r}",
            expected="torch",
            next="`pip install torch peft`, or compile on another machine",
        )
    identity = {"structure": base.structure_hash(), "content": content_hash(base.checkpoint)}
    packages = []
    for item in planned:
        if item.program is None or item.adapter is None or item.scan is None:
            raise AssertionError(item)
        said = item.adapter.config.get("base_model_name_or_path")
        packages.append(
            Package(
                name=item.name,
                program=item.program,
                adapter=item.adapter,
                base={
                    "name": said if isinstance(said, str) else None,
                    "model_type": base.structure.model_type,
                    **identity,
                },
                sources=item.scan.sha256,
                dtypes=dtypes_to_try(item.program.target, base.structure),
                tool=f"scute {__version__}",
            )
        )
    norms = read_norms(packages, base.checkpoint, lambda done, total: advance("base", done, total))
    results: list[Path | ScuteError] = []
    for package, own in zip(packages, norms, strict=True):
        try:
            results.append(pack(package, base.checkpoint, own, store))
        except ScuteError as error:
            results.append(error)
        advance("adapters", len(results), len(packages))
    return tuple(results)

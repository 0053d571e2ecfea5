"""Scute: an adapter compiler for PEFT checkpoints.

The functions of this module are the public API of the compiler; the `scute` command calls them too. The runtime that
serves artifacts is `scute_compile.runtime_min`.

Importing this module imports neither torch, transformers nor numpy: each function imports what it needs when it is
called. `check`, `inspect` and `explain` never import torch.

Examples:
    >>> import scute_compile as scute
    >>> report = scute.compile("adapters/dora", base="base", target=scute.Target(tp=2), store="store")
    >>> report.adapters[0].outcome
    'exact'
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from scute_compile.diagnostics import ScuteError
from scute_compile.ir.dtypes import DType
from scute_compile.ir.target import LoraSharding, Target, Workload

if TYPE_CHECKING:
    from scute_compile.cli.explain.report import ExplainReport
    from scute_compile.cli.inspect.report import InspectReport
    from scute_compile.cli.verify.report import VerifyReport
    from scute_compile.driver.reports import CheckReport, CompileReport, Outcome
    from scute_compile.formats.artifact import Artifact

__version__ = "0.1.0"

__all__ = [
    "Artifact",
    "CheckReport",
    "CompileReport",
    "DType",
    "ExplainReport",
    "InspectReport",
    "LoraSharding",
    "Outcome",
    "ScuteError",
    "Target",
    "VerifyReport",
    "Workload",
    "__version__",
    "check",
    "compile",
    "explain",
    "inspect",
    "load_artifact",
    "verify",
]

StrPath = str | os.PathLike[str]
"""A path, or the id of a Hub repository as `owner/name`."""

_LAZY = {
    "Artifact": "scute_compile.formats.artifact",
    "CheckReport": "scute_compile.driver.reports",
    "CompileReport": "scute_compile.driver.reports",
    "ExplainReport": "scute_compile.cli.explain.report",
    "InspectReport": "scute_compile.cli.inspect.report",
    "Outcome": "scute_compile.driver.reports",
    "VerifyReport": "scute_compile.cli.verify.report",
}
"""Types of results -> the module that is imported when the name is first used."""


if not TYPE_CHECKING:  # a type checker reads the imports above, and reports unknown names

    def __getattr__(name: str) -> object:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_LAZY[name]), name)
        return value


def compile(  # noqa: A001 - the verb of the field, always called as `scute.compile`
    adapters: StrPath | Iterable[StrPath],
    *,
    base: StrPath | None = None,
    target: Target = Target(),  # noqa: B008 - frozen
    store: StrPath = "scute-store",
    name: str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> CompileReport:
    """Compile adapters into a store. Several adapters in one call read the base's weights once.

    A refused adapter leaves nothing behind and does not stop the others.

    Args:
        adapters: One or several PEFT folders or Hub ids.
        base: The base model, a folder or a Hub id. None: the base that each adapter's configuration names.
        target: Ranks, dtype, layout of the low-rank terms, and the workload that routes are chosen for.
        store: The folder that artifacts and shared factors are written to.
        name: The artifact's name, for a call with one adapter. None: the adapter folder's name.
        progress: Called with the kind of work (`base`: bytes of base weights read; `adapters`: artifacts written), the
            amount done and the total.

    Returns:
        One outcome per adapter, in order, with its findings and its artifact's folder.

    Raises:
        ScuteError: SC4xx when the base can't be used and was given or the call has one adapter, SC701 without torch,
            SC703 for a value out of range. Faults of an adapter are in its outcome; `raise_if_refused` raises them.

    Examples:
        >>> import scute_compile as scute
        >>> report = scute.compile(["adapters/dora", "adapters/vera"], target=scute.Target(tp=2), store="store")
        >>> for item in report.adapters:
        ...     print(item.name, item.method, item.outcome, item.artifact)
        dora dora exact store/dora
        vera vera exact store/vera
    """
    from scute_compile.driver.arguments import checked_target, path_of, paths_of
    from scute_compile.driver.compiling import compile_adapters

    return compile_adapters(
        paths_of(adapters),
        base=None if base is None else path_of(base),
        target=checked_target(target),
        store=Path(store),
        name=name or "",
        progress=progress or (lambda *_: None),
    )


def check(
    paths: StrPath | Iterable[StrPath],
    *,
    base: StrPath | None = None,
    tp: int | None = None,
    lora_sharding: LoraSharding | str | None = None,
) -> CheckReport:
    """Check whether adapters would compile and be exact, and whether artifacts are intact. Reads no base weights.

    Args:
        paths: One or several PEFT folders, Hub ids or artifacts.
        base: The base model, a folder or a Hub id. None: the base that each adapter's configuration names; artifacts
            are then checked against no base.
        tp: Tensor-parallel ranks. None: 1 for adapters, any for artifacts.
        lora_sharding: Layout of the low-rank terms, `default` or `full`. None: `default` for adapters, any for
            artifacts.

    Returns:
        One outcome per path, in order, with its findings.

    Raises:
        ScuteError: SC4xx when the base can't be used and was given or the call has one path, SC703 for a value out of
            range. Faults of an adapter are in its outcome; `raise_if_refused` raises them.

    Examples:
        >>> import scute_compile as scute
        >>> report = scute.check("adapters/vera", base="base", tp=3)
        >>> report.refused
        True
        >>> finding = report.adapters[0].findings[0]
        >>> finding.code.name, finding.where, finding.expected
        ('SC501', 'model.layers.0.mlp.down_proj', 'a tp that divides 160')
    """
    from scute_compile.driver.arguments import path_of, paths_of, requested
    from scute_compile.driver.checking import check_paths

    return check_paths(
        paths_of(paths),
        base=None if base is None else path_of(base),
        requested=requested(tp=tp, lora_sharding=lora_sharding),
    )


def inspect(
    path: StrPath,
    *,
    base: StrPath | None = None,
    tp: int | None = None,
    lora_sharding: LoraSharding | str | None = None,
) -> InspectReport:
    """Describe an adapter or an artifact: method, sites, ranks, slots, owners and bytes.

    Args:
        path: A PEFT folder, a Hub id or an artifact.
        base: The base model, a folder or a Hub id. None: an adapter is described without cuts, routes and the sizes
            that only a base gives.
        tp: Tensor-parallel ranks. None: 1 for an adapter, the manifest's for an artifact.
        lora_sharding: Layout of the low-rank terms, `default` or `full`. None: `default` for an adapter, the
            manifest's for an artifact.

    Returns:
        The description.

    Raises:
        ScuteError: the findings that refuse the adapter, faults of the artifact (SC6xx), SC801 when it was compiled for
            other values, SC703 for a value out of range.

    Examples:
        >>> import scute_compile as scute
        >>> report = scute.inspect("store/vera")
        >>> report.method.value, report.tp, len(report.sites)
        ('vera', 2, 4)
        >>> [(slot.slot, slot.owner.value, slot.route) for slot in report.sites[0].slots if slot.route]
        [('d', 'adapter', 'in the shrink'), ('e', 'adapter', 'in the expand')]
    """
    from scute_compile.cli.inspect.report import inspect_path
    from scute_compile.driver.arguments import path_of, requested

    return inspect_path(
        path_of(path),
        base=None if base is None else path_of(base),
        requested=requested(tp=tp, lora_sharding=lora_sharding),
    )


def explain(
    path: StrPath,
    *,
    base: StrPath | None = None,
    tp: int | None = None,
    lora_sharding: LoraSharding | str | None = None,
    site: str | None = None,
    tenants: int | None = None,
    tokens: int | None = None,
) -> ExplainReport:
    """Explain what the compiler did with every slot: merged or live, why, and the routes with their costs.

    Args:
        path: A PEFT folder, a Hub id or an artifact.
        base: The base model, a folder or a Hub id. None: the base that the adapter's configuration names; an artifact
            needs none.
        tp: Tensor-parallel ranks. None: 1 for an adapter, the manifest's for an artifact.
        lora_sharding: Layout of the low-rank terms, `default` or `full`. None: `default` for an adapter, the
            manifest's for an artifact.
        site: A pattern with `*` and `?`; only sites whose whole name matches. None: all sites.
        tenants: Distinct adapters in the decode step that routes are priced for. None: 16 for an adapter, the
            manifest's for an artifact.
        tokens: Rows in that step. None: 16 for an adapter, the manifest's for an artifact.

    Returns:
        The notes of the passes.

    Raises:
        ScuteError: the findings that refuse the adapter, SC4xx for its base, faults of the artifact (SC6xx), SC801 and
            SC703 when it was compiled for other values, SC703 when `site` matches no site.

    Examples:
        >>> import scute_compile as scute
        >>> report = scute.explain("store/dora", site="*.layers.0.*q_proj")
        >>> [(note.slot, note.action.value) for note in report.notes]
        [('e', 'merged'), ('c', 'merged'), ('s', 'planned'), ('s', 'live')]
    """
    from scute_compile.cli.explain.report import explain_path
    from scute_compile.driver.arguments import path_of, requested

    return explain_path(
        path_of(path),
        base=None if base is None else path_of(base),
        requested=requested(tp=tp, lora_sharding=lora_sharding, tenants=tenants, tokens=tokens),
        site=site,
    )


def verify(artifact: StrPath, *, adapter: StrPath, base: StrPath | None = None, tokens: int = 64) -> VerifyReport:
    """Run an artifact and PEFT in float32 on the same random tokens, and compare their log-probabilities.

    Args:
        artifact: The artifact's folder.
        adapter: The PEFT folder or Hub id that it was compiled from.
        base: The base model with weights, a folder or a Hub id. None: the base that the adapter's configuration names.
        tokens: The least number of tokens to compare.

    Returns:
        The errors beside the adapter's effect, and whether they pass.

    Raises:
        ScuteError: faults of the artifact (SC6xx), the adapter (SC1xx, SC2xx) or the base (SC4xx), SC608 when the
            artifact is for another base, SC701 without torch, transformers and peft. An artifact that differs from PEFT
            is reported, not raised.

    Examples:
        >>> import scute_compile as scute
        >>> report = scute.verify("store/dora", adapter="adapters/dora", tokens=16)
        >>> report.passed, report.result.dtype, report.result.tp
        (True, 'float32', 2)
    """
    from scute_compile.cli.verify.report import verify_artifact
    from scute_compile.driver.arguments import at_least_one, path_of

    return verify_artifact(
        path_of(artifact),
        adapter=path_of(adapter),
        base=None if base is None else path_of(base),
        tokens=at_least_one(tokens=tokens),
    )


def load_artifact(path: StrPath) -> Artifact:
    """Open an artifact, and check its manifest, files and hashes.

    Args:
        path: The artifact's folder, inside its store.

    Returns:
        The manifest and the paths of the files. Tensors are not loaded.

    Raises:
        ScuteError: SC601 to SC606.

    Examples:
        >>> import scute_compile as scute
        >>> artifact = scute.load_artifact("store/dora")
        >>> artifact.manifest.method.value, artifact.manifest.tp, len(artifact.manifest.ranks)
        ('dora', 2, 2)
    """
    from scute_compile.driver.arguments import path_of
    from scute_compile.formats.artifact import open_artifact

    return open_artifact(path_of(path))

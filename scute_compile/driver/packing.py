"""Packs planned adapters into a store, reading the base once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from scute_compile import __version__
from scute_compile.base.structure import ModelStructure
from scute_compile.diagnostics import Code, ScuteError, as_scute_error, fail
from scute_compile.driver.bases import OpenBase
from scute_compile.formats.fingerprint import content_hash, sample_hashes
from scute_compile.ir.dtypes import DType
from scute_compile.ir.target import Target
from scute_compile.pipeline import Planned


def dtypes_to_try(target: Target, structure: ModelStructure) -> tuple[DType, ...]:
    """Return the target's dtype; without one the base's, and then float32 for values that don't fit it."""
    if target.dtype is not None:
        return (target.dtype,)
    return tuple(dict.fromkeys((structure.dtype, DType.FLOAT32)))


def compile_planned(
    planned: Sequence[Planned], base: OpenBase, store: Path, advance: Callable[[str, int, int], None]
) -> tuple[Path | ScuteError, ...]:
    """Pack planned adapters into a store, reading the base once for all of them.

    Args:
        planned: Adapters that were not refused.
        base: The base that they were planned for.
        store: The folder that artifacts and shared factors are written to.
        advance: Called with the kind of work (`base` or `adapters`), the amount done, and the total.

    Returns:
        For each adapter its artifact's folder, or the error that refused it.
    """
    try:
        from scute_compile.pack.pack import Norms, Package, pack, read_norms
    except ModuleNotFoundError as error:
        fail(
            Code.SC701,
            where="compile",
            found=f"no module named {error.name!r}",
            expected="torch",
            next="`pip install 'scute-compile[compile]'`, or compile on another machine",
        )
    checkpoint = base.checkpoint
    if checkpoint.has_weights:
        checkpoint = replace(checkpoint, samples=sample_hashes(checkpoint))
    identity = {"structure": base.structure_hash(), "content": content_hash(checkpoint)}
    packages = []
    for item in planned:
        if item.program is None or item.adapter is None or item.scan is None:
            raise AssertionError(item)
        packages.append(
            Package(
                name=item.name,
                program=item.program,
                adapter=item.adapter,
                base={"model_type": base.structure.model_type, **identity},
                sources=item.scan.sha256,
                tensor_sha256=item.scan.tensor_sha256,
                dtypes=dtypes_to_try(item.program.target, base.structure),
                tool=f"scute {__version__}",
            )
        )

    def norms_of(some: Sequence[Package]) -> tuple[Norms | ScuteError, ...]:
        try:
            return read_norms(some, checkpoint, partial(advance, "base"))
        except Exception as error:  # noqa: BLE001 - the fault of one adapter must not end the work on others
            if len(some) == 1:
                return (as_scute_error(error),)
            return tuple(norms for package in some for norms in norms_of([package]))

    results: list[Path | ScuteError] = []
    for package, norms in zip(packages, norms_of(packages), strict=True):
        try:
            results.append(norms if isinstance(norms, ScuteError) else pack(package, checkpoint, norms, store))
        except Exception as error:  # noqa: BLE001 - as above
            results.append(as_scute_error(error))
        advance("adapters", len(results), len(packages))
    return tuple(results)

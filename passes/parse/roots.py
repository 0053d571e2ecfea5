"""Finds where an adapter's modules lie in the base: under their own names, or after one change of their prefix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scute_compile.base.rerooting import Rerooting, after, join, reroot
from scute_compile.base.structure import ModelStructure
from scute_compile.diagnostics import Code, Findings
from scute_compile.passes.parse.front_end import Tensors
from scute_compile.passes.parse.keys import SortedKeys, check_prefix, module_path
from scute_compile.passes.parse.targets import some


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """The places of an adapter's modules in the base."""

    paths: Mapping[str, str]
    """Raw module path -> base module path."""
    dropped: str = ""
    added: str = ""

    def to_base(self, raw: str) -> str:
        """Return the base's path for any raw path."""
        rest = after(raw, self.dropped) if self.dropped or self.added else None
        return module_path(raw) if rest is None else join(self.added, rest)

    def contains(self, path: str) -> bool:
        """Return whether a base path lies under the root."""
        return after(path, self.added) is not None

    def trained_name(self, path: str) -> str:
        """Return the path that a base module had when the adapter was trained; a wrapper's prefix is not part of it."""
        rest = after(path, self.added) if self.added else None
        return path if rest is None else join(module_path(f"{self.dropped}.").rstrip("."), rest)


def find_root(
    modules: Mapping[str, Tensors], keys: SortedKeys, known: ModelStructure, findings: Findings
) -> Root | None:
    """Match an adapter's modules to the base's layers.

    Args:
        modules: The adapter's modules by raw path.
        keys: All keys of the checkpoint.
        known: The base.
        findings: Receives SC302 (nothing matches), SC303 (some modules don't) and SC304 (the prefix was changed).

    Returns:
        The root; when only some modules match, with those alone; None when none do.
    """
    plain = {raw: module_path(raw) for raw in modules}
    matched = {raw for raw, path in plain.items() if path in known.linears}
    if len(matched) == len(modules):
        if not modules and not findings.errors and not keys.rest:
            _refuse_all(keys, known, findings)
        return Root(paths=plain) if check_prefix(modules, findings) else None
    result = reroot(modules, known.linears.keys())
    if isinstance(result, Rerooting):
        origin = " (remapped to that part of the base)" if result.added else " (PEFT's prefix twice, or a wrapper's)"
        findings.note(
            Code.SC304,
            where=result.dropped or "keys",
            found=f"prefix `{result.dropped}` of all {len(modules)} modules became `{result.added}`{origin}",
            expected="keys that begin with `base_model.model.` and the base's own names",
            next="accepted: this is the only change of prefix that makes every key match",
        )
        return Root(paths=result.mapping, dropped=result.dropped, added=result.added)
    if matched:
        unmatched = [plain[raw] for raw in modules if raw not in matched]
        findings.error(
            Code.SC303,
            where=min(unmatched),
            found=f"{len(unmatched)} of {len(modules)} modules match nothing in the base: {some(unmatched)}",
            expected=f"layers of {known.model_type} such as {some(list(known.linears)[:1])}",
            next="check that the base is the one the adapter was trained on; nothing is served in part",
        )
        return Root(paths={raw: path for raw, path in plain.items() if raw in matched})
    _refuse_all(keys, known, findings, ambiguous=result.ambiguous)
    return None


def _refuse_all(keys: SortedKeys, known: ModelStructure, findings: Findings, *, ambiguous: bool = False) -> None:
    names = [module_path(raw) for raw in keys.modules] or list(keys.rest)
    findings.error(
        Code.SC302,
        where=names[0] if names else "adapter",
        found=f"{len(names)} modules such as {some(names[:1])}; "
        + ("several changes of the prefix would make them match" if ambiguous else "no key matches the base"),
        expected=f"names of {known.model_type} such as {some(list(known.linears)[:1])}",
    )

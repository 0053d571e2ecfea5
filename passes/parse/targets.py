"""Which modules a configuration targets, to be held against the modules that have tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from scute_compile.codes import Code
from scute_compile.diagnostics import Findings
from scute_compile.passes.parse.patterns import ends_with, full_match, layer_number

NAMED = 4
"""How many examples a message names."""


def names(value: object) -> tuple[str, ...]:
    """Return a string or a list of strings as a tuple; nothing for null."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    return tuple(str(item) for item in value) if isinstance(value, Sequence) else ()


def some(items: Iterable[str]) -> str:
    """Return a few items for a message, with the count of the rest.

    >>> some(["a", "b"])
    '`a`, `b`'
    """
    listed = sorted(items)
    shown = ", ".join(f"`{item}`" for item in listed[:NAMED])
    return shown + (f" and {len(listed) - NAMED} more" if len(listed) > NAMED else "")


def is_targeted(config: Mapping[str, object], path: str) -> bool:
    """Return whether PEFT would wrap the linear layer at `path`."""
    excluded = config.get("exclude_modules")
    if isinstance(excluded, str):
        if full_match(excluded, path, where="exclude_modules"):
            return False
    elif any(ends_with(path, name) for name in names(excluded)):
        return False
    targets = config.get("target_modules")
    if isinstance(targets, str):
        if targets.lower() == "all-linear":
            return True
        return full_match(targets, path, where="target_modules")
    listed = names(targets)
    if path in listed:
        return True
    return any(ends_with(path, name) for name in listed) and _in_layers(config, path)


def _in_layers(config: Mapping[str, object], path: str) -> bool:
    wanted = config.get("layers_to_transform")
    if wanted is None or wanted == []:
        return True
    layers = wanted if isinstance(wanted, list) else [wanted]
    return layer_number(path, names(config.get("layers_pattern"))) in layers


def check_targets(
    config: Mapping[str, object], linears: Iterable[str], tensors: Iterable[str], findings: Findings
) -> None:
    """Record where the configuration and the tensors disagree about the adapted modules.

    Args:
        config: the adapter's configuration.
        linears: paths of the base's linear layers inside the adapter's root, as the adapter names them.
        tensors: paths of the modules that have tensors, likewise.
        findings: where disagreements go.
    """
    if config.get("target_modules") is None:
        return
    present = set(tensors)
    extra = sorted(path for path in present if not is_targeted(config, path))
    if extra:
        findings.error(
            Code.SC310,
            where="target_modules",
            found=f"{len(extra)} of {len(present)} modules with tensors match no target: {some(extra)}",
            expected=f"every adapted module to match {config['target_modules']!r}",
            next="correct target_modules; PEFT would drop these tensors without a word",
        )
        return
    missing = sorted(path for path in linears if path not in present and is_targeted(config, path))
    if missing:
        findings.error(
            Code.SC319,
            where="target_modules",
            found=f"{len(missing)} targeted modules of the base have no tensors: {some(missing)}",
            expected=f"tensors for all {len(missing) + len(present)} modules that match",
            next="check that the base is the one the adapter was trained on, and that the checkpoint is whole",
        )

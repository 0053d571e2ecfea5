"""Sorting a checkpoint's keys: every key ends in one named parameter of one module, or is left for other claims."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scute_compile.codes import Code
from scute_compile.diagnostics import Findings

PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter that a method saves per module."""

    slot: str
    """What the front end calls it."""
    spellings: tuple[str, ...]
    """How keys spell it, without the module path: `lora_A.weight`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedKeys:
    """A checkpoint's keys by what they are."""

    modules: Mapping[str, Mapping[str, str]]
    """Raw module path (prefix included) -> parameter -> key."""
    shared: Mapping[str, str]
    """Parameter -> key, for tensors that stand beside the modules."""
    rest: tuple[str, ...]
    """Keys that no parameter of the method explains."""


def without_adapter_name(key: str, stems: Iterable[str]) -> str:
    """Remove an adapter's name that old trainers left after a parameter's stem.

    >>> without_adapter_name("m.lora_A.default.weight", ["lora_A"])
    'm.lora_A.weight'
    >>> without_adapter_name("m.lora_E.default", ["lora_E"])
    'm.lora_E'
    """
    segments = key.split(".")
    for position, segment in enumerate(segments[:-1]):
        if segment in stems and segments[position + 1] not in ("weight", "bias"):
            return ".".join(segments[: position + 1] + segments[position + 2 :])
    return key


def sort_keys(
    keys: Iterable[str], parameters: tuple[Parameter, ...], shared: tuple[Parameter, ...], findings: Findings
) -> SortedKeys:
    """Sort `keys`; a slot that two keys mean is an error, since which one counts would be a guess."""
    stems = {spelling.split(".")[0] for parameter in parameters for spelling in parameter.spellings}
    modules: dict[str, dict[str, str]] = {}
    beside: dict[str, str] = {}
    rest = []
    for key in keys:
        plain = without_adapter_name(key, stems)
        path, parameter = _split(plain, parameters)
        lone = next((p for p in shared for s in p.spellings if plain.endswith(f".{s}") or plain == s), None)
        if parameter is not None:
            claimed, slot = modules.setdefault(path, {}), parameter.slot
        elif lone is not None:
            claimed, slot = beside, lone.slot
        else:
            rest.append(key)
            continue
        if slot in claimed:
            findings.error(
                Code.SC306,
                where=path or slot,
                found=f"`{claimed[slot]}` and `{key}`",
                expected=f"one tensor for `{slot}`",
                next="remove the one that is not meant",
            )
        claimed[slot] = key
    return SortedKeys(modules=modules, shared=beside, rest=tuple(rest))


def _split(key: str, parameters: tuple[Parameter, ...]) -> tuple[str, Parameter | None]:
    for parameter in parameters:
        for spelling in parameter.spellings:
            if key.endswith(f".{spelling}"):
                return key[: -len(spelling) - 1], parameter
    return key, None


def module_path(raw: str) -> str:
    """Return a raw path without PEFT's own prefix.

    >>> module_path("base_model.model.model.layers.0.self_attn.q_proj")
    'model.layers.0.self_attn.q_proj'
    """
    return raw.removeprefix(PREFIX)

"""Sorts a checkpoint's keys: every key is a parameter of one module, a shared tensor, or one of the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from scute_compile.diagnostics import Code, Findings

PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter that a method saves per module."""

    name: str
    """The front end's name for it."""
    spellings: tuple[str, ...]
    """The ends of its keys, without the module path: `lora_A.weight`."""
    axes: tuple[str, ...]
    """The axes of its tensors, as many as PEFT's: `in` and `out` are the layer's; other names say what they count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SortedKeys:
    """A checkpoint's keys, sorted."""

    modules: Mapping[str, Mapping[str, str]]
    """Raw module path (prefix included) -> parameter -> key."""
    shared: Mapping[str, str]
    """Parameter -> key, for tensors that belong to no module."""
    rest: tuple[str, ...]
    """Keys that are no parameter of the method."""


def without_adapter_name(key: str, stems: Iterable[str]) -> tuple[str, str]:
    """Remove the adapter's name that some trainers leave after a parameter's stem; return the key and the name.

    >>> without_adapter_name("m.lora_A.default.weight", ["lora_A"])
    ('m.lora_A.weight', 'default')
    >>> without_adapter_name("m.lora_E.default", ["lora_E"])
    ('m.lora_E', 'default')
    >>> without_adapter_name("m.lora_A.weight", ["lora_A"])
    ('m.lora_A.weight', '')
    """
    segments = key.split(".")
    for position, segment in enumerate(segments[:-1]):
        if segment in stems and segments[position + 1] not in ("weight", "bias"):
            return ".".join(segments[: position + 1] + segments[position + 2 :]), segments[position + 1]
    return key, ""


def sort_keys(
    keys: Iterable[str], parameters: tuple[Parameter, ...], shared: tuple[Parameter, ...], findings: Findings
) -> SortedKeys:
    """Sort `keys`; records SC306 when two keys name one parameter of a module."""
    stems = {spelling.split(".")[0] for parameter in parameters for spelling in parameter.spellings}
    modules: dict[str, dict[str, str]] = {}
    beside: dict[str, str] = {}
    rest = []
    adapter_names: dict[str, str] = {}
    for key in keys:
        plain, adapter_name = without_adapter_name(key, stems)
        path, parameter = _split(plain, parameters)
        lone = next((p for p in shared for s in p.spellings if plain.endswith(f".{s}") or plain == s), None)
        if parameter is not None:
            claimed, name = modules.setdefault(path, {}), parameter.name
            adapter_names.setdefault(adapter_name, key)
        elif lone is not None:
            claimed, name = beside, lone.name
        else:
            rest.append(key)
            continue
        if name in claimed:
            findings.error(
                Code.SC306,
                where=path or name,
                found=f"`{claimed[name]}` and `{key}`",
                expected=f"one tensor for `{name}`",
            )
        claimed[name] = key
    _check_names(adapter_names, findings)
    return SortedKeys(modules=modules, shared=beside, rest=tuple(rest))


def _check_names(names: Mapping[str, str], findings: Findings) -> None:
    """Check the adapters' names that keys contain; `names` has one key for each name. PEFT's name is `default`."""
    given = [name for name in names if name not in ("", "default")]
    if not given:
        return
    key = names[given[0]]
    if len(names) > 1:
        findings.error(
            Code.SC301,
            where=key,
            found="tensors of several adapters in one file: " + " and ".join(f"`{named}`" for named in names.values()),
            expected=f"one adapter's name in every key, or none; there are `{'`, `'.join(sorted(names))}`",
            next="save each adapter into a separate folder",
        )
    else:
        findings.note(
            Code.SC318,
            where=key,
            found=f"`{key}`: the name `{given[0]}` in every key",
            expected="keys without an adapter's name, as save_pretrained writes them",
            next="read without the name; the current PEFT ignores keys with a name other than `default`",
        )


def check_prefix(raw_paths: Iterable[str], findings: Findings) -> bool:
    """Record paths without PEFT's prefix; return whether each module occurs once.

    Args:
        raw_paths: Raw module paths, all of which match the base.
        findings: Receives SC303, SC304 and SC306.
    """
    raws = dict.fromkeys(raw_paths)
    bare = [raw for raw in raws if not raw.startswith(PREFIX)]
    twice = [raw for raw in bare if PREFIX + raw in raws]
    for raw in twice:
        findings.error(
            Code.SC306,
            where=raw,
            found=f"the module as `{PREFIX}{raw}` and as `{raw}`",
            expected="its tensors once",
            next="remove the ones that are not meant",
        )
    if bare and not twice and len(bare) < len(raws):
        findings.error(
            Code.SC303,
            where=bare[0],
            found=f"{len(bare)} of {len(raws)} modules lack the prefix `{PREFIX}`",
            expected="the prefix on all keys, or on none",
            next="the file was put together from several; save the adapter again",
        )
    elif bare and not twice:
        findings.note(
            Code.SC304,
            where=bare[0],
            found=f"no key has the prefix `{PREFIX}`; all {len(raws)} modules match without",
            expected=f"keys that begin with `{PREFIX}`",
            next="read without the prefix; PEFT would ignore all of these keys silently",
        )
    return not twice


def _split(key: str, parameters: tuple[Parameter, ...]) -> tuple[str, Parameter | None]:
    for parameter in parameters:
        for spelling in parameter.spellings:
            if key.endswith(f".{spelling}"):
                return key[: -len(spelling) - 1], parameter
    return key, None


def module_path(raw: str) -> str:
    """Return a raw path without PEFT's prefix.

    >>> module_path("base_model.model.model.layers.0.self_attn.q_proj")
    'model.layers.0.self_attn.q_proj'
    """
    return raw.removeprefix(PREFIX)

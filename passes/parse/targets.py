"""Compares the modules that a configuration targets with the modules that have tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from scute_compile.base.heads import is_output_head, tied_head_names
from scute_compile.base.structure import ModelStructure
from scute_compile.diagnostics import Code, Findings
from scute_compile.passes.parse.patterns import endings, full_match, layer_number
from scute_compile.passes.parse.settings import short

NAMED = 4
"""The number of examples that a message names."""


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


class Targets:
    """The modules that a configuration targets."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self._targets, self._excluded = config.get("target_modules"), config.get("exclude_modules")
        self._listed, self._left_out = frozenset(names(self._targets)), frozenset(names(self._excluded))
        layers = config.get("layers_to_transform")
        listed = layers if isinstance(layers, list) else [layers]
        self._layers = None if layers is None or layers == [] else {n for n in listed if isinstance(n, int | float)}
        self._layers_pattern = names(config.get("layers_pattern"))

    def match(self, path: str) -> bool:
        """Return whether PEFT would wrap the linear layer at `path`."""
        if isinstance(self._excluded, str):
            if full_match(self._excluded, path, where="exclude_modules"):
                return False
        elif not self._left_out.isdisjoint(endings(path)):
            return False
        if isinstance(self._targets, str):
            return self._targets.lower() == "all-linear" or full_match(self._targets, path, where="target_modules")
        if path in self._listed:
            return True
        return not self._listed.isdisjoint(endings(path)) and self._in_layers(path)

    def _in_layers(self, path: str) -> bool:
        return self._layers is None or layer_number(path, self._layers_pattern) in self._layers


def heads_of(structure: ModelStructure) -> tuple[str, ...]:
    """Return the paths of embeddings and output heads that PEFT can wrap.

    A tied head has no tensor in the checkpoint; it is listed under the names that the architecture gives it.
    """
    known = tuple(sorted(structure.embeddings))
    return known if any(map(is_output_head, known)) else (*known, *tied_head_names(structure.model_type))


def check_targets(
    config: Mapping[str, object],
    *,
    linears: Iterable[str],
    heads: Iterable[str],
    tensors: Iterable[str],
    keys: Iterable[str],
    findings: Findings,
) -> None:
    """Record the differences between a configuration's targets and the modules with tensors.

    Args:
        config: The adapter's configuration.
        linears: Paths of the base's linear layers inside the adapter's root, as the adapter names them.
        heads: Paths of its embeddings and output heads.
        tensors: Paths of the linear layers that have tensors.
        keys: Paths or keys of all tensors in the checkpoint, served or not.
        findings: Receives SC208 (a target without a module), SC310 (a module that is no target), SC315 (no targets)
            and SC319 (a target without tensors).
    """
    present, known = set(tensors), tuple(linears)
    if config.get("target_modules") is None:
        findings.note(
            Code.SC315,
            where="target_modules",
            found=f"no target_modules; the {len(present)} modules with tensors count",
            expected="the targets of the training run",
            next="PEFT would take its defaults for the architecture and drop the tensors of other modules",
        )
        return
    targets = Targets(config)
    extra = sorted(path for path in present if not targets.match(path))
    if extra:
        findings.error(
            Code.SC310,
            where="target_modules",
            found=f"{len(extra)} of {len(present)} modules with tensors match no target: {some(extra)}",
            expected=f"every adapted module to match {short(config['target_modules'])}",
            next="correct target_modules; PEFT would drop these tensors silently",
        )
        return
    missing = [path for path in known if path not in present and targets.match(path)]
    missing += _heads_without_tensors(config, tuple(heads), tuple(keys))
    if missing:
        findings.error(
            Code.SC319,
            where="target_modules",
            found=f"{len(missing)} targeted modules of the base have no tensors: {some(missing)}",
            expected=f"tensors for all {len(missing) + len(present)} modules that match",
        )
    _note_idle_targets(config, (*known, *heads), findings)


def _heads_without_tensors(config: Mapping[str, object], heads: Sequence[str], keys: Sequence[str]) -> list[str]:
    targets = config.get("target_modules")
    if (isinstance(targets, str) and targets.lower() == "all-linear") or config.get("modules_to_save"):
        return []  # PEFT excludes the output head from all-linear; modules_to_save is refused as such
    chosen = Targets(config)
    targeted = [path for path in heads if chosen.match(path)]
    return [path for path in targeted if not any(f".{path}." in f".{key}." for key in keys)]


def _note_idle_targets(config: Mapping[str, object], modules: Sequence[str], findings: Findings) -> None:
    if isinstance(config.get("target_modules"), str):
        return
    ends = {end for path in modules for end in endings(path)}
    idle = [name for name in names(config.get("target_modules")) if name not in ends]
    if idle:
        findings.note(
            Code.SC208,
            where="target_modules",
            found=f"{some(idle)} match no linear layer of the base",
            expected="names of the base's layers",
            next="PEFT ignores them as well, while another target matches; check that the base is the right one",
        )

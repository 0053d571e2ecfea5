"""Re-rooting: matches an adapter's module paths to a base whose modules have another prefix.

A wrapper adds a prefix, and a text model inside a multimodal one has a longer prefix than alone. One change of the
prefix is accepted when it makes *every* path match and no other change does. Numbers never change, nor does the name
before the first number: `blocks.0` for `layers.0` is another architecture, and layer 3 never becomes layer 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerooting:
    """The only change of prefix that makes all paths match; `dropped` and `added` are empty for the identity."""

    mapping: Mapping[str, str]
    """Every path as given -> its name in the base."""
    dropped: str
    """The prefix taken off, without its last dot."""
    added: str
    """The prefix put on, without its last dot."""

    @property
    def identity(self) -> bool:
        """Whether the paths matched as they are."""
        return not (self.dropped or self.added)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrooted:
    """The reason why there is no re-rooting."""

    candidates: tuple[tuple[str, str], ...] = ()
    """Each `(dropped, added)` that matches all paths, when there are several."""

    @property
    def ambiguous(self) -> bool:
        """Whether several changes match, rather than none."""
        return bool(self.candidates)

    @property
    def reason(self) -> str:
        """The reason in words, for a message.

        >>> Unrooted(candidates=(("", "encoder"), ("", "decoder"))).reason
        'several changes of the prefix match: `` -> `decoder`, `` -> `encoder`'
        """
        if not self.candidates:
            return "no single change of the prefix makes all paths match"
        listed = ", ".join(f"`{dropped}` -> `{added}`" for dropped, added in sorted(self.candidates))
        return f"several changes of the prefix match: {listed}"


def reroot(paths: Iterable[str], known: Collection[str]) -> Rerooting | Unrooted:
    """Find the only pair of prefixes (p, q) such that every path is `p.rest` and every `q.rest` is in `known`.

    The identity takes precedence. Pairs with the same mapping count once, under their shortest prefixes.

    >>> known = [f"model.language_model.layers.{i}.q_proj" for i in range(2)]
    >>> found = reroot(["model.layers.0.q_proj", "model.layers.1.q_proj"], known)
    >>> found.dropped, found.added, found.mapping["model.layers.1.q_proj"]
    ('model', 'model.language_model', 'model.language_model.layers.1.q_proj')
    >>> reroot(["module.layers.0.q_proj"], ["layers.0.q_proj"]).dropped
    'module'
    >>> reroot(["layers.0.q_proj"], ["layers.0.q_proj", "model.layers.0.q_proj"]).identity
    True
    >>> reroot(["layers.7.q_proj"], ["model.layers.0.q_proj"]).ambiguous
    False
    >>> reroot(["layers.0.q_proj"], ["encoder.layers.0.q_proj", "decoder.layers.0.q_proj"]).ambiguous
    True
    >>> reroot(["model.blocks.0.q_proj"], ["model.layers.0.q_proj"]).reason
    'no single change of the prefix makes all paths match'
    """
    wanted = tuple(dict.fromkeys(paths))
    names = known if isinstance(known, (set, frozenset, Mapping)) else frozenset(known)
    if all(path in names for path in wanted):
        return Rerooting(mapping=MappingProxyType({path: path for path in wanted}), dropped="", added="")
    found: dict[str, Rerooting] = {}
    for name, dropped, added in _candidates(wanted[0], names):
        if name in found:
            continue  # the same mapping under longer prefixes
        mapping = _mapping(wanted, dropped, added, names)
        if mapping is not None:
            found[name] = Rerooting(mapping=mapping, dropped=dropped, added=added)
    if len(found) == 1:
        return next(iter(found.values()))
    return Unrooted(candidates=tuple((rerooting.dropped, rerooting.added) for rerooting in found.values()))


def after(path: str, prefix: str) -> str | None:
    """Return what follows `prefix` and a dot, or None when `path` doesn't begin with them.

    >>> after("a.b.c", "a.b"), after("a.b", ""), after("ab.c", "a")
    ('c', 'a.b', None)
    """
    if not prefix:
        return path
    return path[len(prefix) + 1 :] if path.startswith(f"{prefix}.") else None


def join(prefix: str, rest: str) -> str:
    """Return `prefix.rest`, or `rest` when the prefix is empty.

    >>> join("", "b"), join("a", "b")
    ('b', 'a.b')
    """
    return f"{prefix}.{rest}" if prefix else rest


def _candidates(path: str, known: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Yield `(name, dropped, added)` for each known name that a change of prefix makes of `path`, short drops first."""
    segments = path.split(".")
    for cut in range(_kept_from(segments) + 1):
        rest = ".".join(segments[cut:])
        for name in known:
            if name != rest and not name.endswith("." + rest):
                continue
            added = name[: -len(rest) - 1] if name != rest else ""
            if not any(segment.isdigit() for segment in added.split(".")):
                yield name, ".".join(segments[:cut]), added


def _kept_from(segments: list[str]) -> int:
    """Return the index of the first segment that must stay: the segment before the first number, or the last."""
    for index, segment in enumerate(segments):
        if segment.isdigit():
            return max(index - 1, 0)
    return len(segments) - 1


def _mapping(paths: tuple[str, ...], dropped: str, added: str, known: Collection[str]) -> Mapping[str, str] | None:
    """Return every path's name in the base, or None when a path doesn't match."""
    mapping = {}
    for path in paths:
        rest = after(path, dropped)
        if rest is None or join(added, rest) not in known:
            return None
        mapping[path] = join(added, rest)
    return MappingProxyType(mapping)

"""The report of `scute explain-folds`: a view of the notes that the passes wrote.

Notes that differ only in the layer's number are grouped. An artifact carries its notes, so it needs no base.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from scute_compile.cli.grouping import Group, by_layers, grouped, pattern, ranges, relabelled
from scute_compile.diagnostics import Code, fail
from scute_compile.driver.artifact_checks import Requested, open_requested
from scute_compile.driver.planning import Bases, plan_adapter, servable
from scute_compile.driver.reports import envelope
from scute_compile.formats.artifact import Artifact, is_artifact
from scute_compile.ir.method import Method
from scute_compile.ir.program import Note
from scute_compile.pack.manifest_records import note_record
from scute_compile.pipeline import Planned

SLOTS = ("R", "s", "b", "d", "e", "c", "A", "B")
"""The order in which a site's slots are shown."""
SAMPLES = 3
"""How many site names a message lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainReport:
    """The notes of one adapter or artifact."""

    name: str
    method: Method
    glob: str | None
    """The pattern that filtered the sites; None: all sites."""
    notes: tuple[Note, ...]
    """The notes of the passes on these sites, in the order of the passes."""
    silent: tuple[str, ...]
    """Sites without notes: their factors are used as they were saved."""

    @property
    def groups(self) -> tuple[Group[Note], ...]:
        """Notes that differ only in the layer's number, grouped; slots in the order of the normal form."""
        groups = by_layers(self.notes, name=lambda note: note.site, key=_key)
        return tuple(sorted(groups, key=lambda group: (group.pattern, group.axes, slot_order(group.items[0].slot))))

    def to_json(self) -> dict[str, object]:
        """Return every note, and the groups, as plain JSON values."""
        return envelope(
            "explain-folds",
            name=self.name,
            method=self.method.value,
            site=self.glob,
            notes=[note_record(note) for note in self.notes],
            silent=list(self.silent),
            groups=[_group_record(group) for group in self.groups],
        )


def explain_path(source: str, *, base: str | None, requested: Requested, site: str | None) -> ExplainReport:
    """Explain an adapter, or an artifact by the notes in its manifest.

    Args:
        source: A PEFT folder, a Hub id or an artifact.
        base: A folder or a Hub id; None: the base that the adapter names, and none for an artifact.
        requested: What an adapter is planned for, and what an artifact must have been compiled for.
        site: Keeps sites whose name matches, by `fnmatch`'s rules; None keeps all.

    Raises:
        ScuteError: the findings that refuse the adapter, what opening the base or the artifact raises, SC703 when
            `site` matches no site.
    """
    if is_artifact(source):
        return explain_artifact(open_requested(source, base, requested), site)
    planned, _ = plan_adapter(source, Bases(given=base, weights=False), requested.target, alone=True)
    return explain_program(servable(planned), site)


def explain(
    notes: Sequence[Note], glob: str | None, *, name: str, method: Method, sites: Iterable[str] = ()
) -> ExplainReport:
    """Return the report on notes.

    Args:
        notes: The notes of a planned program or of an artifact.
        glob: Keeps sites whose name matches, by `fnmatch`'s rules; None keeps all.
        name: The name of the adapter or artifact.
        method: The adapter's method.
        sites: The names of all sites, those without notes included.

    Raises:
        ScuteError: SC703 when the glob matches no site.
    """
    known = dict.fromkeys([*sites, *(note.site for note in notes)])
    kept = {site: None for site in known if glob is None or fnmatchcase(site, glob)}
    if glob is not None and not kept:
        _refuse_glob(glob, tuple(known))
    noted = {note.site for note in notes}
    return ExplainReport(
        name=name,
        method=method,
        glob=glob,
        notes=tuple(note for note in notes if note.site in kept),
        silent=tuple(site for site in kept if site not in noted),
    )


def explain_program(planned: Planned, glob: str | None) -> ExplainReport:
    """Return the report on a planned adapter, which must not be refused.

    Raises:
        ScuteError: SC703 when the glob matches no site.
    """
    program = planned.program
    if program is None:
        raise AssertionError(planned.name)
    sites = [site.name for site in program.sites]
    return explain(program.notes, glob, name=planned.name, method=program.method, sites=sites)


def explain_artifact(artifact: Artifact, glob: str | None) -> ExplainReport:
    """Return the report on an artifact.

    Raises:
        ScuteError: SC703 when the glob matches no site, SC601 when a note has a form that this version doesn't know.
    """
    manifest = artifact.manifest
    notes = notes_of(manifest.notes, str(artifact.path))
    sites = [site.name for site in manifest.sites]
    return explain(notes, glob, name=manifest.name, method=Method(manifest.method), sites=sites)


def notes_of(records: Sequence[Mapping[str, object]], where: str) -> tuple[Note, ...]:
    """Return the notes that a manifest records.

    Raises:
        ScuteError: SC601 for a record with a missing, misspelt or unknown field or value.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(tuple[Note, ...]).validate_json(json.dumps(list(records)), strict=True)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, fault["loc"]))
        fail(
            Code.SC601,
            where=where,
            found=f"notes.{field}: {fault['msg']}",
            expected="notes as `scute compile` writes them",
            next="compile the adapter again with this version",
        )


def _refuse_glob(glob: str, known: Sequence[str]) -> None:
    samples = [group.items[0] for group in grouped(known)][:SAMPLES]
    fail(
        Code.SC703,
        where="--site",
        found=f"`{glob}` matches none of {counted(len(known), 'site')}",
        expected=f"a pattern for whole site names, such as {' or '.join(f'`{name}`' for name in samples) or '`*`'}",
        next="begin the pattern with `*` to match the end of a name, as in `*q_proj`, and quote it for the shell",
    )


def _key(note: Note) -> Hashable:
    numbers = pattern(note.site)[1]
    blank = ["{}"] * len(numbers)
    reason = relabelled(note.why, numbers, blank)
    return note.slot, note.action, note.rule, note.neighbours, reason, note.route, note.candidates


def why(group: Group[Note]) -> str:
    """Return the reason that the notes of a group give, with ranges in place of the layer's number."""
    note = group.items[0]
    return relabelled(note.why, pattern(note.site)[1], [ranges(axis) for axis in group.axes])


def slot_order(slot: str) -> tuple[int, str]:
    """Return the key that sorts slots into the order of the normal form."""
    letter = slot[:1]
    return (SLOTS.index(letter) if letter in SLOTS else len(SLOTS)), slot


def _group_record(group: Group[Note]) -> dict[str, object]:
    return {
        **note_record(group.items[0]),
        "site": group.label,
        "why": why(group),
        "count": len(group.items),
        "sites": list(dict.fromkeys(note.site for note in group.items)),
    }


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, in the plural where needed."""
    return f"{count} {noun}{'' if count == 1 else 's'}"

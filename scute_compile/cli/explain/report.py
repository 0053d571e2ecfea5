"""What `scute explain-folds` shows: a view of the notes that the passes wrote, and nothing else.

Notes that say the same of many layers are said once. An artifact carries its notes, so it needs no base.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from scute_compile.cli.cost.report import readable
from scute_compile.cli.grouping import Axes, Group, by_layers, grouped, pattern, ranges, relabelled
from scute_compile.cli.outcomes import envelope
from scute_compile.diagnostics import Code, fail, printable
from scute_compile.ir.method import Method
from scute_compile.ir.program import Action, Note
from scute_compile.pack.manifest_records import note_record

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from scute_compile.formats.artifact import Artifact
    from scute_compile.pipeline import Planned

SLOTS = ("R", "s", "b", "d", "e", "c", "A", "B")
"""The order in which a site's slots are shown."""
STYLES = {
    Action.MERGED: "green",
    Action.LIVE: "yellow",
    Action.DROPPED: "dim",
    Action.MOVED: "cyan",
    Action.PLANNED: "blue",
}
UNITS = (
    "bytes are one rank's for one decode step; a launch counts as the bytes that memory would move in its time; "
    "in brackets the ratio to the route that was chosen"
)
SAMPLES = 3
"""How many site names a message offers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainReport:
    """The notes of one adapter or artifact, those of the asked sites alone."""

    name: str
    method: Method
    glob: str | None
    """What the sites were filtered by."""
    notes: tuple[Note, ...]
    silent: tuple[str, ...]
    """Sites of which there is nothing to say: their factors are used as they were saved."""

    @property
    def groups(self) -> tuple[Group[Note], ...]:
        """Notes that are equal but for the layer, by projection; slots in the order of the normal form."""
        found = by_layers(self.notes, name=lambda note: note.site, key=_sameness)
        return tuple(sorted(found, key=lambda group: (group.pattern, group.axes, _slot_order(group.items[0].slot))))

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

    def render(self, console: Console) -> None:
        """Print a summary, then each projection with its slots."""
        from rich.text import Text

        sites = {note.site: None for note in self.notes} | dict.fromkeys(self.silent)
        of = f", sites matching {self.glob}" if self.glob else ""
        head = f"{self.name} ({self.method}): {_counted(len(sites), 'site')}, {_counted(len(self.notes), 'note')}{of}"
        console.print(Text(printable(head), style="bold"), soft_wrap=True)
        console.print(_summary(self.notes))
        if any(note.candidates for note in self.notes):
            console.print(Text(UNITS, "dim"))
        for titles, members in _sections(self.groups):
            console.print()
            for title in titles:
                console.print(Text(printable(title), style="bold"), soft_wrap=True)
            console.print(_section(members))
        for silent in grouped(self.silent):
            console.print()
            console.print(Text(printable(_title(silent)), style="bold"), soft_wrap=True)
            console.print(Text("  nothing to merge and no live slot: A and B are used as they were saved"))


def explain(
    notes: Sequence[Note], glob: str | None, *, name: str, method: Method, sites: Iterable[str] = ()
) -> ExplainReport:
    """Return the view of `notes`.

    Args:
        notes: of a planned program, or of an artifact.
        glob: keeps sites whose name matches, by `fnmatch`'s rules; None keeps all.
        name: the adapter's or artifact's.
        method: the adapter's.
        sites: names of sites, for those that have no note.

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
    """Return the view of a planned adapter's notes; it must not be refused.

    Raises:
        ScuteError: SC703 when the glob matches no site.
    """
    program = planned.program
    if program is None:
        raise AssertionError(planned.name)
    sites = [site.name for site in program.sites]
    return explain(program.notes, glob, name=planned.name, method=program.method, sites=sites)


def explain_artifact(artifact: Artifact, glob: str | None) -> ExplainReport:
    """Return the view of the notes that an artifact carries.

    Raises:
        ScuteError: SC703 when the glob matches no site, SC601 when a note isn't one that this reader knows.
    """
    manifest = artifact.manifest
    notes = notes_of(manifest.notes, str(artifact.path))
    sites = [site.name for site in manifest.sites]
    return explain(notes, glob, name=manifest.name, method=Method(manifest.method), sites=sites)


def notes_of(records: Sequence[Mapping[str, object]], where: str) -> tuple[Note, ...]:
    """Return a manifest's records of notes as notes.

    Raises:
        ScuteError: SC601 for a record with a missing, misspelt or unknown field or value.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(tuple[Note, ...]).validate_json(json.dumps(list(records)), strict=True)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, fault["loc"]))
        fail(
            Code.SC601,
            where=where,
            found=f"notes.{place}: {fault['msg']}",
            expected="notes as `scute compile` writes them",
            next="compile the adapter again with this version",
        )


def _refuse_glob(glob: str, known: Sequence[str]) -> None:
    samples = [group.items[0] for group in grouped(known)][:SAMPLES]
    fail(
        Code.SC703,
        where="--site",
        found=f"`{glob}` matches none of {_counted(len(known), 'site')}",
        expected=f"a pattern for whole site names, such as {' or '.join(f'`{x}`' for x in samples) or '`*`'}",
        next="begin the pattern with `*` to match a name's end, as in `*q_proj`, and quote it for the shell",
    )


def _sameness(note: Note) -> Hashable:
    numbers = pattern(note.site)[1]
    blank = ["{}"] * len(numbers)
    why = relabelled(note.why, numbers, blank)
    return note.slot, note.action, note.rule, note.neighbours, why, note.route, note.candidates


def _why(group: Group[Note]) -> str:
    note = group.items[0]
    return relabelled(note.why, pattern(note.site)[1], [ranges(axis) for axis in group.axes])


def _slot_order(slot: str) -> tuple[int, str]:
    """Return the key that sorts slots; notes of one slot keep the order of the passes."""
    letter = slot[:1]
    return (SLOTS.index(letter) if letter in SLOTS else len(SLOTS)), slot


def _group_record(group: Group[Note]) -> dict[str, object]:
    record = note_record(group.items[0])
    return {
        **record,
        "site": group.label,
        "why": _why(group),
        "count": len(group.items),
        "sites": list(dict.fromkeys(note.site for note in group.items)),
    }


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _title(group: Group[Note] | Group[str]) -> str:
    return f"{group.label}  x{group.size}" if group.size > 1 else group.label


def _sections(groups: Iterable[Group[Note]]) -> Iterator[tuple[list[str], list[Group[Note]]]]:
    """Yield titles and groups; projections of which the same is told are told together."""
    own: dict[tuple[str, Axes], list[Group[Note]]] = {}
    for group in groups:
        own.setdefault((group.pattern, group.axes), []).append(group)
    sections: dict[Hashable, tuple[list[str], list[Group[Note]]]] = {}
    for members in own.values():
        told = tuple((group.items[0].slot, group.items[0].action, _lines(group)) for group in members)
        sections.setdefault(told, ([], members))[0].append(_title(members[0]))
    yield from sections.values()


def _summary(notes: Sequence[Note]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for action in Action:
        slots = Counter(
            (note.slot.split(".")[0], note.route.value if note.route else "") for note in notes if note.action is action
        )
        ordered = sorted(slots.items(), key=lambda item: (_slot_order(item[0][0]), item[0][1]))
        said = ", ".join(f"{slot} x{count}{f' ({route})' if route else ''}" for (slot, route), count in ordered)
        if said:
            table.add_row(Text(f"  {action.value}", STYLES[action]), Text(printable(said)))
    return table


def _section(groups: Sequence[Group[Note]]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=6, no_wrap=True)
    table.add_column(min_width=7, no_wrap=True)
    table.add_column(overflow="fold")
    shown = ""
    for group in groups:
        note = group.items[0]
        slot = "" if note.slot == shown else printable(note.slot)
        shown = note.slot
        table.add_row(Text(f"  {slot}"), Text(note.action.value, STYLES[note.action]), Text("\n".join(_lines(group))))
    return table


def _lines(group: Group[Note]) -> tuple[str, ...]:
    """Tell one note: its rule and neighbours, why, and the routes with what each costs."""
    note = group.items[0]
    owners = ", ".join(f"{name}: {owner.value}" for name, owner in note.neighbours)
    rule = note.rule.removeprefix(f"{note.action.value}: ")
    lines = (f"{rule}  [{owners}]" if owners else rule, _why(group))
    return (*(printable(line) for line in lines if line), *_routes(note))


def _routes(note: Note) -> Iterator[str]:
    costs = dict(note.candidates)
    chosen = costs.get(note.route, 0) if note.route else 0
    for route, moved in sorted(costs.items(), key=lambda item: item[0] is not note.route):
        ratio = f"({_ratio(moved / chosen)}x)" if chosen and route is not note.route else ""
        mark = "->" if route is note.route else "  "
        yield f"{mark} {route.value:<28}{readable(moved):>9}  {ratio:>8}".rstrip()


def _ratio(value: float) -> str:
    """Return three digits, or all of a large number's.

    >>> _ratio(0.9931), _ratio(14.22), _ratio(1761.0)
    ('0.993', '14.2', '1,761')
    """
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"

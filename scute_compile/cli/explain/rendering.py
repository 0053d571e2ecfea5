"""Renders the report of `scute explain-folds`: a summary, then each projection with its slots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from scute_compile.cli.console import literal, print_line
from scute_compile.cli.explain.report import ExplainReport, slot_order, why
from scute_compile.cli.grouping import Axes, Group, grouped
from scute_compile.cli.sizes import counted, readable
from scute_compile.ir.program import Action, Note

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

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


def render(report: ExplainReport, console: Console) -> None:
    """Print a summary, then each projection with its slots."""
    sites = {note.site: None for note in report.notes} | dict.fromkeys(report.silent)
    of = f", sites matching {report.glob}" if report.glob else ""
    counts = f"{counted(len(sites), 'site')}, {counted(len(report.notes), 'note')}"
    print_line(console, (f"{report.name} ({report.method}): {counts}{of}", "bold"))
    console.print(_summary(report.notes))
    if any(note.candidates for note in report.notes):
        console.print(literal((UNITS, "dim")))
    for titles, members in _sections(report.groups):
        console.print()
        for title in titles:
            print_line(console, (title, "bold"))
        console.print(_section(members))
    for silent in grouped(report.silent):
        console.print()
        print_line(console, (_title(silent), "bold"))
        print_line(console, "  nothing to merge and no live slot: A and B are used as they were saved")


def _title(group: Group[Note] | Group[str]) -> str:
    return f"{group.label}  x{group.size}" if group.size > 1 else group.label


def _sections(groups: Iterable[Group[Note]]) -> Iterator[tuple[list[str], list[Group[Note]]]]:
    """Yield titles and groups. Projections whose groups have the same text share a section."""
    projections: dict[tuple[str, Axes], list[Group[Note]]] = {}
    for group in groups:
        projections.setdefault((group.pattern, group.axes), []).append(group)
    sections: dict[Hashable, tuple[list[str], list[Group[Note]]]] = {}
    for members in projections.values():
        content = tuple((group.items[0].slot, group.items[0].action, _lines(group)) for group in members)
        sections.setdefault(content, ([], members))[0].append(_title(members[0]))
    yield from sections.values()


def _summary(notes: Sequence[Note]) -> RenderableType:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for action in Action:
        slots = Counter(
            (note.slot.split(".")[0], note.route.value if note.route else "") for note in notes if note.action is action
        )
        ordered = sorted(slots.items(), key=lambda item: (slot_order(item[0][0]), item[0][1]))
        text = ", ".join(f"{slot} x{count}{f' ({route})' if route else ''}" for (slot, route), count in ordered)
        if text:
            table.add_row(literal((f"  {action.value}", STYLES[action])), literal(text))
    return table


def _section(groups: Sequence[Group[Note]]) -> RenderableType:
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=6, no_wrap=True)
    table.add_column(min_width=7, no_wrap=True)
    table.add_column(overflow="fold")
    previous = ""
    for group in groups:
        note = group.items[0]
        slot = "" if note.slot == previous else note.slot
        previous = note.slot
        action = literal((note.action.value, STYLES[note.action]))
        table.add_row(literal(f"  {slot}"), action, literal("\n".join(_lines(group))))
    return table


def _lines(group: Group[Note]) -> tuple[str, ...]:
    """Return a note as text: its rule and neighbours, the reason, and the routes with their costs."""
    note = group.items[0]
    owners = ", ".join(f"{name}: {owner.value}" for name, owner in note.neighbours)
    rule = note.rule.removeprefix(f"{note.action.value}: ")
    lines = (f"{rule}  [{owners}]" if owners else rule, why(group))
    return (*(line for line in lines if line), *_routes(note))


def _routes(note: Note) -> Iterator[str]:
    costs = dict(note.candidates)
    chosen = costs.get(note.route, 0) if note.route else 0
    for route, moved in sorted(costs.items(), key=lambda item: item[0] is not note.route):
        ratio = f"({_ratio(moved / chosen)}x)" if chosen and route is not note.route else ""
        mark = "->" if route is note.route else "  "
        yield f"{mark} {route.value:<28}{readable(moved):>9}  {ratio:>8}".rstrip()


def _ratio(value: float) -> str:
    """Return three digits of a ratio, or all digits before the point.

    >>> _ratio(0.9931), _ratio(14.22), _ratio(1761.0)
    ('0.993', '14.2', '1,761')
    """
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"

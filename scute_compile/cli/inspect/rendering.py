"""Renders the report of `scute inspect` as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from scute_compile.cli.console import literal, print_line
from scute_compile.cli.inspect.views import SiteView, SlotView
from scute_compile.cli.outcomes import SHOWN
from scute_compile.cli.sizes import counted, readable
from scute_compile.ir.dtypes import DType
from scute_compile.ir.target import LoraSharding

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from scute_compile.cli.inspect.report import InspectReport

SLOTS = ("R", "s", "b", "d", "e", "A", "B")
HASH_DIGITS = 12
OTHER_COLUMNS = 60
"""The largest width of the columns beside a site's name, in characters. A longer name is folded."""


def render(report: InspectReport, console: Console) -> None:
    """Print a heading, then tables of sites, slots, shared factors and ranks; then the findings."""
    for number, line in enumerate(_heading(report)):
        print_line(console, (line, "bold" if number == 0 else ""))
    if report.sites:
        for table in (
            _sites(report, console.width),
            _slots(report),
            *([_shared(report)] if report.shared else []),
            _ranks(report),
        ):
            console.print()
            console.print(table)
    for line in _findings(report):
        print_line(console, line)


def _heading(report: InspectReport) -> Iterator[str]:
    yield f"{report.name}: {report.method} {report.kind}, {counted(len(report.sites), 'site')}"
    if report.settings:
        yield "settings  " + ", ".join(f"{name} {value}" for name, value in report.settings)
    base = report.base
    hashes = [
        f"{part} {digest[:HASH_DIGITS]}"
        for part, digest in (("structure", base.structure), ("content", base.content))
        if digest
    ]
    words = [word for word in (base.model_type, *hashes) if word]
    yield f"base      {base.name or 'not named'}" + (f" ({', '.join(words)})" if words else "")
    full = ", fully sharded" if report.lora_sharding is LoraSharding.FULL else ""
    if report.dtype is not None:
        yield f"held in   {report.dtype}, tp {report.tp}{full}"
    elif report.planned_for_base:
        yield f"planned   tp {report.tp}{full}; sizes as a float32 and as a bfloat16 artifact"
    else:
        yield "planned   without a base: no cuts and no routes, and sizes that only the base gives are missing"
    if not report.sites:
        yield "no slots are left: the adapter has no effect"


def _table(title: str, *columns: str, right: Sequence[str] = (), first_width: int = 0) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in columns:
        number = column in right
        least = first_width if column == columns[0] else None
        justify: Literal["right", "left"] = "right" if number else "left"
        table.add_column(column, justify=justify, no_wrap=number, overflow="fold", min_width=least)
    return table


def _sites(report: InspectReport, width: int) -> Table:
    dtypes = [dtype.value for dtype, _ in report.rank_bytes] or [dtype.value for dtype in _dtypes(report)]
    right = ("x", "in", "out", "rank", *dtypes)
    each = " on the fullest rank" if report.tp > 1 else ""
    columns = ("site", "x", "in", "out", "rank", "slots", *dtypes)
    longest = max(len(group.label) for group in report.groups)
    table = _table(
        f"sites, bytes of each{each}", *columns, right=right, first_width=max(min(longest, width - OTHER_COLUMNS), 0)
    )
    for group in report.groups:
        site = group.items[0]
        sizes = dict(site.bytes)
        _add(
            table,
            group.label,
            f"{group.size}",
            _known(site.in_features),
            _known(site.out_features),
            ", ".join(map(str, site.ranks)),
            ", ".join(slot.slot for slot in site.slots),
            *(readable(max(sizes[dtype])) if dtype in sizes else "?" for dtype in _dtypes(report)),
        )
    return table


def _dtypes(report: InspectReport) -> tuple[DType, ...]:
    return tuple(dict.fromkeys(dtype for site in report.sites for dtype, _ in site.bytes))


def _slots(report: InspectReport) -> Table:
    counts = Counter(row for site in report.sites for row in {_slot_row(site, slot) for slot in site.slots})
    table = _table("slots", "slot", "owner", "computed", "sites", right=("sites",))
    for (_, letter, owner, computed), count in sorted(counts.items()):
        _add(table, letter, owner, computed, f"{count}")
    return table


def _slot_row(site: SiteView, slot: SlotView) -> tuple[int, str, str, str]:
    """Return a slot's place in the table, its name, its owner, and where it is computed."""
    letter = slot.slot.split(".")[0]
    shape = f" ({site.rotation})" if letter == "R" else ""
    computed = f"live, {slot.route}" if slot.route else ("a factor" if letter in "AB" else "live")
    return SLOTS.index(letter), letter + shape, slot.owner.value, computed


def _shared(report: InspectReport) -> Table:
    dtypes = tuple(dict.fromkeys(dtype for factor in report.shared for dtype, _ in factor.bytes))
    names = [dtype.value for dtype in dtypes]
    right = ("rank", "features", "sites", *names)
    table = _table("shared factors, once per store", "factor", "rank", "features", "sites", *names, right=right)
    for factor in report.shared:
        sizes = dict(factor.bytes)
        cells = (readable(sizes[dtype]) if dtype in sizes else "?" for dtype in dtypes)
        name = factor.name if report.dtype is None else factor.name[:HASH_DIGITS]
        _add(table, name, f"{factor.rank}", _known(factor.features), f"{factor.sites}", *cells)
    return table


def _ranks(report: InspectReport) -> Table:
    dtypes = [dtype.value for dtype, _ in report.rank_bytes]
    files = ["file", "on disk"] if report.files else []
    table = _table("ranks", "rank", *dtypes, *files, right=("rank", "on disk", *dtypes))
    for rank in range(report.tp):
        sizes = [readable(ranks[rank]) for _, ranks in report.rank_bytes]
        file = report.files[rank] if report.files else None
        _add(table, f"{rank}", *sizes, *((file.file, readable(file.bytes)) if file else ()))
    return table


def _add(table: Table, *cells: str) -> None:
    table.add_row(*(literal(cell) for cell in cells))


def _known(size: int) -> str:
    return f"{size}" if size else "?"


def _findings(report: InspectReport) -> Iterator[str]:
    codes = dict.fromkeys(str(finding.get("code", "")) for finding in report.findings)
    for code in codes:
        same = [finding for finding in report.findings if str(finding.get("code", "")) == code]
        for finding in same[:SHOWN]:
            yield ""
            yield f"{finding.get('severity', 'note')}[{code}]: {finding.get('title', '')}"
            for label in ("where", "found", "expected", "next"):
                if value := finding.get(label):
                    yield f"  {label:<9} {value}"
        if len(same) > SHOWN:
            yield f"  ... and {len(same) - SHOWN} more {code}; --json lists all"

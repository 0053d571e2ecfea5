"""The README as something that runs: its commands, what they print, its picture and its map of the code."""

from __future__ import annotations

import ast
import contextlib
import html
import io
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from scute_compile.cli.app import main
from scute_compile.cli.demo.rendering import render
from scute_compile.cli.demo.report import DemoReport

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "demo.svg"
ROOMS = ("scute_compile", "passes", "passes/parse", "formats", "runtime_min", "runtime_min/kernels", "runtime_vllm")
WIDTH = 100
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MAP = re.compile(r"(<!-- code map.*?-->\n```text\n).*?(^```$)", re.DOTALL | re.MULTILINE)
FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
VARYING = re.compile(r"\d+(?:\.\d+)?e[-+]\d+|\b\d\.\d{3}\b|\b[0-9a-f]{12}\b")
"""What another processor or another torch may print: rounding errors, effects, and hashes of random weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command that the README shows, and what it is said to print."""

    line: str
    output: str

    @property
    def runs_here(self) -> bool:
        """Whether the test runs it; set-up commands are what `.ci/run` runs."""
        return self.line.startswith("scute ")


def commands(text: str) -> Iterator[Command]:
    """Yield the commands of all console blocks in order."""
    for block in CONSOLE.findall(text):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, output = part.partition("\n")
            yield Command(line=line, output=output)


def printed(command: Command, folder: Path) -> str:
    """Run a command of Scute's in `folder`, in this process, and return all that it prints."""
    out = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        main(shlex.split(command.line)[1:])
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def masked(text: str) -> str:
    """Return the text without the digits that vary."""
    return VARYING.sub(lambda match: "#" * len(match[0]) if "e" not in match[0] else "#", text)


def with_outputs(text: str, run: Callable[[Command], str]) -> str:
    """Return the README with every output written anew; what differs in varying digits alone is kept."""

    def block(match: re.Match[str]) -> str:
        shown = [
            f"$ {command.line}\n{_kept(command.output, run(command)) if command.runs_here else command.output}"
            for command in commands(match[0])
        ]
        return "```console\n" + "".join(shown) + "```"

    return CONSOLE.sub(block, text)


def _kept(old: str, new: str) -> str:
    return old if masked(old) == masked(new) else new


def code_map() -> str:
    """Return one line per source file: its path and what its docstring's first line says."""
    files = [path for room in ROOMS for path in sorted((ROOT / room).glob("*.py")) if path.name != "__init__.py"]
    lines = []
    for path in files:
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        lines.append(f"{path.relative_to(ROOT).as_posix():<38} {docstring.splitlines()[0].rstrip('.:')}\n")
    return "".join(lines)


def with_map(text: str) -> str:
    """Return the README with its map written anew."""
    return MAP.sub(lambda match: match[1] + code_map() + match[2], text)


def picture(report: DemoReport) -> str:
    """Return what the demo prints as a picture that fetches nothing."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    render(report, console)
    return FONT.sub("", console.export_svg(title="scute demo", unique_id="demo"))


def words(svg: str) -> str:
    """Return a picture's text, a line per piece."""
    pieces = re.findall(r"<text[^>]*>(.*?)</text>", svg, re.DOTALL)
    return masked("\n".join(html.unescape(piece).replace("\xa0", " ") for piece in pieces))

"""Runs the commands and the Python that documentation pages show, and compares their output."""

from __future__ import annotations

import contextlib
import glob
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from scute_compile.cli.app import main

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").rglob("*.md")))
"""The pages whose examples are run."""
TEXTS = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "log.md")
"""All pages, whose links and names are checked."""
WIDTH = 100
FENCE = re.compile(r"^```(?P<kind>\w+)(?P<options>[^\n]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
GENERATED = re.compile(
    r"(<!-- generated: (?P<name>[\w-]+) -->\n).*?(^<!-- end of generated -->$)", re.DOTALL | re.MULTILINE
)
VARYING = re.compile(r"\d+(?:\.\d+)?e[-+]\d+|\b\d\.\d{3}\b|\b[0-9a-f]{12,16}\b")
"""Digits that depend on the processor and on torch: rounding errors, effects, hashes of random weights."""
MAKES_THE_EXAMPLE = "scute demo -o example"
RUN_ELSEWHERE = {
    "python3": "sets up an environment; the workflows in .github run these lines",
    "pip": "sets up an environment, as above",
    "git": "sets up an environment, as above",
    ".ci/run": "runs this test",
    ".ci/vllm": "the plugin's tests, in an environment with vLLM",
    "pytest": "runs this test",
    "SCUTE_UPDATE_GOLDEN=1": "runs this test",
    "ruff": "run by .ci/run",
    "mkdocs": "run by test_site.py and .ci/run",
    "vllm": "needs vLLM: tests/runtime_vllm_server starts the same server",
    "curl": "needs vLLM: tests/runtime_vllm_server starts the same server",
}
"""First word of a command that pages show and `run_commands` doesn't run -> the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of a console block, and the output that the page shows."""

    line: str
    output: str

    @property
    def runs_here(self) -> bool:
        """Whether `run_commands` runs the command."""
        return self.line != MAKES_THE_EXAMPLE and self.line.split()[0] not in RUN_ELSEWHERE


@dataclass(slots=True)
class PageRun:
    """A page that is being run."""

    folder: Path
    """Where commands run: it holds the demo's files as `example`."""
    program: list[str] = field(default_factory=list)
    """The page's untitled Python blocks so far: one program."""

    def console(self, body: str) -> str:
        """Run the commands of a console block; return the block with the outputs that they print now."""
        shown = []
        for command in commands_of(body):
            output = command.output
            if command.runs_here:
                printed = self._printed(command.line)
                output = output if masked(output) == masked(printed) else printed
            shown.append(f"$ {command.line}\n{output}")
        return "".join(shown)

    def python(self, options: str, body: str) -> None:
        """Write a block with a title to that file; add any other to the page's program."""
        if title := re.search(r'title="([^"]+)"', options):
            (self.folder / title[1]).write_text(body, encoding="utf-8")
        else:
            self.program.append(body)

    def run_program(self) -> None:
        """Run the page's untitled Python blocks as one program."""
        if self.program:
            (self.folder / "program.py").write_text("\n".join(self.program), encoding="utf-8")
            self._subprocess([sys.executable, "program.py"])

    def _printed(self, line: str) -> str:
        words = [found for word in shlex.split(line) for found in self._expanded(word)]
        if words[0] == "scute":
            return _lines(_in_process(words[1:], self.folder))
        if words[0] == "torchrun":
            return _lines(self._subprocess([sys.executable, "-m", "torch.distributed.run", *words[1:]]))
        assert words[0] == "python", f"neither run nor in RUN_ELSEWHERE: {line}"
        return _lines(self._subprocess([sys.executable, *words[1:]]))

    def _expanded(self, word: str) -> list[str]:
        return sorted(glob.glob(word, root_dir=self.folder)) if "*" in word and "/" in word else [word]  # noqa: PTH207 - as a shell

    def _subprocess(self, command: list[str]) -> str:
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def commands_of(body: str) -> Iterator[Command]:
    """Yield the commands of a console block in order; a line that ends with a backslash goes on in the next."""
    for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
        line, _, output = re.sub(r"\\\n\s*", "", part).partition("\n") if "\\\n" in part else part.partition("\n")
        yield Command(line=line, output=output)


def commands(text: str) -> list[Command]:
    """Return the commands of all console blocks of a page."""
    return [
        command
        for match in FENCE.finditer(text)
        if match["kind"] == "console"
        for command in commands_of(match["body"])
    ]


def run_commands(text: str, run: PageRun) -> str:
    """Run a page's commands, and collect its Python.

    Returns:
        The page with the outputs that are printed now; one that differs in `VARYING` digits alone is kept.
    """

    def block(match: re.Match[str]) -> str:
        if match["kind"] == "python":
            run.python(match["options"], match["body"])
        if match["kind"] != "console" or not any(command.runs_here for command in commands_of(match["body"])):
            return match[0]
        return f"```console{match['options']}\n{run.console(match['body'])}```"

    return FENCE.sub(block, text)


def with_generated(text: str, parts: dict[str, Callable[[], str]]) -> str:
    """Return a page with every generated part written anew."""
    return GENERATED.sub(lambda match: f"{match[1]}\n{parts[match['name']]()}\n{match[3]}", text)


def masked(text: str) -> str:
    """Return the text without the digits that vary."""
    return VARYING.sub(lambda match: "#" * len(match[0]) if "e" not in match[0] else "#", text)


def _in_process(arguments: list[str], folder: Path) -> str:
    out = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        main(arguments)
    return out.getvalue()


def _lines(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())

"""The parts of documentation pages that are generated from the code."""

from __future__ import annotations

import ast
import inspect
import re
import typing
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path

from typer.models import ArgumentInfo, CommandInfo

from scute_compile.cli.app import app
from scute_compile.ir.spec import SPEC
from scute_compile.passes.rewrites import TERM_REWRITES
from tests.docs.pages import ROOT

ROOMS = ("scute_compile", "passes", "pack", "formats", "runtime_min", "runtime_vllm")
"""The folders at the root that hold code, in the order of the map."""


def commands() -> str:
    """Return the reference of all commands, from the command line's own definitions."""
    return "\n".join(_command(registered) for registered in app.registered_commands)


def command_options() -> dict[str, set[str]]:
    """Return the options of each command, by its name."""
    return {
        _name(registered): {spelled for row in _parameters(registered) for spelled in re.findall(r"--[\w-]+", row[0])}
        for registered in app.registered_commands
    }


def code_map() -> str:
    """Return one line per source file, grouped by folder: its name, and the first sentence of its docstring."""
    return "\n".join(section for room in ROOMS for section in _folders(ROOT / room))


def fold_rules() -> str:
    """Return the fold rule's table."""
    rows = [f"| `{row.name}` | {row.slot} | `{row.algebra}` |\n" for row in TERM_REWRITES]
    return "| rule | slot | algebra |\n|---|---|---|\n" + "".join(rows)


def invariants() -> str:
    """Return the table of what a program may hold between passes."""
    rows = [f"| `{check.__name__}` | {first} | {last} | {check.__doc__} |\n" for first, last, check in SPEC]
    return "| invariant | from | to | requires |\n|---|---|---|---|\n" + "".join(rows)


PARTS = {"commands": commands, "code-map": code_map, "fold-rules": fold_rules, "invariants": invariants}
"""By the name in the page's `<!-- generated: NAME -->` comment."""


def _command(registered: CommandInfo) -> str:
    rows = list(_parameters(registered))
    arguments = "".join(f" {spelling}" for spelling, *_ in rows if not spelling.startswith("-"))
    table = "".join(f"| `{spelling}` | {default} | {text} |\n" for spelling, default, text in rows)
    head = f"## scute {_name(registered)}\n\n{inspect.getdoc(_function(registered))}\n"
    usage = f"```text\nscute {_name(registered)}{arguments} [OPTIONS]\n```\n"
    return f"{head}\n{usage}\n| parameter | default | meaning |\n|---|---|---|\n{table}"


def _function(registered: CommandInfo) -> Callable[..., object]:
    assert registered.callback is not None
    return registered.callback


def _name(registered: CommandInfo) -> str:
    return str(registered.name or _function(registered).__name__.replace("_", "-"))


def _parameters(registered: CommandInfo) -> Iterator[tuple[str, str, str]]:
    """Yield spelling, default and help of each argument and option of a command."""
    hints = typing.get_type_hints(_function(registered), include_extras=True)
    for name, parameter in inspect.signature(_function(registered)).parameters.items():
        hint = hints[name]
        if typing.get_origin(hint) is not typing.Annotated:  # `Annotated[...] | None` is not used
            raise TypeError(f"{_name(registered)}: {name} has no help")
        kind, info = typing.get_args(hint)
        default = parameter.default
        required = default is inspect.Parameter.empty
        if isinstance(info, ArgumentInfo):
            yield str(info.metavar), "required", str(info.help)
            continue
        declared = [word for word in (info.default, *(info.param_decls or ())) if isinstance(word, str)]
        spellings = ", ".join(declared or [f"--{name.replace('_', '-')}"])
        value = "" if kind is bool else f" {info.metavar or _value(kind)}"
        shown = "required" if required else _default(default)
        yield f"{spellings}{value}", shown, str(info.help)


def _value(kind: object) -> str:
    """Return the word for an option's value: its choices, or its kind."""
    kinds = [member for member in typing.get_args(kind) or (kind,) if member is not type(None)]
    if isinstance(kinds[0], type) and issubclass(kinds[0], Enum):
        return "{" + ",".join(str(member.value) for member in kinds[0]) + "}"
    return {int: "N", float: "NUMBER", Path: "PATH"}.get(kinds[0], "TEXT")


def _default(value: object) -> str:
    if value is None or value is False or value == "":
        return ""
    return f"`{value.value if isinstance(value, Enum) else value}`"


def _folders(folder: Path) -> Iterator[str]:
    """Yield the sections of a folder and of the folders below it; links to other rooms are left out."""
    place = folder.relative_to(ROOT).as_posix()
    files = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
    about = _sentence(folder / "__init__.py")
    rows = "".join(f"| `{path.name}` | {_sentence(path)} |\n" for path in files)
    depth = "###" if "/" in place else "##"
    table = f"\n| file | provides |\n|---|---|\n{rows}" if rows else ""
    yield f"{depth} `{place}/`\n\n{about}.\n{table}"
    for below in sorted(path for path in folder.iterdir() if (path / "__init__.py").is_file()):
        if not below.is_symlink():
            yield from _folders(below)


def _sentence(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(docstring.split("\n\n", maxsplit=1)[0].split())
    return re.split(r"\. (?=[A-Z`])", paragraph, maxsplit=1)[0].rstrip(".:").replace("|", "\\|")

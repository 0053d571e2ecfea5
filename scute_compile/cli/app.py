"""The `scute` application: its commands, and the exit status and message of every failure.

Exit status: 0 for success, notes allowed; 1 when an adapter is refused or differs from PEFT; 2 for usage errors and
missing bases. Each command imports what it needs when it runs, so that `--help` answers at once.
"""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from scute_compile import __version__
from scute_compile.cli.check import check_command
from scute_compile.cli.compile import compile_command
from scute_compile.cli.console import print_json
from scute_compile.cli.cost.command import cost_command
from scute_compile.cli.demo.command import demo_command
from scute_compile.cli.explain.command import explain_command
from scute_compile.cli.inspect.command import inspect_command
from scute_compile.cli.run.command import run_command
from scute_compile.cli.verify.command import verify_command
from scute_compile.diagnostics import USAGE_CODES, Code, Diagnostic, ScuteError, as_scute_error

app = typer.Typer(
    name="scute",
    help="Compile PEFT adapters into exact, packed artifacts for batched serving.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("compile")(compile_command)
app.command("check")(check_command)
app.command("inspect")(inspect_command)
app.command("explain-folds")(explain_command)
app.command("verify")(verify_command)
app.command("cost")(cost_command)
app.command("run")(run_command)
app.command("demo")(demo_command)


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"scute {__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Every exception becomes a message.

    Args:
        argv: The words after the program's name; None: those of the process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # characters that the terminal lacks are shown as escapes
            stream.reconfigure(errors="backslashreplace")
    as_json = "--json" in arguments  # usage errors are then JSON as well, and typer must not print them
    try:
        status = app(arguments, standalone_mode=not as_json)
    except SystemExit as end:  # typer ends every command so, usage errors (2) included
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return _interrupted()
    except Exception as error:  # noqa: BLE001 - users see no traceback
        return _fault(arguments, error)
    return status if isinstance(status, int) else 0


def _interrupted() -> int:
    sys.stderr.write("interrupted; unfinished artifacts are left out of the store\n")
    return 1


def _fault(arguments: Sequence[str], error: Exception) -> int:
    """Print what ended a command, and return its exit status. Typer's exceptions have no public names."""
    if isinstance(error, ScuteError):
        return _report(arguments, error.diagnostics)
    if isinstance(error, BrokenPipeError):
        return 1
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        sys.stderr.write(f"scute: {error.strerror}: not everything was written\n")
        return 1
    if type(error).__name__ == "Abort":
        return _interrupted()
    if hasattr(error, "format_message"):
        return _report(arguments, (_usage_error(str(error.format_message())),))
    return _report(arguments, as_scute_error(error).diagnostics)


def _usage_error(message: str) -> Diagnostic:
    return Diagnostic(
        code=Code.SC703,
        where="the command line",
        found=message,
        expected="a command with its options",
        next="see `scute --help`, or `scute COMMAND --help`",
    )


def _report(arguments: Sequence[str], diagnostics: Sequence[Diagnostic]) -> int:
    from scute_compile.cli.outcomes import lines

    if "--json" in arguments:
        command = next((word for word in arguments if not word.startswith("-")), "")
        from scute_compile.driver.reports import envelope

        print_json(envelope(command, findings=[item.to_json() for item in diagnostics]))
    for line in lines(diagnostics):
        sys.stderr.write(line + "\n")
    return 2 if any(item.code in USAGE_CODES for item in diagnostics) else 1

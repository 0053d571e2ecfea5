"""The command line. Help answers at once: whatever a command needs is imported by that command.

Exit status: 0 servable or done, notes allowed; 1 ran, but an adapter is refused or differs; 2 usage error or no such
base.
"""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from scute_compile import __version__
from scute_compile.diagnostics import USAGE_CODES, Code, Diagnostic, ScuteError, printable
from scute_compile.ir.dtypes import DType
from scute_compile.ir.target import LoraSharding, Target, Workload

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    name="scute",
    help="Compile PEFT adapters into exact, packed artifacts for batched serving.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

AdapterPaths = Annotated[list[str], typer.Argument(metavar="ADAPTER...", help="PEFT folders or Hub ids.")]
Paths = Annotated[list[str], typer.Argument(metavar="PATH...", help="PEFT folders, Hub ids or artifacts.")]
OnePath = Annotated[str, typer.Argument(metavar="PATH", help="A PEFT folder, a Hub id or an artifact.")]
Base = Annotated[
    str | None, typer.Option("--base", help="The base model: a folder or a Hub id. Default: the adapter's own.")
]
Ranks = Annotated[int, typer.Option("--tp", min=1, max=1024, help="Tensor-parallel ranks.")]
Sharding = Annotated[
    LoraSharding, typer.Option("--lora-sharding", help="How ranks share A and B; full: both of them are cut.")
]
AnyRanks = Annotated[
    int | None,
    typer.Option("--tp", min=1, max=1024, help="Tensor-parallel ranks. Default: 1; an artifact's own."),
]
AnySharding = Annotated[
    LoraSharding | None,
    typer.Option("--lora-sharding", help="As for compile. Default: default; an artifact's own."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Tenants = Annotated[int, typer.Option(min=1, help="Distinct adapters in a decode step, for routes.")]
Tokens = Annotated[int, typer.Option(min=1, help="Rows in a decode step, for routes.")]


def _consoles() -> tuple[Console, Console]:
    from rich.console import Console

    return Console(file=sys.stdout), Console(file=sys.stderr)


def _print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


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


@app.command("compile")
def compile_command(
    adapters: AdapterPaths,
    *,
    base: Base = None,
    tp: Ranks = 1,
    lora_sharding: Sharding = LoraSharding.DEFAULT,
    out: Annotated[Path, typer.Option("--out", "-o", help="The store that artifacts go to.")] = Path("scute-store"),
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    name: Annotated[str, typer.Option(help="The artifact's name. Default: the adapter folder's.")] = "",
    tenants: Tenants = 16,
    tokens: Tokens = 16,
    as_json: Json = False,
) -> None:
    """Compile adapters into a store; several in one call read the base once."""
    from scute_compile.cli.outcomes import envelope, render
    from scute_compile.driver.commands import compile_adapters

    workload = Workload(tenants=tenants, tokens=tokens)
    target = Target(tp=tp, dtype=_dtype(dtype), workload=workload, lora_sharding=lora_sharding)
    outcomes = compile_adapters(adapters, base, target, out, name=name, quiet=as_json)
    if as_json:
        _print_json(envelope("compile", store=str(out), adapters=[item.to_json() for item in outcomes]))
    else:
        render(outcomes, *_consoles())
    raise typer.Exit(int(any(item.outcome == "refused" for item in outcomes)))


@app.command()
def check(
    paths: Paths,
    *,
    base: Base = None,
    tp: AnyRanks = None,
    lora_sharding: AnySharding = None,
    as_json: Json = False,
) -> None:
    """Say whether adapters would compile and be exact; reads no base weights."""
    from scute_compile.cli.outcomes import envelope, render
    from scute_compile.driver.commands import check_paths

    outcomes = check_paths(paths, base, tp=tp, lora_sharding=lora_sharding)
    if as_json:
        _print_json(envelope("check", adapters=[item.to_json() for item in outcomes]))
    else:
        render(outcomes, *_consoles())
    raise typer.Exit(int(any(item.outcome == "refused" for item in outcomes)))


@app.command()
def inspect(
    path: OnePath,
    *,
    base: Annotated[
        str | None, typer.Option(help="The base model. Default: none; then there are no cuts and no routes.")
    ] = None,
    tp: AnyRanks = None,
    lora_sharding: AnySharding = None,
    as_json: Json = False,
) -> None:
    """Show an adapter's or an artifact's method, sites, ranks, slots, owners and bytes."""
    from scute_compile.driver.artifact_checks import Asked
    from scute_compile.driver.commands import inspect_path

    report = inspect_path(path, base, Asked(tp=tp, lora_sharding=lora_sharding))
    if as_json:
        _print_json(report.to_json())
    else:
        report.render(_consoles()[0])


@app.command("explain-folds")
def explain_folds(
    path: OnePath,
    *,
    base: Base = None,
    tp: AnyRanks = None,
    lora_sharding: AnySharding = None,
    site: Annotated[str | None, typer.Option(metavar="GLOB", help="Only sites whose name matches.")] = None,
    tenants: Annotated[int | None, typer.Option(min=1, help="As for compile. Default: 16; an artifact's own.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Likewise.")] = None,
    as_json: Json = False,
) -> None:
    """Say what became of every slot: its neighbours and their owners, merged or live, why, and the route."""
    from scute_compile.driver.artifact_checks import Asked
    from scute_compile.driver.commands import explain_path

    asked = Asked(tp=tp, lora_sharding=lora_sharding, tenants=tenants, tokens=tokens)
    report = explain_path(path, base, asked, site)
    if as_json:
        _print_json(report.to_json())
    else:
        report.render(_consoles()[0])


@app.command()
def verify(
    artifact: Annotated[str, typer.Argument(metavar="ARTIFACT", help="An artifact's folder.")],
    *,
    adapter: Annotated[str, typer.Option("--adapter", help="The PEFT folder that it was compiled from.")],
    base: Base = None,
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to compare on.")] = 64,
    as_json: Json = False,
) -> None:
    """Run an artifact and PEFT in float32 on the same tokens and compare log-probabilities."""
    from scute_compile.driver.commands import verify_artifact

    report = verify_artifact(artifact, adapter, base, tokens)
    if as_json:
        _print_json(report.to_json())
    else:
        report.render(*_consoles())
    raise typer.Exit(int(not report.passed))


@app.command()
def cost(
    *,
    model: Annotated[str, typer.Option(help="A model's name, folder or Hub id.")] = "llama-3.1-8b",
    tenants: Annotated[int, typer.Option(min=1, help="Distinct adapters in a decode step.")] = 16,
    tokens: Annotated[int | None, typer.Option(min=1, help="Rows per step. Default: one per tenant.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16; auto is float16.")] = "float16",
    rank: Annotated[int, typer.Option(help="Rank of LoRA, DoRA and AdaLoRA.")] = 16,
    vera_rank: Annotated[int, typer.Option(help="Rank of VeRA's shared pair.")] = 256,
    oft_block: Annotated[int, typer.Option(help="OFT's block size.")] = 32,
    bandwidth: Annotated[float, typer.Option(help="Memory bandwidth in GB/s.")] = 3600.0,
    launch: Annotated[float, typer.Option(help="Cost of one kernel launch in microseconds.")] = 0.5,
    as_json: Json = False,
) -> None:
    """Predict bytes and milliseconds per decode step for each method and a mixed pool."""
    from scute_compile.driver.commands import cost_report

    workload = Workload(tenants=tenants, tokens=tokens or tenants, bandwidth=bandwidth * 1e9, launch=launch * 1e-6)
    report = cost_report(model, workload, _dtype(dtype) or DType.FLOAT16, (rank, vera_rank, oft_block))
    if as_json:
        _print_json(report.to_json())
    else:
        report.render(_consoles()[0])


@app.command()
def run(
    *,
    base: Annotated[str, typer.Option("--base", help="The base model: a folder or a Hub id.")],
    adapter: Annotated[list[str] | None, typer.Option(metavar="NAME=ARTIFACT", help="An adapter to serve.")] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(metavar="NAME:TEXT", help="A prompt; without a name for the base alone.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens per prompt.")] = 64,
    as_json: Json = False,
) -> None:
    """Continue prompts in one batch, each with its own adapter, and stream the tokens."""
    from scute_compile.cli.run.stream import streaming
    from scute_compile.driver.commands import run_prompts

    console = _consoles()[0]
    with streaming(console, prompt or (), live=console.is_terminal and not as_json) as say:
        report = run_prompts(base, adapter or (), prompt or (), max_new_tokens, say)
    if as_json:
        _print_json(report.to_json())
    elif not console.is_terminal:
        report.render(console)


@app.command()
def demo(
    *,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Keep everything there.")] = None,
    as_json: Json = False,
) -> None:
    """Make a tiny Llama and an adapter of every method, compile them at tp 2, and compare one batch with PEFT."""
    from scute_compile.driver.commands import run_demo

    report = run_demo(out, quiet=as_json)
    if as_json:
        _print_json(report.to_json())
    else:
        report.render(_consoles()[0])
    raise typer.Exit(int(not report.passed))


def _dtype(text: str) -> DType | None:
    if text == "auto":
        return None
    try:
        return DType(text)
    except ValueError:
        raise ScuteError([_usage("--dtype", text, "auto, float32, bfloat16 or float16")]) from None


def _usage(where: str, found: str, expected: str) -> Diagnostic:
    return Diagnostic(code=Code.SC703, where=where, found=found, expected=expected, next="see --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; no exception leaves."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a name's letters shows their codes
            stream.reconfigure(errors="backslashreplace")
    as_json = "--json" in arguments  # then usage errors are JSON too, so the terminal library must not print them
    try:
        ended = app(arguments, standalone_mode=not as_json)
    except SystemExit as end:  # how the terminal library ends every command, usage errors (2) included
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return _interrupted()
    except Exception as error:  # noqa: BLE001 - the last line before a traceback
        return _fault(arguments, error)
    return ended if isinstance(ended, int) else 0


def _interrupted() -> int:
    sys.stderr.write("interrupted; nothing unfinished is readable\n")
    return 1


def _fault(arguments: Sequence[str], error: Exception) -> int:
    """Say what ended a command, and return its exit status. The terminal library's own classes have no public names."""
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
    return _internal(arguments, error)


def _usage_error(message: str) -> Diagnostic:
    return Diagnostic(
        code=Code.SC703,
        where="the command line",
        found=message,
        expected="a command with its own options",
        next="see `scute --help`, or `scute COMMAND --help`",
    )


def _internal(arguments: Sequence[str], error: Exception) -> int:
    if os.environ.get("SCUTE_DEBUG"):
        raise error
    fault = Diagnostic(
        code=Code.SC705,
        where=type(error).__name__,
        found=printable(error),
        expected="no fault of Scute's own",
        next="report it, with the input that leads to it",
    )
    return _report(arguments, (fault,))


def _report(arguments: Sequence[str], diagnostics: Sequence[Diagnostic]) -> int:
    from scute_compile.cli.outcomes import envelope, lines

    if "--json" in arguments:
        command = next((word for word in arguments if not word.startswith("-")), "")
        _print_json(envelope(command, findings=[item.to_json() for item in diagnostics]))
    for line in lines(diagnostics):
        sys.stderr.write(line + "\n")
    return 2 if any(item.code in USAGE_CODES for item in diagnostics) else 1

"""Runs the command line, in this process or in another one, and parses its output."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA_VERSION = "1.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One finished command."""

    code: int
    out: str
    err: str

    @property
    def answer(self) -> dict[str, Any]:
        """The JSON on standard output, which must hold nothing else."""
        value: dict[str, Any] = json.loads(self.out)
        assert value["schema_version"] == SCHEMA_VERSION
        return value

    @property
    def adapter(self) -> dict[str, Any]:
        """The outcome of the only adapter of the call."""
        adapters = self.answer["adapters"]
        assert len(adapters) == 1, adapters
        only: dict[str, Any] = adapters[0]
        return only

    def assert_clean(self) -> None:
        """Check for a documented exit status, no traceback and no internal error."""
        assert self.code in {0, 1, 2}, self
        for text in (self.out, self.err):
            assert "Traceback" not in text, text
            assert "SC705" not in text, text


def scute(*arguments: object) -> Ran:
    """Run a command in this process."""
    from scute_compile.cli.app import main

    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main([str(argument) for argument in arguments])
    ran = Ran(code=code, out=out.getvalue(), err=err.getvalue())
    ran.assert_clean()
    return ran


def scute_process(*arguments: object, cwd: Path | None = None) -> Ran:
    """Run a command in a new process."""
    command = [sys.executable, "-m", "scute_compile", *(str(argument) for argument in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False, timeout=300)
    ran = Ran(code=done.returncode, out=done.stdout, err=done.stderr)
    ran.assert_clean()
    return ran


def python(program: str, *arguments: object) -> str:
    """Run a small program in a new interpreter and return its output."""
    command = [sys.executable, "-c", program, *(str(argument) for argument in arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def compiled(adapter: Path, base: Path, store: Path, *options: object) -> Path:
    """Compile an adapter that must be servable, and return its artifact."""
    ran = scute("compile", adapter, "--base", base, "-o", store, "--json", *options)
    assert ran.code == 0, ran.out + ran.err
    artifact = Path(str(ran.adapter["artifact"]))
    assert (artifact / "manifest.json").is_file()
    return artifact


def verified(artifact: Path, adapter: Path, base: Path, *, tokens: int = 16) -> dict[str, Any]:
    """Compare an artifact with PEFT and return the figures, passed or not."""
    ran = scute("verify", artifact, "--adapter", adapter, "--base", base, "--tokens", tokens, "--json")
    return ran.answer

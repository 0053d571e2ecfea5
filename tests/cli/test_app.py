"""The application: ways to start it, its version, help and shell completion, and literal names in its output."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.commands import compiled, python, scute

Pair = Callable[[str, str], tuple[Path, Path]]


@pytest.mark.parametrize("module", ["scute_compile", "scute_compile.cli"])
def test_the_package_and_its_command_line_can_be_run(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("scute ")


def test_help_imports_no_heavy_package() -> None:
    program = """if True:
        import contextlib, io, sys
        from scute_compile.cli.app import main
        with contextlib.redirect_stdout(io.StringIO()):
            main(["--help"])
        print({"torch", "transformers", "peft", "numpy", "pydantic", "huggingface_hub"} & set(sys.modules))
    """
    assert python(program) == "set()\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_is_shown(shell: str) -> None:
    ran = scute("--show-completion", shell)
    assert ran.code == 0
    assert "_COMPLETE" in ran.out


def test_commands_and_options_are_completed() -> None:
    def completed(words: str) -> set[str]:
        environment = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_SCUTE_COMPLETE": "complete_bash"}
        program = "import sys; sys.argv[0] = 'scute'; from scute_compile.cli.app import main; sys.exit(main())"
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        return set(done.stdout.split())

    assert completed("scute co") == {"compile", "cost"}
    assert "--lora-sharding" in completed("scute compile --l")


def test_names_are_printed_as_they_are(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No emoji, no markup, no colours and no line breaks, whatever an adapter or a folder is called."""
    monkeypatch.setenv("COLUMNS", "60")
    adapter, base = pair("dora", "llama")
    name = ":smile: [bold]x [red]12 " + "long-" * 20
    folder = Path(shutil.copytree(adapter, tmp_path / name))
    artifact = compiled(folder, base, tmp_path / "store")
    compiling = scute("compile", folder, "--base", base, "-o", tmp_path / "store")
    assert compiling.out == f"{name}: exact (dora, 14 sites) -> {artifact}\n"
    assert scute("check", folder, "--base", base).out == f"{name}: exact (dora, 14 sites)\n"
    assert scute("inspect", folder, "--base", base).out.startswith(f"{name}: dora adapter, 14 sites\n")
    assert scute("explain-folds", artifact).out.startswith(f"{name} (dora): 14 sites, ")
    verifying = scute("verify", artifact, "--adapter", folder, "--base", base, "--tokens", 8)
    assert verifying.out.startswith(f"{name}: float32, tp 1, 8 tokens\n")
    (folder / "adapter_config.json").write_text("{}")
    refused = scute("check", folder, "--base", base)
    assert refused.out == f"{name}: refused\n"
    assert f"  where     {folder}" in refused.err

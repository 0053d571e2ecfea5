"""What the README shows is what happens. Set SCUTE_UPDATE_GOLDEN=1 to write it anew, and read the difference."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
import typer

from scute_compile.cli.app import app
from scute_compile.cli.demo.report import DemoReport, demo
from tests.docs.readme import (
    PICTURE,
    README,
    ROOT,
    WIDTH,
    commands,
    masked,
    picture,
    printed,
    with_map,
    with_outputs,
    words,
)
from tests.support.commands import scute_process

UPDATE = bool(os.environ.get("SCUTE_UPDATE_GOLDEN"))
HEAVY = {"torch", "transformers", "peft"}


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DemoReport]:
    """The folder in which the README's commands are run: it holds what `scute demo -o example` leaves."""
    folder = tmp_path_factory.mktemp("readme")
    with contextlib.chdir(folder):
        return folder, demo(Path("example"), quiet=True)


def readme() -> str:
    return README.read_text(encoding="utf-8")


def test_every_command_prints_what_the_readme_shows(
    example: tuple[Path, DemoReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    now = with_outputs(readme(), lambda command: printed(command, example[0]))
    if UPDATE:
        README.write_text(now, encoding="utf-8")
    assert masked(now) == masked(readme())
    assert sum(command.runs_here for command in commands(now)) >= 7


def test_the_picture_shows_what_the_demo_prints(example: tuple[Path, DemoReport]) -> None:
    folder, report = example
    del folder
    svg = picture(DemoReport(rows=report.rows, explained=report.explained, folder=None))
    if UPDATE:
        PICTURE.write_text(svg, encoding="utf-8")
    assert words(svg) == words(PICTURE.read_text(encoding="utf-8"))
    assert "every row equals PEFT" in words(svg)
    assert "url(" not in svg.replace("url(#", "")


def test_the_code_map_is_the_tree() -> None:
    now = with_map(readme())
    if UPDATE:
        README.write_text(now, encoding="utf-8")
    assert now == readme()
    assert "scute_compile/pipeline.py" in now


def test_the_synopsis_has_every_command_with_its_options() -> None:
    block = next(text for text in re.findall(r"```text\n(.*?)```", readme(), re.DOTALL) if "scute compile" in text)
    shown = {line.split()[1]: set(re.findall(r"--[a-z-]+", line)) for line in block.splitlines()}
    group = typer.main.get_command(app)
    real = {
        name: {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
        for name, command in group.commands.items()  # type: ignore[attr-defined] # a group, as it has commands
    }
    assert shown == {name: options - {"--help", "--json"} for name, options in real.items()}
    assert all("--json" in options for options in real.values())


def test_the_setup_commands_are_what_the_checks_run() -> None:
    setup = [command.line for command in commands(readme()) if not command.runs_here]
    main_job, tests, _ = setup
    venv, activate, install, run = tests.split(" && ")
    assert (venv, activate) == ("python3 -m venv .venv", ". .venv/bin/activate")
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert install in script
    assert run in script
    plain = install.replace("'.[test]'", ".")
    assert main_job == f"{venv} && {activate} && {plain} && scute demo"
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_light_install_names_all_dependencies_but_the_heavy_ones() -> None:
    light = [command.line for command in commands(readme()) if not command.runs_here][2]
    named = set(light.split(" && ")[0].removeprefix("pip install ").split())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.split(r"[<>=\[; ]", line)[0] for line in project["dependencies"]}
    assert named == declared - HEAVY
    assert declared > HEAVY


def test_the_example_program_serves_every_adapter_of_the_demo(example: tuple[Path, DemoReport]) -> None:
    program = ROOT / "examples" / "mixed_batch.py"
    done = subprocess.run(
        [sys.executable, program, "example"], cwd=example[0], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    said = [line.split() for line in done.stdout.splitlines()]
    assert {line[0] for line in said} == {"base", "lora", "dora", "ia3", "vera", "oft", "adalora"}
    assert len({line[-1] for line in said}) > 1


def test_the_served_model_of_the_readme_runs_as_it_stands(example: tuple[Path, DemoReport]) -> None:
    (block,) = (code for code in re.findall(r"```python\n(.*?)```", readme(), re.DOTALL) if " = ServedModel(" in code)
    (command,) = re.findall(r"`scute (compile [^`]* -o single)`", readme())
    with contextlib.chdir(example[0]):
        arguments = [path for word in command.split() for path in sorted(glob.glob(word)) or [word]]  # noqa: PTH207 - as a shell
    assert scute_process(*arguments, cwd=example[0]).code == 0
    program = example[0] / "served.py"
    model = "transformers.AutoModelForCausalLM.from_pretrained('example/base', dtype=torch.float32).eval()"
    given = f"import torch, transformers\nmodel, ids = {model}, torch.arange(6).repeat(3, 1)\n"
    program.write_text(f"{given}{block}print(len(set(map(tuple, tokens.tolist()))))\n")
    done = subprocess.run(
        [sys.executable, program], cwd=example[0], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3\n"


@pytest.mark.parametrize("name", ["mixed_batch.py", "changing_batch.py"])
def test_an_example_without_its_arguments_says_how_it_is_called(name: str) -> None:
    program = ROOT / "examples" / name
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1
    assert f"python examples/{name} " in done.stderr
    assert "Traceback" not in done.stderr


def test_the_changing_batch_is_the_readmes_and_serves_both_requests(example: tuple[Path, DemoReport]) -> None:
    program = ROOT / "examples" / "changing_batch.py"
    text = program.read_text(encoding="utf-8")
    (block,) = (code for code in re.findall(r"```python\n(.*?)```", readme(), re.DOTALL) if "ContinuousBatch" in code)
    assert textwrap.indent(block, "    ") in text
    compile_it, run_it = (line.split() for line in text.splitlines()[3:5])
    assert scute_process(*compile_it[1:], cwd=example[0]).code == 0
    done = subprocess.run(
        [sys.executable, program, *run_it[2:]], cwd=example[0], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    said = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert [name for name, _ in said].count("dora") == 8
    assert [name for name, _ in said].count("vera") == 4
    assert said[2][0] == "dora"
    assert {name for name, _ in said[3:9]} == {"dora", "vera"}

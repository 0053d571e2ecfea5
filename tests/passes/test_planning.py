"""`check`, `inspect` and `explain-folds` plan from names and shapes: fast, without weights or large imports."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.bases import made_once
from tests.support.commands import python, scute
from tests.support.sparse_base import write_large_adapter, write_sparse_base

Folder = Callable[[str], Path]
Adapter = Callable[[str, str], Path]
PLANNING = ("check", "inspect", "explain-folds")
MEASURED = """
import json, sys
from scute_compile.cli.app import main
code = main(sys.argv[1:])
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
heavy = sorted({"torch", "transformers", "peft"} & set(sys.modules))
print(json.dumps({"code": code, "peak_kib": int(peak.split()[1]), "heavy": heavy}), file=sys.stderr)
"""


def test_help_starts_fast() -> None:
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-m", "scute_compile", "--help"], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        # processor time, which other work on the machine doesn't change
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert all(command.encode() in done.stdout for command in (*PLANNING, "compile", "verify", "cost", "demo"))
    assert min(times) < 0.5


@pytest.mark.parametrize("command", PLANNING)
@pytest.mark.parametrize("recipe", ["dora", "vera-regenerated"])
def test_planning_imports_nothing_heavy(
    command: str, recipe: str, base_folder: Folder, adapter_folder: Adapter
) -> None:
    program = MEASURED.replace("file=sys.stderr", "file=sys.stdout")
    ranks = ("--tp", 2) if command == "check" else ()
    out = python(program, command, adapter_folder(recipe, "qwen2"), "--base", base_folder("qwen2"), "--json", *ranks)
    answer = json.loads(out.splitlines()[-1])
    assert answer["code"] == 0
    assert answer["heavy"] == []


@pytest.fixture(scope="module")
def huge(shared_folder: Path) -> Path:
    """Return a base with the 70B model's shapes, in sparse files."""
    return made_once(shared_folder / "sparse-70b", write_sparse_base)


@pytest.mark.parametrize("command", PLANNING)
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_planning_on_seventy_billion_parameters_is_fast_and_small(
    command: str, dora: bool, huge: Path, shared_folder: Path
) -> None:
    adapter = made_once(shared_folder / f"adapter-70b-{dora}", lambda folder: write_large_adapter(folder, dora=dora))
    start = time.perf_counter()
    asked = [command, str(adapter), "--base", str(huge), "--json"]
    done = subprocess.run([sys.executable, "-c", MEASURED, *asked], capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - start
    measured = json.loads(done.stderr.splitlines()[-1])
    assert measured["code"] == 0
    assert measured["peak_kib"] < 700 * 1000
    assert seconds < 5


def test_a_base_of_config_alone_is_enough_for_adapters_that_need_no_weights(
    base_folder: Folder, adapter_folder: Adapter, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((base_folder("llama") / "config.json").read_text())
    for recipe, code in (("lora", 0), ("ia3", 0), ("oft", 0), ("vera", 0), ("dora", 1)):
        ran = scute("compile", adapter_folder(recipe, "llama"), "--base", tmp_path, "-o", tmp_path / "store", "--json")
        assert ran.code == code, (recipe, ran.out)
        if code:
            assert {finding["code"] for finding in ran.adapter["findings"]} == {"SC403"}


@pytest.mark.parametrize(
    ("recipe", "base", "words"),
    [
        ("lora", "llama", ("lora", "A", "B", "c", "merged", "adapter")),
        ("dora", "llama", ("s", "e", "live", "merged", "base", "in the expand")),
        ("dora", "qwen2", ("b", "bias")),
        ("ia3", "llama", ("up_proj", "moved", "in the expand")),
        ("ia3", "gpt2", ("R", "live")),
        ("vera", "llama", ("d", "e", "live", "shared", "in the shrink", "in the expand")),
        ("oft", "llama", ("R", "live", "base")),
        ("adalora", "llama", ("d", "merged", "adapter")),
    ],
)
def test_explain_folds_names_slots_owners_and_routes(
    recipe: str, base: str, words: tuple[str, ...], base_folder: Folder, adapter_folder: Adapter
) -> None:
    ran = scute("explain-folds", adapter_folder(recipe, base), "--base", base_folder(base))
    assert ran.code == 0
    flat = " ".join(ran.out.split())
    assert [word for word in words if word not in flat] == []


def test_explain_folds_shows_once_what_is_equal_in_all_layers(base_folder: Folder, adapter_folder: Adapter) -> None:
    asked = ("explain-folds", adapter_folder("dora", "llama"), "--base", base_folder("llama"))
    both, first = scute(*asked).out, scute(*asked, "--site", "*layers.0.*").out
    assert "q_proj" in first
    assert "down_proj" not in scute(*asked, "--site", "*layers.0*q_proj").out
    assert len(both.splitlines()) <= len(first.splitlines()) + 2


def test_explain_folds_prices_every_alternative(base_folder: Folder, adapter_folder: Adapter) -> None:
    ran = scute("explain-folds", adapter_folder("dora", "llama"), "--base", base_folder("llama"), "--json")
    text = json.dumps(ran.answer)
    assert all(route in text for route in ("in the expand", "a separate pass", "a private merged copy"))


def test_a_glob_that_matches_no_site_is_an_error(base_folder: Folder, adapter_folder: Adapter) -> None:
    asked = ("explain-folds", adapter_folder("dora", "llama"), "--base", base_folder("llama"))
    assert scute(*asked, "--site", "nothing.like.this").code == 2

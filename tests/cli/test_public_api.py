"""`import scute_compile as scute`: names, signatures, and the same reports as the commands print."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import assert_type

import pytest

import scute_compile as scute
from scute_compile.diagnostics import Code
from tests.support.commands import compiled, python
from tests.support.commands import scute as command

Pair = Callable[[str, str], tuple[Path, Path]]

SIGNATURES = {
    "compile": "(adapters: 'StrPath | Iterable[StrPath]', *, base: 'StrPath | None' = None, target: 'Target' = "
    f"{scute.Target()!r}, store: 'StrPath' = 'scute-store', name: 'str | None' = None, "
    "progress: 'Callable[[str, int, int], None] | None' = None) -> 'CompileReport'",
    "check": "(paths: 'StrPath | Iterable[StrPath]', *, base: 'StrPath | None' = None, tp: 'int | None' = None, "
    "lora_sharding: 'LoraSharding | str | None' = None) -> 'CheckReport'",
    "inspect": "(path: 'StrPath', *, base: 'StrPath | None' = None, tp: 'int | None' = None, "
    "lora_sharding: 'LoraSharding | str | None' = None) -> 'InspectReport'",
    "explain": "(path: 'StrPath', *, base: 'StrPath | None' = None, tp: 'int | None' = None, "
    "lora_sharding: 'LoraSharding | str | None' = None, site: 'str | None' = None, tenants: 'int | None' = None, "
    "tokens: 'int | None' = None) -> 'ExplainReport'",
    "verify": "(artifact: 'StrPath', *, adapter: 'StrPath', base: 'StrPath | None' = None, tokens: 'int' = 64) -> "
    "'VerifyReport'",
    "load_artifact": "(path: 'StrPath') -> 'Artifact'",
}
TYPES = {
    "Artifact",
    "CheckReport",
    "CompileReport",
    "DType",
    "ExplainReport",
    "InspectReport",
    "LoraSharding",
    "Outcome",
    "ScuteError",
    "Target",
    "VerifyReport",
    "Workload",
}


def test_the_public_names_are_pinned() -> None:
    assert set(scute.__all__) == {*SIGNATURES, *TYPES, "__version__"}
    assert all(inspect.isclass(getattr(scute, name)) for name in TYPES)
    with pytest.raises(AttributeError, match="no attribute 'compille'"):
        getattr(scute, "compille")  # noqa: B009 - a type checker knows that there is none


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_signature_is_pinned(name: str) -> None:
    assert str(inspect.signature(getattr(scute, name))) == SIGNATURES[name]


def test_check_inspect_and_explain_do_not_import_torch(pair: Pair, tmp_path: Path) -> None:
    adapter, base = pair("dora", "llama")
    artifact = compiled(adapter, base, tmp_path / "store")
    program = """if True:
        import sys
        import scute_compile as scute
        adapter, base, artifact = sys.argv[1:]
        scute.check([adapter, artifact], base=base)
        scute.inspect(adapter, base=base)
        scute.explain(adapter, base=base)
        scute.load_artifact(artifact)
        print({"torch", "transformers", "peft", "rich", "typer"} & set(sys.modules))
    """
    assert python(program, adapter, base, artifact) == "set()\n"


def test_reports_are_what_the_commands_print(pair: Pair, tmp_path: Path) -> None:
    adapter, base = pair("dora", "llama")
    store = tmp_path / "store"
    report = assert_type(
        scute.compile(adapter, base=base, target=scute.Target(tp=2), store=store), "scute.CompileReport"
    )
    assert report.to_json() == command("compile", adapter, "--base", base, "--tp", 2, "-o", store, "--json").answer
    checked = assert_type(scute.check([adapter, store / "dora"], tp=2), "scute.CheckReport")
    assert checked.to_json() == command("check", adapter, store / "dora", "--tp", 2, "--json").answer
    described = assert_type(scute.inspect(store / "dora"), "scute.InspectReport")
    assert described.to_json() == command("inspect", store / "dora", "--json").answer
    explained = assert_type(scute.explain(adapter, site="*q_proj", tenants=3), "scute.ExplainReport")
    words = ("--site", "*q_proj", "--tenants", 3, "--json")
    assert explained.to_json() == command("explain-folds", adapter, *words).answer
    verified = assert_type(scute.verify(store / "dora", adapter=adapter, tokens=8), "scute.VerifyReport")
    assert verified.to_json() == command("verify", store / "dora", "--adapter", adapter, "--tokens", 8, "--json").answer
    artifact = assert_type(scute.load_artifact(store / "dora"), "scute.Artifact")
    assert artifact.manifest.tp == 2


@pytest.mark.parametrize("several", [list, tuple, iter])
def test_one_or_several_paths_are_taken_as_text_or_as_paths(
    several: Callable[[list[Path]], list[Path]], pair: Pair, tmp_path: Path
) -> None:
    adapter, base = pair("lora", "llama")
    other = Path(shutil.copytree(adapter, tmp_path / "other"))
    assert [item.name for item in scute.check(several([adapter, other]), base=base).adapters] == ["lora", "other"]
    assert scute.check(str(adapter), base=str(base)) == scute.check([str(adapter)], base=base)


def test_names_of_enumerations_are_taken_for_their_members(pair: Pair, tmp_path: Path) -> None:
    adapter, base = pair("lora", "llama")
    target = scute.Target(tp=2, dtype="bfloat16", lora_sharding="full")  # type: ignore[arg-type] # as typed in a shell
    report = scute.compile(adapter, base=base, target=target, store=tmp_path / "store")
    artifact = scute.load_artifact(str(report.adapters[0].artifact))
    assert artifact.manifest.dtype is scute.DType.BFLOAT16
    assert artifact.manifest.lora_sharding is scute.LoraSharding.FULL
    assert not scute.check(artifact.path, lora_sharding="full").refused
    assert scute.check(artifact.path, lora_sharding="default").refused


WRONG: dict[str, Callable[[Path, Path], object]] = {
    "tp: 0 / 1 to 1024": lambda adapter, base: scute.check(adapter, base=base, tp=0),
    "tp: 1025 / 1 to 1024": lambda adapter, base: scute.compile(adapter, base=base, target=scute.Target(tp=1025)),
    "tenants: 0 / at least 1": lambda adapter, base: scute.explain(adapter, base=base, tenants=0),
    "tokens: -3 / at least 1": lambda adapter, base: scute.verify(adapter, adapter=adapter, base=base, tokens=-3),
    "lora_sharding: `half` / `default` or `full`": lambda adapter, base: scute.inspect(
        adapter, base=base, lora_sharding="half"
    ),
    "dtype: `int8` / `float32` or `bfloat16` or `float16`": lambda adapter, base: scute.compile(
        adapter,
        base=base,
        target=scute.Target(dtype="int8"),  # type: ignore[arg-type] # the mistake
    ),
    "paths: no path / at least one": lambda _, base: scute.check([], base=base),
}


@pytest.mark.parametrize("expected", WRONG)
def test_values_out_of_range_are_refused(expected: str, pair: Pair) -> None:
    with pytest.raises(scute.ScuteError) as caught:
        WRONG[expected](*pair("lora", "llama"))
    (finding,) = caught.value.diagnostics
    assert finding.code is Code.SC703
    assert f"{finding.where}: {finding.found} / {finding.expected}" == expected


def test_faults_of_adapters_are_outcomes_and_can_be_raised(pair: Pair, tmp_path: Path) -> None:
    adapter, base = pair("lora", "llama")
    for given in (base, None):
        report = scute.check([adapter, tmp_path / "missing"], base=given)
        assert [item.outcome for item in report.adapters] == ["exact", "refused"]
        with pytest.raises(scute.ScuteError, match="SC101"):
            report.raise_if_refused()
        alone = scute.check(tmp_path / "missing", base=given)
        assert [item.findings[0].code for item in alone.adapters] == [Code.SC101]
    scute.check(adapter).raise_if_refused()
    with pytest.raises(scute.ScuteError, match="SC401"):
        scute.check(adapter, base=tmp_path / "no-base")


def test_progress_is_reported_per_kind_of_work(pair: Pair, tmp_path: Path) -> None:
    adapter, base = pair("dora", "llama")
    calls: list[tuple[str, int, int]] = []
    scute.compile(adapter, base=base, store=tmp_path / "store", progress=lambda *call: calls.append(call))
    assert {work for work, _, _ in calls} == {"base", "adapters"}
    assert calls[-1] == ("adapters", 1, 1)
    assert all(done <= total for _, done, total in calls)

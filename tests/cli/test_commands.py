"""Exit status, JSON, and the stream of messages of every command."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.commands import SCHEMA_VERSION, compiled, scute, scute_process, verified

Folder = Callable[[str], Path]
Adapter = Callable[[str, str], Path]


@pytest.mark.parametrize(
    "arguments",
    [
        ("no-such-command",),
        ("compile",),
        ("compile", "ADAPTER", "--base", "BASE", "--tp", "0"),
        ("compile", "ADAPTER", "--base", "BASE", "--tp", "two"),
        ("compile", "ADAPTER", "--base", "BASE", "--dtype", "int8"),
        ("compile", "ADAPTER", "--base", "BASE", "--no-such-option"),
        ("check",),
        ("check", "ADAPTER", "--base", "/no/such/base"),
        ("compile", "ADAPTER", "--base", "/no/such/base"),
        ("explain-folds", "ADAPTER", "--base", "/no/such/base"),
        ("verify", "ADAPTER"),
    ],
    ids=" ".join,
)
def test_usage_errors_and_missing_bases_exit_with_2(
    arguments: tuple[str, ...], base_folder: Folder, adapter_folder: Adapter, tmp_path: Path
) -> None:
    folders = {"ADAPTER": adapter_folder("lora", "llama"), "BASE": base_folder("llama")}
    store = ("-o", tmp_path / "store") if "compile" in arguments[:1] else ()
    ran = scute(*(folders.get(argument, argument) for argument in arguments), *store)
    assert ran.code == 2
    assert ran.err
    assert not ran.out
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "--no-such-option"),
        ("compile",),
        ("check", "x", "--tp", "0"),
        ("no-such-command",),
    ],
    ids=" ".join,
)
def test_usage_errors_are_json_with_json(arguments: tuple[str, ...]) -> None:
    ran = scute(*arguments, "--json")
    (finding,) = json.loads(ran.out)["findings"]
    assert (ran.code, finding["code"]) == (2, "SC703")
    assert finding["found"] in ran.err


def test_an_empty_base_is_refused(adapter_folder: Adapter) -> None:
    ran = scute("check", adapter_folder("lora", "llama"), "--base", "")
    assert (ran.code, "SC401" in ran.err) == (2, True)


def test_a_full_disk_is_not_an_internal_error() -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "scute_compile", "cost"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ran.returncode == 1
    assert "No space left" in ran.stderr
    assert "SC705" not in ran.stderr


def test_a_missing_base_is_named(adapter_folder: Adapter) -> None:
    ran = scute("check", adapter_folder("lora", "llama"), "--base", "/no/such/base")
    assert "SC401" in ran.err
    assert "/no/such/base" in ran.err


def test_a_missing_base_that_the_adapter_names_leads_to_the_base_option(
    adapter_folder: Adapter, tmp_path: Path
) -> None:
    adapter = Path(shutil.copytree(adapter_folder("lora", "llama"), tmp_path / "moved"))
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "/moved/away"}))
    for command in (("check",), ("explain-folds",), ("compile", "-o", tmp_path / "store")):
        ran = scute(*command, adapter)
        assert (ran.code, "SC401" in ran.err) == (2, True)
        assert "the adapter names this base, and --base can name another place" in ran.err
    assert "the adapter names" not in scute("check", adapter, "--base", "/moved/away").err


def test_a_missing_artifact_is_named(adapter_folder: Adapter, tmp_path: Path) -> None:
    ran = scute("verify", tmp_path / "none", "--adapter", adapter_folder("lora", "llama"))
    assert (ran.code, "SC601" in ran.err, "no folder of that name" in ran.err) == (1, True, True)
    ran = scute("verify", tmp_path, "--adapter", adapter_folder("lora", "llama"))
    assert (ran.code, "no manifest.json" in ran.err) == (1, True)


def test_a_missing_adapter_is_refused_and_named(base_folder: Folder, tmp_path: Path) -> None:
    ran = scute("check", tmp_path / "nothing-here", "--base", base_folder("llama"))
    assert ran.code == 1
    assert "SC101" in ran.err
    assert "nothing-here" in ran.err


def test_unknown_hub_ids_are_reported_like_missing_folders(base_folder: Folder, adapter_folder: Adapter) -> None:
    """The tests run offline, so Hub ids outside the cache are not found."""
    adapter = scute("check", "owner/no-such-adapter", "--base", base_folder("llama"))
    assert (adapter.code, "SC101" in adapter.err) == (1, True), adapter
    base = scute("check", adapter_folder("lora", "llama"), "--base", "owner/no-such-base")
    assert (base.code, "SC401" in base.err) == (2, True), base


def test_the_demo_needs_no_files_and_ends_within_a_minute(tmp_path: Path) -> None:
    start = time.perf_counter()
    ran = scute_process("demo", cwd=tmp_path)
    assert time.perf_counter() - start < 60
    assert ran.code == 0, ran.err
    assert all(method in ran.out.lower() for method in ("lora", "dora", "ia3", "vera", "oft"))


def test_the_base_that_the_adapter_names_is_the_default(base_folder: Folder, adapter_folder: Adapter) -> None:
    """PEFT records the folder of the base in the configuration."""
    base_folder("llama")
    ran = scute("check", adapter_folder("lora", "llama"), "--json")
    assert ran.code == 0
    assert ran.adapter["outcome"] == "exact"


@pytest.mark.parametrize("command", ["check", "inspect", "explain-folds", "compile", "verify"])
def test_every_command_prints_json_with_a_schema_version(
    command: str, base_folder: Folder, adapter_folder: Adapter, tmp_path: Path
) -> None:
    adapter, base = adapter_folder("dora", "llama"), base_folder("llama")
    subject: tuple[object, ...] = (adapter,)
    if command == "compile":
        subject = (adapter, "-o", tmp_path / "store")
    elif command == "verify":
        subject = (compiled(adapter, base, tmp_path / "store"), "--adapter", adapter)
    ran = scute(command, *subject, "--base", base, "--json")
    assert ran.code == 0, ran.err
    assert ran.answer["schema_version"] == SCHEMA_VERSION
    assert ran.answer["command"] == command


def test_cost_prints_json_with_a_schema_version() -> None:
    ran = scute("cost", "--json")
    assert ran.code == 0
    assert ran.answer["command"] == "cost"


def test_json_is_all_of_standard_output_when_an_adapter_is_refused(base_folder: Folder, tmp_path: Path) -> None:
    ran = scute_process("check", tmp_path, "--base", base_folder("llama"), "--json")
    assert ran.code == 1
    assert ran.adapter["findings"]
    for finding in ran.adapter["findings"]:
        assert set(finding) == {"code", "title", "severity", "where", "found", "expected", "next"}
        assert finding["severity"] == "error"
        assert finding["next"]


def test_all_findings_of_an_adapter_are_reported_together(
    base_folder: Folder, adapter_folder: Adapter, tmp_path: Path
) -> None:
    from tests.support.damage import Saved, added, changed, configured, first_set_to

    saved = Saved.read(adapter_folder("lora", "llama"))
    for edit in (
        configured(some_future_config=1),
        changed("layers.0.*q_proj.lora_A", first_set_to(float("nan"))),
        added("base_model.model.lm_head.weight", lambda: next(iter(saved.tensors.values())).clone()),
    ):
        edit(saved)
    saved.write(tmp_path / "adapter")
    ran = scute("check", tmp_path / "adapter", "--base", base_folder("llama"))
    assert ran.code == 1
    assert all(word in ran.err for word in ("some_future_config", "q_proj", "lm_head")), ran.err


def test_a_refused_adapter_does_not_stop_the_others_of_a_call(
    base_folder: Folder, adapter_folder: Adapter, tmp_path: Path
) -> None:
    recipes = ("lora", "dora", "ia3", "vera", "oft", "adalora")
    good = [adapter_folder(recipe, "llama") for recipe in recipes]
    (tmp_path / "broken").mkdir()
    store, base = tmp_path / "store", base_folder("llama")
    ran = scute("compile", *good, tmp_path / "broken", "--base", base, "--tp", 2, "-o", store, "--json")
    assert ran.code == 1
    outcomes = {item["name"]: item["outcome"] for item in ran.answer["adapters"]}
    assert outcomes == {**dict.fromkeys(recipes, "exact"), "broken": "refused"}
    assert {folder.name for folder in store.iterdir()} - {"factors"} == set(recipes)
    for recipe, adapter in zip(recipes, good, strict=True):
        assert verified(store / recipe, adapter, base)["relative_error"] <= 5e-5


def test_two_adapters_of_one_name_are_not_written_over_each_other(
    base_folder: Folder, adapter_folder: Adapter, tmp_path: Path
) -> None:
    from tests.support.damage import Saved

    Saved.read(adapter_folder("dora", "llama")).write(tmp_path / "elsewhere" / "lora")
    store = tmp_path / "store"
    both = (adapter_folder("lora", "llama"), tmp_path / "elsewhere" / "lora")
    ran = scute("compile", *both, "--base", base_folder("llama"), "-o", store)
    assert ran.code in {1, 2}
    assert "SC607" in ran.err


def test_two_adapters_of_one_name_on_different_bases_are_both_refused(
    base_folder: Folder, adapter_folder: Adapter, tmp_path: Path
) -> None:
    """Without --base adapters are packed base by base; names must differ over the whole call."""
    same = adapter_folder("lora", "llama"), adapter_folder("lora", "qwen2")
    assert same[0].name == same[1].name
    store = tmp_path / "store"
    ran = scute("compile", *same, adapter_folder("dora", "qwen2"), "-o", store, "--json")
    assert ran.code == 1
    outcomes = [(item["outcome"], [finding["code"] for finding in item["findings"]]) for item in ran.answer["adapters"]]
    assert outcomes == [("refused", ["SC607"]), ("refused", ["SC607"]), ("exact", [])]
    assert {folder.name for folder in store.iterdir()} - {"factors"} == {"dora"}


@pytest.mark.parametrize("given", [True, False])
def test_an_adapter_is_opened_once(
    given: bool, base_folder: Folder, adapter_folder: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scute_compile.formats import peft_folder

    opened: list[Path] = []
    read = peft_folder._read_folder

    def counting(source: str, path: Path, name: str) -> peft_folder.AdapterFolder:
        opened.append(path)
        return read(source, path, name)

    monkeypatch.setattr(peft_folder, "_read_folder", counting)
    adapters = [adapter_folder("lora", "llama"), adapter_folder("dora", "llama")]
    base = ("--base", base_folder("llama")) if given else ()
    for command in (("check",), ("compile", "-o", tmp_path / "store")):
        opened.clear()
        assert scute(command[0], *adapters, *command[1:], *base).code == 0
        assert opened == adapters


def test_a_single_adapter_can_be_named(base_folder: Folder, adapter_folder: Adapter, tmp_path: Path) -> None:
    artifact = compiled(
        adapter_folder("lora", "llama"), base_folder("llama"), tmp_path / "store", "--name", "support-bot"
    )
    assert artifact == tmp_path / "store" / "support-bot"


@pytest.mark.parametrize("recipe", ["lora", "dora", "ia3", "vera", "oft", "adalora"])
def test_inspect_describes_adapters_and_artifacts(
    recipe: str, base_folder: Folder, adapter_folder: Adapter, tmp_path: Path
) -> None:
    adapter, base = adapter_folder(recipe, "llama"), base_folder("llama")
    artifact = compiled(adapter, base, tmp_path / "store", "--tp", 2)
    for path in (adapter, artifact):
        ran = scute("inspect", path, "--base", base)
        assert ran.code == 0, ran.err
        assert recipe in ran.out.lower()
    assert scute("inspect", artifact, "--json").code == 0


def test_verify_reports_errors_beside_the_effect(base_folder: Folder, adapter_folder: Adapter, tmp_path: Path) -> None:
    adapter, base = adapter_folder("ia3", "llama"), base_folder("llama")
    artifact = compiled(adapter, base, tmp_path / "store")
    figures = verified(artifact, adapter, base)
    ratio = figures["mean_abs_logprob_error"] / figures["mean_abs_adapter_effect"]
    assert figures["relative_error"] == pytest.approx(ratio)


def test_verify_refuses_an_artifact_of_another_base(
    base_folder: Folder, adapter_folder: Adapter, tmp_path: Path
) -> None:
    adapter = adapter_folder("dora", "llama")
    artifact = compiled(adapter, base_folder("llama"), tmp_path / "store")
    ran = scute("verify", artifact, "--adapter", adapter, "--base", base_folder("llama-tied"))
    assert ran.code in {1, 2}
    assert "SC608" in ran.err


@pytest.mark.parametrize(
    ("options", "code", "found"),
    [
        ((), 0, None),
        (("--tp", "2"), 0, None),
        (("--tp", "4"), 1, "SC801"),
        (("--tp", "1"), 1, "SC801"),
        (("--lora-sharding", "full"), 1, "SC801"),
        (("--lora-sharding", "default"), 0, None),
    ],
)
def test_check_refuses_an_artifact_for_another_target(
    options: tuple[str, ...], code: int, found: str | None, base_folder: Folder, adapter_folder: Adapter, tmp_path: Path
) -> None:
    artifact = compiled(adapter_folder("lora", "llama"), base_folder("llama"), tmp_path / "store", "--tp", 2)
    ran = scute("check", artifact, *options, "--json")
    (adapter,) = json.loads(ran.out)["adapters"]
    assert (ran.code, next((item["code"] for item in adapter["findings"]), None)) == (code, found)

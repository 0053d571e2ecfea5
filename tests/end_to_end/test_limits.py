"""Crafted sizes cost linear time or are refused with their limit; findings that repeat are counted."""

from __future__ import annotations

import json
import shutil
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from scute_compile.diagnostics import Code, Findings, Severity
from scute_compile.diagnostics.diagnostic import LISTED
from scute_compile.formats.manifest import manifest_digest
from scute_compile.passes.parse.patterns import Patterns, full_match
from tests.support.commands import compiled, scute
from tests.support.damage import CONFIG, ROOT, WEIGHTS

Folder = Callable[[str], Path]
Shape = tuple[int, ...]
SECONDS = 20.0
"""Processor time of one check: the slowest takes 4 s alone, and took more than 45 s while its cost was quadratic."""
FACTORS: Mapping[str, Shape] = {
    f"{ROOT}model.layers.{layer}.self_attn.q_proj.lora_{letter}.weight": shape
    for layer in range(2)
    for letter, shape in (("A", (8, 64)), ("B", (64, 8)))
}
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def write(folder: Path, tensors: Mapping[str, Shape], file: str = WEIGHTS, **config: object) -> Path:
    """Write an adapter with tensors of zeros; safetensors itself would take long for so many."""
    header, end = {}, 0
    for key, shape in tensors.items():
        size = 4
        for axis in shape:
            size *= axis
        header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(end))
    chosen = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], **config}
    (folder / CONFIG).write_text(json.dumps(chosen))
    return folder


def checked(folder: Path, base: Path) -> list[dict[str, str]]:
    """Return the findings of a check, which must take bounded processor time."""
    start = time.process_time()
    ran = scute("check", folder, "--base", base, "--json")
    assert time.process_time() - start < SECONDS
    findings: list[dict[str, str]] = ran.adapter["findings"] if "adapters" in ran.answer else ran.answer["findings"]
    return findings


def factors(names: list[str], width: int) -> dict[str, Shape]:
    """Return tensors of rank 1 for layers."""
    return {
        f"{ROOT}{name}.lora_{letter}.weight": (1, width) if letter == "A" else (width, 1)
        for name in names
        for letter in "AB"
    }


def test_many_unclaimed_keys_are_counted(base_folder: Folder, tmp_path: Path) -> None:
    extra = {f"{ROOT}model.extra.{number}.weight": (1,) for number in range(20_000)}
    findings = checked(write(tmp_path / "adapter", {**FACTORS, **extra}), base_folder("llama"))
    assert [finding["code"] for finding in findings] == ["SC301"] * (LISTED + 1)
    assert findings[-1]["found"].startswith("20000 findings")
    assert findings[-1]["where"] == f"{20_000 - LISTED} further places"


def test_the_experts_of_the_largest_model_are_counted(base_folder: Folder, tmp_path: Path) -> None:
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{name}"
        for layer in range(3, 61)
        for expert in range(256)
        for name in PROJECTIONS
    ]
    assert len(names) == 44_544
    findings = checked(write(tmp_path / "adapter", factors(names, 4)), base_folder("llama"))
    assert findings[-1]["found"].startswith("44544 findings")
    assert {finding["code"] for finding in findings} == {"SC212"}


def test_full_names_as_targets_and_patterns_of_many_layers(base_folder: Folder, tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.mlp.part{part}.up_proj" for layer in range(60) for part in range(100)]
    base = write(tmp_path / "base", {f"{name}.weight": (4, 4) for name in names}, "model.safetensors")
    (base / "config.json").write_bytes((base_folder("llama") / "config.json").read_bytes())
    ranks, alphas = dict.fromkeys(names, 1), dict.fromkeys(names, 3.0)
    folder = write(
        tmp_path / "adapter", factors(names, 4), target_modules=names, rank_pattern=ranks, alpha_pattern=alphas
    )
    assert [finding["code"] for finding in checked(folder, base)] == ["SC314"]


def test_patterns_that_match_nothing_are_one_note(base_folder: Folder, tmp_path: Path) -> None:
    idle = {f"model.layers.{layer}.mlp.up_proj": 8 for layer in range(100_000)}
    findings = checked(write(tmp_path / "adapter", FACTORS, rank_pattern=idle), base_folder("llama"))
    assert [finding["code"] for finding in findings] == ["SC208", "SC314"]
    assert "and 99996 more" in findings[0]["found"]


def _header_of_empty_tensors(folder: Path) -> None:
    entry = '"t%08d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    raw = ("{" + ",".join(entry % number for number in range(1_600_000)) + "}").encode()
    assert 90_000_000 < len(raw) < 100_000_000
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(raw)) + raw)


def _large_configuration(folder: Path) -> None:
    patterns = ",".join(f'"layers.{number:08d}.q":8' for number in range(4_500_000))
    (folder / CONFIG).write_text('{"peft_type": "LORA", "rank_pattern": {' + patterns + "}}")


def _many_expressions(folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    config["alpha_pattern"] = {rf"layers\.{number}\.q_proj": 8 for number in range(600)}
    (folder / CONFIG).write_text(json.dumps(config))


def _long_name(folder: Path) -> None:
    write(folder, {**FACTORS, ROOT + "a." * 50_000 + "q_proj.lora_A.weight": (8, 64)})


BEYOND: dict[str, tuple[Callable[[Path], None], str]] = {
    "a header of empty tensors": (_header_of_empty_tensors, "250000 tensors"),
    "a configuration of 95 MB": (_large_configuration, "16000000 bytes"),
    "expressions in a pattern field": (_many_expressions, "500"),
    "a name of 100,000 characters": (_long_name, "1000"),
}


@pytest.mark.parametrize("what", BEYOND)
def test_what_no_real_adapter_reaches_is_refused_with_the_limit(what: str, base_folder: Folder, tmp_path: Path) -> None:
    change, limit = BEYOND[what]
    folder = write(tmp_path / "adapter", FACTORS)
    change(folder)
    findings = checked(folder, base_folder("llama"))
    assert {finding["code"] for finding in findings if finding["severity"] == "error"} == {"SC112"}
    assert limit in findings[0]["expected"]
    assert all(len(finding["where"]) <= 4000 for finding in findings)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    ("field", "count"), [("num_hidden_layers", 200_000), ("n_layer", 1e12), ("num_experts", 10**9)]
)
def test_a_base_of_too_many_layers_is_not_built(
    field: str, count: float, nested: bool, base_folder: Folder, tmp_path: Path
) -> None:
    config = json.loads((base_folder("llama") / "config.json").read_text())
    (config.setdefault("text_config", {}) if nested else config)[field] = count
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    findings = checked(write(tmp_path / "adapter", FACTORS), tmp_path / "base")
    assert [finding["code"] for finding in findings] == ["SC112"]
    assert field in findings[0]["found"]


def test_findings_of_one_code_are_listed_up_to_a_limit() -> None:
    findings = Findings()
    for number in range(LISTED + 7):
        findings.error(Code.SC301, where=f"key {number}", found="a", expected="b")
        findings.error(Code.SC301, where="again", found="a", expected="b")
        findings.note(Code.SC301, where="a note", found="a")
    listed = tuple(findings)
    assert len(listed) == LISTED + 2
    assert len(findings.errors) == LISTED + 1
    assert len(findings.notes) == 1
    assert findings.errors[-1].where == "8 further places"
    assert findings.errors[-1].severity is Severity.ERROR


@pytest.mark.parametrize("path", ["model.layers.1.q_proj", "q_proj", "modelxlayersx1.q_proj", "a\nb.q_proj", "", "."])
def test_plain_patterns_match_what_their_expressions_match(path: str) -> None:
    keys = ["q_proj", "layers.1.q_proj", ".q_proj", "q.proj", "model.layers.1.q_proj", "1", "..q_proj", "x1.q_proj"]
    patterns = {key: number for number, key in enumerate([*keys, r"layers\.\d\.q_proj", "l.*j"])}
    expected = [key for key in patterns if full_match(rf"(.*\.)?({key})", path, where="test")]
    assert [key for key, _ in Patterns(patterns, where="test").matching(path)] == expected


@pytest.mark.parametrize("number", ["9" * 26, "9" * 400, "9" * 5000])
@pytest.mark.parametrize("option", ["--tenants", "--tokens", "--rank"])
def test_numbers_of_many_digits_are_usage_errors(option: str, number: str) -> None:
    ran = scute("cost", option, number, "--json")
    assert ran.code == 2
    assert {finding["code"] for finding in ran.answer["findings"]} == {"SC703"}


@pytest.mark.parametrize("weights", [False, True])
def test_a_model_type_of_5000_characters_is_refused(weights: bool, base_folder: Folder, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(base_folder("llama"), base)
    for file in () if weights else base.glob("*.safetensors*"):
        file.unlink()
    config = json.loads((base / "config.json").read_text()) | {"model_type": "x" * 5000}
    (base / "config.json").write_text(json.dumps(config))
    findings = checked(write(tmp_path / "adapter", FACTORS), base)
    assert [finding["code"] for finding in findings] == ["SC112"]


@pytest.mark.parametrize("place", ["live", "notes"])
def test_a_manifest_with_a_cost_of_400_digits_is_refused(
    place: str, pair: Callable[[str, str], tuple[Path, Path]], tmp_path: Path
) -> None:
    adapter, base = pair("vera", "llama")
    artifact = compiled(adapter, base, tmp_path / "store")
    file = artifact / "manifest.json"
    fields = json.loads(file.read_text())
    entries = fields["sites"][0]["live"] if place == "live" else fields["notes"]
    next(entry for entry in entries if entry["candidates"])["candidates"][0][1] = 10**400
    file.write_text(json.dumps({**fields, "digest": manifest_digest(fields)}))
    for command in ("check", "inspect", "explain-folds"):
        ran = scute(command, artifact, "--json")
        assert ran.code == 1
        assert '"SC601"' in ran.out


@pytest.mark.parametrize("command", ["check", "inspect", "explain-folds"])
def test_an_empty_tensor_with_a_huge_dimension_is_refused(command: str, base_folder: Folder, tmp_path: Path) -> None:
    folder = write(tmp_path / "adapter", FACTORS)
    shapes = {"A": [0, 2**62], "B": [64, 0], "E": [0, 1]}
    header = {
        f"{ROOT}model.layers.0.self_attn.q_proj.lora_{letter}": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
        for letter, shape in shapes.items()
    }
    raw = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(raw)) + raw)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "ADALORA", "init_r": 8, "target_modules": ["q_proj"]}))
    ran = scute(command, folder, "--json", "--base", base_folder("llama"))
    assert ran.code == 1
    assert '"SC105"' in ran.out


@pytest.mark.parametrize("length", [240, 255])
def test_an_adapter_with_a_long_name_is_compiled(
    length: int, pair: Callable[[str, str], tuple[Path, Path]], tmp_path: Path
) -> None:
    adapter, base = pair("lora", "llama")
    shutil.copytree(adapter, tmp_path / ("n" * length))
    artifact = compiled(tmp_path / ("n" * length), base, tmp_path / "store")
    assert artifact.name == "n" * length


def test_an_artifacts_name_that_is_too_long_is_named(
    pair: Callable[[str, str], tuple[Path, Path]], tmp_path: Path
) -> None:
    adapter, base = pair("lora", "llama")
    store = ("-o", tmp_path / "store", "--name", "n" * 256)
    ran = scute("compile", adapter, "--base", base, *store, "--json")
    assert '"SC607"' in ran.out
    assert "256 bytes" in ran.out
    assert not (tmp_path / "store").exists()

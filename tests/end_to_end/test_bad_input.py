"""Random damage to adapters, bases and stores ends in findings, never in a traceback or an internal error."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.commands import scute
from tests.support.damage import CONFIG, WEIGHTS

Folder = Callable[[str], Path]
Adapter = Callable[[str, str], Path]
RECIPES = ("lora-patterns", "dora", "ia3", "vera", "oft", "adalora")
FEW = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 10**20)
    | st.floats()
    | st.sampled_from(["", "all-linear", "q_proj", "(", "LORA", "none", "\x1b[31m", "9" * 5000, "0.18", "x.y.z"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["q_proj", "(", "a"]), inner, max_size=2)
    ),
    max_leaves=4,
)


def _answers(folder: Path, base: Path, command: str = "check") -> None:
    """Check that a refusal has a finding; `scute` checks the exit status and the output."""
    store = ("-o", folder / "store") if command == "compile" else ()
    ran = scute(command, folder, "--base", base, "--json", *store)
    if ran.code == 1:
        findings = (ran.adapter if command in {"check", "compile"} else ran.answer)["findings"]
        assert any(finding["severity"] == "error" for finding in findings)
        assert not (folder / "store").exists()


@pytest.fixture(params=RECIPES)
def adapter(request: pytest.FixtureRequest, adapter_folder: Adapter) -> Path:
    """One adapter of each method."""
    return adapter_folder(request.param, "llama")


@pytest.fixture
def base(base_folder: Folder) -> Path:
    """The base of the adapters."""
    return base_folder("llama")


@given(data=st.data())
@FEW
def test_any_value_in_any_field_of_the_configuration_ends_in_a_finding(
    data: st.DataObject, adapter: Path, base: Path
) -> None:
    config = json.loads((adapter / CONFIG).read_text())
    fields = data.draw(st.lists(st.sampled_from([*sorted(config), "a_new_field"]), min_size=1, max_size=2))
    config |= {field: data.draw(VALUES) for field in fields}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(adapter / WEIGHTS, folder)
        (folder / CONFIG).write_text(json.dumps(config))
        _answers(folder, base)


@given(
    text=st.sampled_from(
        ["", "[]", "null", "{", '{"peft_type": "LORA"', "{}", "\ufeff{}", '"LORA"', "1" * 10**6, "[" * 10**5]
    )
)
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_in_place_of_the_configuration_ends_in_a_finding(
    text: str, base: Path, adapter_folder: Adapter
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(adapter_folder("lora", "llama") / WEIGHTS, folder)
        (folder / CONFIG).write_text(text)
        _answers(folder, base)


@given(data=st.data())
@FEW
def test_any_damage_to_the_tensor_file_ends_in_a_finding(data: st.DataObject, adapter: Path, base: Path) -> None:
    raw = bytearray((adapter / WEIGHTS).read_bytes())
    header = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(0, header + 64))
        raw[min(place, len(raw) - 1)] = data.draw(st.integers(0, 255))
    end = data.draw(st.just(len(raw)) | st.integers(0, len(raw)) | st.integers(0, header))
    extra = data.draw(st.binary(max_size=9))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(adapter / CONFIG, folder)
        (folder / WEIGHTS).write_bytes(bytes(raw[:end]) + extra)
        _answers(folder, base)


HEADER_VALUES: st.SearchStrategy[object] = st.sampled_from(
    [
        None,
        -1,
        0,
        7,
        2**63,
        "F32",
        "F99",
        [],
        [0],
        [4, 0],
        [0, 2**62],
        [64, 8, 1],
        [-8, 64],
        {},
        "x",
        1.5,
        True,
    ]
)


@given(data=st.data())
@FEW
def test_any_header_of_the_tensor_file_ends_in_a_finding(data: st.DataObject, adapter: Path, base: Path) -> None:
    raw = (adapter / WEIGHTS).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    key = data.draw(st.sampled_from(sorted(set(header) - {"__metadata__"})))
    field = data.draw(st.sampled_from(["dtype", "shape", "data_offsets", "entry", "name"]))
    value = data.draw(HEADER_VALUES)
    if field == "entry":
        header[key] = value
    elif field == "name":
        header[data.draw(st.text(max_size=20))] = header.pop(key)
    else:
        header[key] = {**header[key], field: value}
    text = json.dumps(header).encode()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(adapter / CONFIG, folder)
        (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
        _answers(folder, base, data.draw(st.sampled_from(["check", "compile", "explain-folds", "inspect"])))


@given(data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_value_in_the_configuration_of_the_base_ends_in_a_finding(
    data: st.DataObject, base: Path, adapter_folder: Adapter
) -> None:
    config = json.loads((base / "config.json").read_text())
    fields = data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=2))
    config |= {field: data.draw(VALUES) for field in fields}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in base.iterdir():
            if file.name != "config.json":
                (folder / file.name).symlink_to(file)
        (folder / "config.json").write_text(json.dumps(config))
        scute("check", adapter_folder("dora", "llama"), "--base", folder, "--tp", 2, "--json")


@given(data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_to_the_base_ends_in_a_finding(data: st.DataObject, base: Path, adapter_folder: Adapter) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(base, folder, dirs_exist_ok=True)
        victim = data.draw(
            st.sampled_from(sorted(file.name for file in base.iterdir() if "generation" not in file.name))
        )
        raw = bytearray((folder / victim).read_bytes())
        end = data.draw(st.just(len(raw)) | st.integers(0, min(len(raw), 400)))
        raw[data.draw(st.integers(0, min(len(raw) - 1, 400)))] = data.draw(st.integers(0, 255))
        (folder / victim).write_bytes(bytes(raw[:end]))
        store = folder / "store"
        ran = scute("compile", adapter_folder("dora", "llama"), "--base", folder, "-o", store, "--json")
        assert ran.code == 0 or not store.exists()


def test_a_folder_in_place_of_a_file_ends_in_a_finding(base: Path, tmp_path: Path, adapter_folder: Adapter) -> None:
    shutil.copy(adapter_folder("lora", "llama") / CONFIG, tmp_path)
    (tmp_path / WEIGHTS).mkdir()
    _answers(tmp_path, base)


def test_a_file_in_place_of_a_folder_ends_in_a_finding(base: Path, adapter_folder: Adapter) -> None:
    ran = scute("check", adapter_folder("lora", "llama") / WEIGHTS, "--base", base)
    assert ran.code == 1


def test_a_store_that_cannot_be_written_ends_in_a_finding(base: Path, tmp_path: Path, adapter_folder: Adapter) -> None:
    (tmp_path / "store").write_text("a file in place of the store")
    ran = scute("compile", adapter_folder("lora", "llama"), "--base", base, "-o", tmp_path / "store")
    assert ran.code in {1, 2}
    assert "SC" in ran.err

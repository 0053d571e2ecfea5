"""Opening bases: one file, shards with and without an index, a configuration only, and Hub repositories."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from scute_compile.diagnostics import Code, Diagnostic, ScuteError
from scute_compile.formats.base_checkpoint import CONFIG, INDEX, SINGLE, open_base
from scute_compile.formats.safetensors import header_length
from tests.support.hub_server import serving

TENSORS = {f"w{i}": np.arange(12 * (i + 1), dtype=np.float32).reshape(-1, 4) for i in range(5)}
SHARDS = {"model-00001-of-00002.safetensors": ("w0", "w1"), "model-00002-of-00002.safetensors": ("w2", "w3", "w4")}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep this process off the network; tests of Hub repositories start other processes."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "base"
    made.mkdir()
    (made / CONFIG).write_text('{"model_type": "llama"}')
    return made


def shard(folder: Path, *, index: bool = True) -> None:
    for file, keys in SHARDS.items():
        save_file({key: TENSORS[key] for key in keys}, folder / file)
    if index:
        weight_map = {key: file for file, keys in SHARDS.items() for key in keys}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refused(source: Path | str) -> tuple[Diagnostic, ...]:
    with pytest.raises(ScuteError) as caught:
        open_base(str(source), weights=False)
    return caught.value.diagnostics


@pytest.mark.parametrize("layout", ["one file", "index", "no index"])
def test_every_layout_gives_the_same_tensors(folder: Path, layout: str) -> None:
    if layout == "one file":
        save_file(TENSORS, folder / SINGLE)
    else:
        shard(folder, index=layout == "index")
    base = open_base(str(folder), weights=True)
    assert base.has_weights
    assert list(base.tensors) == sorted(TENSORS)
    for key, value in TENSORS.items():
        np.testing.assert_array_equal(base.read_tensor(key), value)


def test_a_configuration_without_weight_files_is_a_base_without_weights(folder: Path) -> None:
    base = open_base(str(folder), weights=False)
    assert (base.has_weights, dict(base.tensors), base.quantized) == (False, {}, None)


@pytest.mark.parametrize("index", [True, False])
def test_a_missing_shard_is_named(folder: Path, *, index: bool) -> None:
    shard(folder, index=index)
    (folder / "model-00002-of-00002.safetensors").unlink()
    (found,) = refused(folder)
    assert found.code is Code.SC107
    assert "model-00002-of-00002.safetensors" in found.found


def test_an_index_that_disagrees_with_a_shard_is_refused(folder: Path) -> None:
    shard(folder)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["w0"] = "model-00002-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    (found,) = refused(folder)
    assert found.code is Code.SC310
    assert "w0" in found.found


def test_a_tensor_in_two_shards_is_refused_unless_the_index_decides(folder: Path) -> None:
    shard(folder)
    save_file({"w0": TENSORS["w0"] + 1, **{k: TENSORS[k] for k in ("w2", "w3", "w4")}}, folder / [*SHARDS][1])
    np.testing.assert_array_equal(open_base(str(folder), weights=True).read_tensor("w0"), TENSORS["w0"])
    (folder / INDEX).unlink()
    assert [d.code for d in refused(folder)] == [Code.SC306]


@pytest.mark.parametrize(
    "index",
    [
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": {"w0": 1}}',
        '{"weight_map": {"w0": "../x"}}',
        "[",
    ],
)
def test_a_malformed_index_is_refused(folder: Path, index: str) -> None:
    shard(folder)
    (folder / INDEX).write_text(index)
    assert [d.code for d in refused(folder)] == [Code.SC108]


def test_every_damaged_shard_is_reported(folder: Path) -> None:
    shard(folder)
    for file in SHARDS:
        raw = (folder / file).read_bytes()
        (folder / file).write_bytes(raw[:-1])
    assert [d.code for d in refused(folder)] == [Code.SC104, Code.SC104]


def test_bases_with_pickles_only_are_refused_with_advice_to_convert(folder: Path) -> None:
    (folder / "pytorch_model-00001-of-00002.bin").touch()
    (found,) = refused(folder)
    assert found.code is Code.SC407
    assert "save_pretrained" in found.next


def test_other_folders_files_and_names_are_refused(folder: Path) -> None:
    (folder / CONFIG).rename(folder / "adapter_config.json")
    for source in (folder, folder / "adapter_config.json", folder / "absent", "a\0b", "owner/absent", "absent-base"):
        (found,) = refused(source)
        assert found.code is Code.SC401


def test_the_quantization_method_is_named(folder: Path) -> None:
    (folder / CONFIG).write_text('{"quantization_config": {"quant_method": "fp8"}}')
    assert open_base(str(folder), weights=False).quantized == "fp8"
    (folder / CONFIG).write_text('{"quantization_config": null}')
    assert open_base(str(folder), weights=False).quantized is None
    (folder / CONFIG).write_text('{"quantization_config": {}}')
    assert open_base(str(folder), weights=False).quantized


OPEN = """
from scute_compile.diagnostics import ScuteError
from scute_compile.formats.base_checkpoint import open_base
try:
    base = open_base("owner/name", weights={})
    print(base.has_weights, {{key: s.entry.shape for key, s in base.tensors.items()}})
    print(float(base.read_tensor("w4").sum()))
except ScuteError as error:
    print(error)
"""


@pytest.mark.parametrize("sharded", [True, False])
def test_opening_a_repository_without_weights_downloads_headers_only(
    folder: Path, tmp_path: Path, *, sharded: bool
) -> None:
    if sharded:
        shard(folder)
    else:
        save_file(TENSORS, folder / SINGLE)
    headers = {}
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            headers[file.name] = 8 + header_length(opened.read(8), file.stat().st_size, "")
    with serving(folder) as hub:
        done = hub.run(OPEN.format(False), tmp_path / "home")
        first, *rest = done.stdout.splitlines()
        assert first == f"False { ({k: v.shape for k, v in TENSORS.items()}) }", done.stderr
        assert "SC403" in rest[0]
        assert {file: count for file, count in hub.sent.items() if file.endswith(".safetensors")} == headers


def test_a_server_that_ignores_ranges_is_read_as_far_as_the_header(folder: Path, tmp_path: Path) -> None:
    save_file({"w4": np.zeros(16 << 20, np.uint8)}, folder / SINGLE)
    with serving(folder, ranges=False) as hub:
        done = hub.run(OPEN.format(False), tmp_path / "home")
        assert done.stdout.startswith("False {'w4': (16777216,)}"), done.stderr
        # The client reads two ranges; socket buffers take an unknown part of the 16 MB of each.
        assert hub.sent[SINGLE] < 2 * (16 << 20)


def test_a_repository_with_weights_is_downloaded(folder: Path, tmp_path: Path) -> None:
    shard(folder)
    (folder / "pytorch_model.bin").write_bytes(b"x" * 100)
    with serving(folder) as hub:
        done = hub.run(OPEN.format(True), tmp_path / "home")
        assert done.stdout.splitlines()[1:] == [str(float(TENSORS["w4"].sum()))], done.stderr
        assert set(hub.sent) - {""} == {CONFIG, INDEX, *SHARDS}

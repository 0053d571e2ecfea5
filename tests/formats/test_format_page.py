"""An independent reader, written from docs/format.md alone: compiled artifacts are what the page describes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.artifact_files import manifest_of
from tests.support.commands import compiled, scute
from tests.support.damage import Saved, renamed

Json = Any  # parsed JSON
Pair = Callable[[str, str], tuple[Path, Path]]
CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
FIELDS = (
    *("hidden_size", "n_embd", "num_hidden_layers", "n_layer", "num_attention_heads", "n_head", "num_heads"),
    *("num_key_value_heads", "intermediate_size", "n_inner", "vocab_size", "head_dim"),
)
TEXT = ("text_config", "language_config", "llm_config")


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def _canonical(value: Json) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")


def _tensors(file: Path) -> Iterator[tuple[str, str, list[int], bytes]]:
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    for name, entry in json.loads(raw[8:start]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            yield name, entry["dtype"], entry["shape"], raw[start + begin : start + end]


def _structure(base: Path) -> str:
    config = json.loads((base / "config.json").read_text())
    text = next((config[key] for key in TEXT if isinstance(config.get(key), dict)), config)
    parameters = {key: text[key] for key in FIELDS if text.get(key) is not None}
    parameters["model_type"] = config["model_type"]
    shapes = {name: shape for file in base.glob("*.safetensors") for name, _, shape, _ in _tensors(file)}
    return _sha256(_canonical({"model_type": config["model_type"], "parameters": parameters, "tensors": shapes}))


def _samples(raw: bytes) -> bytes:
    if len(raw) <= 4096:
        return raw
    last = len(raw) - 4096
    return b"".join(raw[offset : offset + 4096] for offset in sorted({0, last // 2, last}))


def _content(base: Path) -> str:
    tensors = [tensor for file in base.glob("*.safetensors") for tensor in _tensors(file)]
    return _sha256(
        _canonical(sorted([name, code, shape, _sha256(_samples(raw))] for name, code, shape, raw in tensors))
    )


def _width(ranges: list[list[int]]) -> int:
    return sum(stop - start for start, stop in ranges)


def _expected(manifest: Json, rank: int) -> Iterator[tuple[str, str, list[int]]]:
    """Yield name, dtype and shape of every tensor of a rank file."""
    code = CODES[manifest["dtype"]]
    for site in manifest["sites"]:
        name, inputs, outputs = site["name"], _width(site["inputs"][rank]), _width(site["outputs"][rank])
        if (rotation := site["rotation"]) is not None:
            size = rotation["block"]
            blocks = 1 if rotation["blocks"] == 1 else inputs // size
            yield f"{name}.dR", code, [blocks, size, size] if rotation["kind"] == "blocks" else [inputs]
        if site["scale"]:
            yield f"{name}.ds", code, [outputs]
        if site["shift"]:
            yield f"{name}.b", "F32", [outputs]
        for k, term in enumerate(site["terms"]):
            rows = term["rank"] if term["rows"] is None else _width([term["rows"][rank]])
            columns = outputs if term["columns"] is None else _width([term["columns"][rank]])
            shapes = {"A": [rows, inputs], "B": [term["rank"], columns], "d": [rows], "e": [columns]}
            held = {"A": term["a"] is None, "B": term["b"] is None, "d": term["d"], "e": term["e"]}
            yield from ((f"{name}.terms.{k}.{slot}", code, shapes[slot]) for slot in "ABde" if held[slot])


@pytest.mark.parametrize(
    ("recipe", "base", "options"),
    [
        ("dora", "llama", ("--tp", 2)),
        ("dora", "qwen2", ("--tp", 2, "--lora-sharding", "full", "--dtype", "bfloat16")),
        ("oft", "llama", ("--tp", 2)),
        ("oft-shared", "llama", ()),
        ("vera", "llama", ("--tp", 4, "--dtype", "float16")),
        ("vera", "llama", ("--tp", 2, "--lora-sharding", "full")),
        ("ia3-inputs", "phi3", ("--tp", 2)),
        ("lora", "gpt2", ()),
    ],
)
def test_artifacts_are_what_the_page_describes(
    recipe: str, base: str, options: tuple[object, ...], pair: Pair, tmp_path: Path
) -> None:
    adapter, where = pair(recipe, base)
    artifact = compiled(adapter, where, tmp_path / "store", *options)
    manifest = manifest_of(artifact)
    assert (manifest["format"], manifest["schema_version"]) == ("scute.artifact", "2.0")
    assert (artifact / "manifest.json").read_text().lstrip("{ \n").startswith('"format"')
    assert manifest["digest"] == _sha256(_canonical({k: v for k, v in manifest.items() if k != "digest"}))
    assert manifest["base"]["structure"] == _structure(where)
    assert manifest["base"]["content"] == _content(where)
    assert manifest["sources"] == {file: _sha256((adapter / file).read_bytes()) for file in manifest["sources"]}
    names = {"manifest.json"}
    for rank, record in enumerate(manifest["ranks"]):
        file = artifact / record["file"]
        digest = _sha256(file.read_bytes())
        assert (record["sha256"], record["bytes"]) == (digest, file.stat().st_size)
        assert file.name == f"rank-{rank:05d}-of-{manifest['tp']:05d}.{digest[:16]}.safetensors"
        names.add(file.name)
        found = sorted((name, code, shape) for name, code, shape, _ in _tensors(file))
        assert found == sorted(_expected(manifest, rank))
    assert {path.name for path in artifact.iterdir()} == names
    assert manifest["bytes"]["ranks"] == sum(record["bytes"] for record in manifest["ranks"])
    for record in manifest["factors"]:
        ((name, code, shape, raw),) = _tensors(artifact.parent / "factors" / f"{record['hash']}.safetensors")
        assert (name, code, shape) == ("factor", CODES[record["dtype"]], [record["rank"], record["features"]])
        assert record["hash"] == _sha256(f"{record['dtype']}:{record['rank']}x{record['features']}:".encode() + raw)
        assert record["bytes"] == len(raw)
    assert bool(manifest["factors"]) == (recipe == "vera")


def test_renamed_maps_the_paths_in_keys_to_the_bases(pair: Pair, tmp_path: Path) -> None:
    adapter, base = pair("lora", "llama")
    saved = Saved.read(adapter)
    renamed(r"^base_model\.model\.model\.", "base_model.model.")(saved)
    saved.write(tmp_path / "short")
    manifest = manifest_of(compiled(tmp_path / "short", base, tmp_path / "store"))
    sites = {site["name"] for site in manifest["sites"]}
    assert manifest["renamed"] == {f"base_model.{name}": name for name in sites}
    assert manifest_of(compiled(adapter, base, tmp_path / "store"))["renamed"] == {}


@pytest.mark.parametrize(
    ("named", "recorded"),
    [("meta/llama-1b", "meta/llama-1b"), ("/home/me/bases/llama-1b/", "llama-1b"), ("", None), (None, None)],
)
def test_the_bases_name_holds_no_local_folder(
    named: str | None, recorded: str | None, pair: Pair, tmp_path: Path
) -> None:
    adapter, base = pair("lora", "llama")
    saved = Saved.read(adapter)
    saved.config["base_model_name_or_path"] = named
    saved.write(tmp_path / "adapter")
    artifact = compiled(tmp_path / "adapter", base, tmp_path / "store")
    assert manifest_of(artifact)["base"]["name"] == recorded
    assert str(tmp_path) not in (artifact / "manifest.json").read_text()
    assert str(base) not in (artifact / "manifest.json").read_text()


def test_an_adapters_folder_with_a_reserved_name_is_refused(pair: Pair, tmp_path: Path) -> None:
    adapter, base = pair("lora", "llama")
    Saved.read(adapter).write(tmp_path / ".hidden")
    ran = scute("compile", tmp_path / ".hidden", "--base", base, "-o", tmp_path / "store")
    assert ran.code == 1
    assert "SC607" in ran.err
    assert not (tmp_path / "store").exists()

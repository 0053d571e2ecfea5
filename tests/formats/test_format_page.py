"""Artifacts and fingerprints are what docs/format.md describes, by a reader that was written from that page alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.formats.independent_reader import RefusedError, canonical, open_artifact, open_base, sha256
from tests.support.artifact_files import manifest_of
from tests.support.commands import compiled, scute
from tests.support.damage import Saved, renamed

Json = Any  # parsed JSON
Pair = Callable[[str, str], tuple[Path, Path]]


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
    adapter, folder = pair(recipe, base)
    artifact = compiled(adapter, folder, tmp_path / "store", *options)
    assert (artifact / "manifest.json").read_text().lstrip("{ \n").startswith('"format"')
    manifest, base_model = open_artifact(artifact).manifest, open_base(folder)
    assert (manifest["base"]["structure"], manifest["base"]["content"]) == (base_model.structure, base_model.content)
    assert manifest["sources"] == {file.name: sha256(file.read_bytes()) for file in adapter.iterdir()}
    assert {path.name for path in artifact.iterdir()} == {
        "manifest.json",
        *(rank["file"] for rank in manifest["ranks"]),
    }
    assert manifest["bytes"]["ranks"] == sum(rank["bytes"] for rank in manifest["ranks"])
    assert manifest["bytes"]["shared"] == sum(factor["bytes"] for factor in manifest["factors"])
    width = {"float32": 4, "bfloat16": 2, "float16": 2}
    for factor in manifest["factors"]:
        assert factor["dtype"] == manifest["dtype"]
        assert factor["bytes"] == factor["rank"] * factor["features"] * width[factor["dtype"]]
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


def _keep(_: Path) -> None:
    """Leave the base as `save_pretrained` wrote it: shards with an index."""


def _add_other_weights(folder: Path) -> None:
    save_file({"layers.0.attention.wq.weight": np.ones((2, 2), np.float32)}, folder / "consolidated.safetensors")


def _add_one_file(folder: Path) -> None:
    """Add all tensors, changed, in the one file that replaces the shards and their index."""
    tensors = {name: stored.values().astype(np.float32) + 1 for name, stored in open_base(folder).tensors.items()}
    save_file(tensors, folder / "model.safetensors")


def _remove_the_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()


def _remove_the_model_type(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["model_type"]
    (folder / "config.json").write_text(json.dumps(config))


def _nest_the_text_model(folder: Path) -> None:
    text = json.loads((folder / "config.json").read_text())
    outer = {**text, "model_type": "outer", "hidden_size": 1, "text_config": text}
    (folder / "config.json").write_text(json.dumps(outer))


@pytest.mark.parametrize(
    "change",
    [_keep, _add_other_weights, _add_one_file, _remove_the_index, _remove_the_model_type, _nest_the_text_model],
)
def test_fingerprints_are_those_of_the_page(change: Callable[[Path], None], pair: Pair, tmp_path: Path) -> None:
    adapter, original = pair("ia3", "llama")
    folder = tmp_path / "base"
    shutil.copytree(original, folder)
    change(folder)
    base, manifest = open_base(folder), open_artifact(compiled(adapter, folder, tmp_path)).manifest
    assert (manifest["base"]["structure"], manifest["base"]["content"]) == (base.structure, base.content)


def test_a_base_without_weights_has_the_structure_of_the_whole_base(pair: Pair, tmp_path: Path) -> None:
    adapter, original = pair("ia3", "llama")
    (tmp_path / "base").mkdir()
    shutil.copy(original / "config.json", tmp_path / "base")
    manifest = open_artifact(compiled(adapter, tmp_path / "base", tmp_path)).manifest
    assert (manifest["base"]["structure"], manifest["base"]["content"]) == (open_base(original).structure, None)


Damage = Callable[[Path, Json], object]
"""Changes an artifact's files, or its manifest, whose digest is then computed again."""


def _rank_file(folder: Path, manifest: Json) -> Path:
    return folder / str(manifest["ranks"][0]["file"])


def _factor_file(folder: Path, manifest: Json) -> Path:
    return folder.parent / "factors" / f"{manifest['factors'][0]['hash']}.safetensors"


def _flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def _link(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("moved"))


def _end_in(end: bytes, *, instead_of: int) -> Damage:
    """Change the end of a rank file, and its name, size and hash with it."""

    def damage(folder: Path, manifest: Json) -> None:
        path = _rank_file(folder, manifest)
        data = path.read_bytes()
        data = data[: len(data) - instead_of] + end
        file = f"rank-00000-of-00002.{sha256(data)[:16]}.safetensors"
        manifest["ranks"][0] = {"file": file, "sha256": sha256(data), "bytes": len(data)}
        path.unlink()
        (folder / file).write_bytes(data)

    return damage


def _of_manifest(change: Callable[[Json], object]) -> Damage:
    return lambda _, manifest: change(manifest)


def _of_sites(change: Callable[[Json], object]) -> Damage:
    return lambda _, manifest: [change(site) for site in manifest["sites"]]


def _rotate(**fields: object) -> Damage:
    return lambda _, manifest: [site["rotation"].update(fields) for site in manifest["sites"] if site["rotation"]]


DAMAGE: Mapping[str, tuple[str, Damage, str]] = {
    "nothing": ("dora", lambda folder, _: folder, ""),
    "another name": ("dora", _of_manifest(lambda manifest: manifest.update(name="other")), ""),
    "another file": ("dora", lambda folder, _: (folder / "notes.txt").touch(), ""),
    "a note with another field": ("dora", _of_manifest(lambda manifest: manifest["notes"][0].update(more=1)), ""),
    "an unknown field": ("dora", _of_manifest(lambda manifest: manifest.update(more=1)), "SC601"),
    "an unknown field of a site": ("dora", _of_sites(lambda site: site.update(more=1)), "SC601"),
    "a missing field": ("dora", _of_manifest(lambda manifest: manifest.pop("tool")), "SC601"),
    "a number as text": ("dora", _of_sites(lambda site: site.update(in_features="64")), "SC601"),
    "a lone surrogate": ("dora", _of_manifest(lambda manifest: manifest.update(tool="\ud800")), "SC601"),
    "another format": ("dora", _of_manifest(lambda manifest: manifest.update(format="other")), "SC601"),
    "a newer version": ("dora", _of_manifest(lambda manifest: manifest.update(schema_version="3.0")), "SC602"),
    "sites twice": ("dora", _of_manifest(lambda manifest: manifest["sites"].extend(manifest["sites"])), "SC601"),
    "a shift on every rank": ("dora", _of_sites(lambda site: site.update(shift_rank=-1)), "SC601"),
    "terms of another layout": (
        "lora",
        _of_manifest(lambda manifest: manifest.update(lora_sharding="default")),
        "SC601",
    ),
    "an unlisted factor": ("vera", _of_manifest(lambda manifest: manifest["factors"].pop()), "SC601"),
    "blocks that are cut": ("oft", _rotate(block=32, blocks=5), "SC601"),
    "a diagonal of half the inputs": ("ia3-inputs", _rotate(blocks=32), "SC601"),
    "a diagonal in blocks": ("ia3-inputs", _rotate(block=2), "SC601"),
    "an unknown split": ("oft", _of_sites(lambda site: site.update(split="unknown")), "SC601"),
    "no manifest": ("dora", lambda folder, _: (folder / "manifest.json").unlink(), "SC601"),
    "a rank file's byte": ("dora", lambda *artifact: _flip(_rank_file(*artifact)), "SC603"),
    "no rank file": ("dora", lambda *artifact: _rank_file(*artifact).unlink(), "SC603"),
    "a linked rank file": ("dora", lambda *artifact: _link(_rank_file(*artifact)), "SC604"),
    "a linked manifest": ("dora", lambda folder, _: _link(folder / "manifest.json"), "SC604"),
    "linked factors": ("vera", lambda folder, _: _link(folder.parent / "factors"), "SC604"),
    "ranks in another order": ("dora", _of_manifest(lambda manifest: manifest["ranks"].reverse()), "SC604"),
    "no sites": ("dora", _of_manifest(lambda manifest: manifest["sites"].clear()), "SC605"),
    "a value that isn't finite": ("dora", _end_in(b"\x00\x00\xc0\x7f", instead_of=4), "SC309"),
    "bytes after the tensors": ("dora", _end_in(b"0", instead_of=0), "SC105"),
    "a factor's byte": ("vera", lambda *artifact: _flip(_factor_file(*artifact)), "SC606"),
    "no factor": ("vera", lambda *artifact: _factor_file(*artifact).unlink(), "SC606"),
    "no factors": ("vera", lambda folder, _: shutil.rmtree(folder.parent / "factors"), "SC606"),
}


def _refusal(artifact: Path) -> str:
    """Return the code under which the compiler's reader refuses an artifact."""
    from scute_compile.diagnostics import ScuteError
    from scute_compile.formats import artifact_tensors
    from scute_compile.formats.artifact import open_artifact as open_for_runtime

    try:
        opened = open_for_runtime(artifact)
        for rank in range(opened.manifest.tp):
            artifact_tensors.load_rank(opened, rank)
        for factor in opened.manifest.factors:
            artifact_tensors.load_factor(opened, factor.hash)
    except ScuteError as error:
        return error.diagnostics[0].code.name
    return ""


@pytest.fixture(scope="module")
def whole(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of fully sharded artifacts of two ranks."""
    store = tmp_path_factory.mktemp("whole")
    for recipe in ("lora", "dora", "ia3-inputs", "oft", "vera"):
        compiled(*pair(recipe, "llama"), store, "--tp", 2, "--lora-sharding", "full")
    return store


@pytest.mark.parametrize("case", DAMAGE)
def test_readers_refuse_alike(case: str, whole: Path, tmp_path: Path) -> None:
    recipe, damage, code = DAMAGE[case]
    folder = tmp_path / recipe
    shutil.copytree(whole / recipe, folder)
    shutil.copytree(whole / "factors", tmp_path / "factors")
    path = folder / "manifest.json"
    before = json.loads(path.read_text())
    manifest = json.loads(path.read_text())
    damage(folder, manifest)
    if manifest != before:
        del manifest["digest"]
        path.write_text(json.dumps({**manifest, "digest": sha256(canonical(manifest))}))
    found = ""
    try:
        open_artifact(folder)
    except RefusedError as error:
        found = error.code
    assert (found, _refusal(folder)) == (code, code)

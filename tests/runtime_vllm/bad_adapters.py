"""Adapters that an engine must refuse, each with the words that its refusal must contain."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.runtime_vllm.adapters_by_method import Tenants
from tests.support.artifact_files import digest_of, manifest_of, tampered
from tests.support.bases import made_once
from tests.support.damage import Saved, renamed


@dataclass(frozen=True, slots=True, kw_only=True)
class Bad:
    """One adapter that must be refused."""

    made: Callable[[Tenants], Path]
    """Writes it once per session, and returns its folder."""
    words: tuple[str, ...]
    """Words of the refusal, in lower case."""


def _sibling(artifact: Path, name: str, change: Callable[[Path], None]) -> Path:
    """Copy an artifact within its store, and change the copy."""

    def write(folder: Path) -> None:
        shutil.copytree(artifact, folder)
        change(folder)

    return made_once(artifact.with_name(name), write)


def _with_manifest(folder: Path, change: Callable[[dict[str, object]], None]) -> None:
    manifest = manifest_of(folder)
    change(manifest)
    manifest["digest"] = digest_of(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest, ensure_ascii=False))


def of_a_base_with_other_weights(llama: Tenants) -> Path:
    """An artifact of a base of the same shapes with other weights."""

    def write(folder: Path) -> None:
        shutil.copytree(llama.base, folder)
        for file in folder.glob("*.safetensors"):
            with safe_open(file, "pt") as opened:
                metadata = opened.metadata()
            save_file({key: 1.5 * value for key, value in load_file(file).items()}, file, metadata=metadata)

    base = made_once(llama.root / "other-weights", write)
    other = Tenants(base=base, root=llama.root / "of-other-weights", tiny=llama.tiny)
    return other.artifact("dora")


def of_a_base_with_other_shapes(llama: Tenants) -> Path:
    """An artifact of another architecture."""
    from tests.support.bases import write_base

    base = made_once(llama.root / "qwen2", lambda folder: write_base("qwen2-heads-of-32", folder))
    return Tenants(base=base, root=llama.root / "of-qwen2", tiny="qwen2-heads-of-32").artifact("dora")


def with_a_site_that_the_model_lacks(llama: Tenants) -> Path:
    """An artifact that names layer 7 of a model of two layers; all hashes are correct."""

    def rename(folder: Path) -> None:
        def sites(manifest: dict[str, object]) -> None:
            text = json.dumps(manifest).replace(".layers.1.", ".layers.7.")
            manifest.update(json.loads(text))

        _with_manifest(folder, sites)
        file = folder / manifest_of(folder)["ranks"][0]["file"]
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        tensors = {key.replace(".layers.1.", ".layers.7."): value for key, value in load_file(file).items()}
        save_file(tensors, file, metadata=metadata)

    renamed_once = _sibling(llama.artifact("lora"), "seven-layers-unhashed", rename)
    hashed = renamed_once.with_name("seven-layers")
    return hashed if hashed.is_dir() else tampered(renamed_once, hashed.name, _nudged)


def _nudged(tensors: dict[str, torch.Tensor]) -> None:
    for key, value in tensors.items():
        tensors[key] = value * 1.01


def with_a_changed_byte(llama: Tenants) -> Path:
    """An artifact with one changed byte in a tensor."""

    def flip(folder: Path) -> None:
        file = folder / manifest_of(folder)["ranks"][0]["file"]
        content = bytearray(file.read_bytes())
        content[-100] ^= 1
        file.write_bytes(content)

    return _sibling(llama.artifact("dora"), "one-byte", flip)


def without_its_rank_file(llama: Tenants) -> Path:
    """An artifact whose tensor file was deleted."""
    return _sibling(
        llama.artifact("ia3"), "no-tensors", lambda folder: (folder / manifest_of(folder)["ranks"][0]["file"]).unlink()
    )


def without_its_shared_factors(llama: Tenants) -> Path:
    """An artifact that was copied out of its store."""
    place = llama.root / "alone" / "vera"
    return made_once(place, lambda folder: _copied(llama.artifact("vera"), folder))


def _copied(source: Path, folder: Path) -> None:
    shutil.copytree(source, folder)


def of_a_later_format(llama: Tenants) -> Path:
    """An artifact of an unknown major version."""
    return _sibling(
        llama.artifact("lora"),
        "later",
        lambda folder: _with_manifest(folder, lambda manifest: manifest.update(schema_version="9.0")),
    )


def with_a_broken_manifest(llama: Tenants) -> Path:
    """An artifact whose manifest was cut short."""

    def cut(folder: Path) -> None:
        text = (folder / "manifest.json").read_text()
        (folder / "manifest.json").write_text(text[: len(text) // 2])

    return _sibling(llama.artifact("lora"), "half-a-manifest", cut)


def nowhere(llama: Tenants) -> Path:
    """A path that does not exist."""
    return llama.root / "nowhere"


def an_empty_folder(llama: Tenants) -> Path:
    """A folder without files."""
    return made_once(llama.root / "empty", lambda folder: folder.mkdir())


def _renamed_folder(llama: Tenants, name: str, old: str, new: str) -> Path:
    def write(folder: Path) -> None:
        saved = Saved.read(llama.folder("lora"))
        renamed(old, new)(saved)
        saved.write(folder)

    return made_once(llama.root / "renamed" / name, write)


def a_folder_with_one_level_too_many(llama: Tenants) -> Path:
    """A PEFT LoRA folder for which engines silently serve the base; one change of the prefix corrects it."""
    return _renamed_folder(llama, "prefixed", r"model\.model\.layers", "model.inner.model.layers")


def a_folder_with_a_layer_that_the_model_lacks(llama: Tenants) -> Path:
    """A PEFT LoRA folder whose keys no change of the prefix corrects."""
    return _renamed_folder(llama, "seventh", r"\.layers\.1\.", ".layers.7.")


def a_folder_with_an_unknown_key(llama: Tenants) -> Path:
    """A PEFT LoRA folder with a key that no method defines."""
    return _renamed_folder(llama, "unknown", r"(layers\.0\.self_attn\.q_proj\.lora)_A", r"\1_X")


def _not_finite(tensors: dict[str, torch.Tensor]) -> None:
    key = next(key for key in tensors if key.endswith(".A") or "lora_A" in key)
    tensors[key] = tensors[key].clone()
    tensors[key].view(-1)[-1] = float("nan")


def with_nan(llama: Tenants) -> Path:
    """An artifact with a NaN; all hashes are correct."""
    artifact = llama.artifact("lora")
    made = artifact.with_name("not-finite")
    return made if made.is_dir() else tampered(artifact, made.name, _not_finite)


def a_folder_with_nan(llama: Tenants) -> Path:
    """A PEFT LoRA folder with a NaN."""

    def write(folder: Path) -> None:
        saved = Saved.read(llama.folder("lora"))
        _not_finite(saved.tensors)
        saved.write(folder)

    return made_once(llama.root / "not-finite" / "folder", write)


BAD: Mapping[str, Bad] = {
    "NaN": Bad(made=with_nan, words=("sc309", "nan")),
    "a folder with NaN": Bad(made=a_folder_with_nan, words=("sc309",)),
    "a base with other weights": Bad(made=of_a_base_with_other_weights, words=("base", "content")),
    "a base with other shapes": Bad(made=of_a_base_with_other_shapes, words=("base",)),
    "a site that the model lacks": Bad(made=with_a_site_that_the_model_lacks, words=("model.layers.7.",)),
    "a changed byte": Bad(made=with_a_changed_byte, words=("sha256",)),
    "no rank file": Bad(made=without_its_rank_file, words=("rank-00000-of-00001.",)),
    "no shared factors": Bad(made=without_its_shared_factors, words=("factor",)),
    "a later format": Bad(made=of_a_later_format, words=("9.0",)),
    "a broken manifest": Bad(made=with_a_broken_manifest, words=("manifest",)),
    "a rank over the engine's": Bad(
        made=lambda llama: llama.artifact("lora-rank-32"), words=("32", "16", "max_lora_rank")
    ),
    "a folder with a rank over the engine's": Bad(
        made=lambda llama: llama.folder("lora-rank-32"), words=("32", "16", "max_lora_rank")
    ),
    "an artifact for two ranks": Bad(made=lambda llama: llama.artifact("oft", tp=2), words=("tp 2", "--tp 1")),
    "a DoRA folder": Bad(made=lambda llama: llama.folder("dora"), words=("scute compile",)),
    "an IA3 folder": Bad(made=lambda llama: llama.folder("ia3"), words=("scute compile",)),
    "a VeRA folder": Bad(made=lambda llama: llama.folder("vera"), words=("scute compile",)),
    "an OFT folder": Bad(made=lambda llama: llama.folder("oft"), words=("scute compile",)),
    "a folder with a layer that the model lacks": Bad(
        made=a_folder_with_a_layer_that_the_model_lacks, words=("layers.7.",)
    ),
    "a folder with an unknown key": Bad(made=a_folder_with_an_unknown_key, words=("lora_x",)),
    "an empty folder": Bad(made=an_empty_folder, words=("empty",)),
    "nothing": Bad(made=nowhere, words=("nowhere",)),
}

"""The files of compiled artifacts: equal bytes each time, ranks that join, nothing partly written."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.support.artifact_files import digest_of, manifest_of, rank_file, rank_tensors, tampered
from tests.support.commands import compiled, scute

Pair = Callable[[str, str], tuple[Path, Path]]
BY_OUTPUT = ("ds", "b", "B", "e")
BY_INPUT = ("A", "dR")


def _bytes_under(folder: Path) -> dict[str, str]:
    return {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


@pytest.mark.parametrize("recipe", ["dora", "vera", "vera-regenerated", "oft"])
def test_two_compiles_write_equal_bytes(recipe: str, pair: Pair, tmp_path: Path) -> None:
    for store in ("first", "second"):
        compiled(*pair(recipe, "qwen2"), tmp_path / store, "--tp", 2)
    assert _bytes_under(tmp_path / "first") == _bytes_under(tmp_path / "second")


def test_hashes_sizes_and_digest_are_what_the_manifest_says(pair: Pair, tmp_path: Path) -> None:
    artifact = compiled(*pair("dora", "llama"), tmp_path / "store", "--tp", 2)
    manifest = manifest_of(artifact)
    for number, rank in enumerate(manifest["ranks"]):
        data = (artifact / rank["file"]).read_bytes()
        assert rank["bytes"] == len(data)
        assert rank["sha256"] == hashlib.sha256(data).hexdigest()
        assert rank["file"] == f"rank-{number:05d}-of-00002.{rank['sha256'][:16]}.safetensors"
    assert manifest["digest"] == digest_of(manifest)


def _joined(pieces: list[torch.Tensor], ranges: list[list[list[int]]], axis: int, whole: torch.Size) -> torch.Tensor:
    """Put the slices of all ranks at their ranges; copies of one range must be equal."""
    result = torch.full(whole, float("nan"), dtype=pieces[0].dtype)
    for piece, spans in zip(pieces, ranges, strict=True):
        places = torch.cat([torch.arange(start, stop) for start, stop in spans])
        assert piece.shape[axis] == len(places)
        present = result.index_select(axis, places)
        assert bool((present.isnan() | (present == piece)).all()), "two ranks hold different values of one range"
        result.index_copy_(axis, places, piece)
    return result


def _join(
    name: str, pieces: list[torch.Tensor], site: dict[str, list[list[list[int]]]], whole: torch.Size
) -> torch.Tensor:
    slot = name.rsplit(".", 1)[1]
    if slot == "dR" and len(whole) == 3:
        if whole[0] == 1:
            assert all(torch.equal(left, right) for left, right in pairwise(pieces))
            return pieces[0]
        blocks = [[[start // whole[1], stop // whole[1]] for start, stop in spans] for spans in site["inputs"]]
        return _joined(pieces, blocks, 0, whole)
    if slot in BY_OUTPUT or slot in BY_INPUT:
        return _joined(pieces, site["outputs" if slot in BY_OUTPUT else "inputs"], len(whole) - 1, whole)
    assert all(torch.equal(left, right) for left, right in pairwise(pieces))
    return pieces[0]


@pytest.mark.parametrize(
    ("base", "recipe", "tp"),
    [
        ("llama", "dora", 2),
        ("llama", "dora", 8),
        ("llama-nine", "dora", 3),
        ("llama", "oft", 4),
        ("llama", "oft-shared", 2),
        ("llama", "vera", 4),
        ("llama", "ia3-inputs", 4),
        ("qwen2", "lora-base-bias", 4),
        ("qwen2", "dora", 2),
        ("phi3", "dora", 2),
        ("phi3", "ia3-inputs", 4),
        ("gpt2", "dora", 2),
        ("gpt_neox", "dora", 2),
    ],
)
def test_ranks_join_to_the_artifact_of_one_rank(base: str, recipe: str, tp: int, pair: Pair, tmp_path: Path) -> None:
    """Equal bits: DoRA's norms are summed in one order, whatever the number of ranks."""
    adapter, where = pair(recipe, base)
    (whole,) = rank_tensors(compiled(adapter, where, tmp_path / "one"))
    artifact = compiled(adapter, where, tmp_path / "many", "--tp", tp)
    ranks = rank_tensors(artifact)
    sites = {site["name"]: site for site in manifest_of(artifact)["sites"]}
    assert len(ranks) == tp
    for name, tensor in whole.items():
        site = sites[next(site for site in sites if name.startswith(f"{site}."))]
        joined = _join(name, [rank[name] for rank in ranks], site, tensor.shape)
        assert torch.equal(joined, tensor), name
    assert all(rank.keys() == whole.keys() for rank in ranks)


@pytest.mark.parametrize("spoil", ["rank file", "manifest", "another version", "a path outside"])
def test_readers_refuse_files_that_differ_from_the_manifest(spoil: str, pair: Pair, tmp_path: Path) -> None:
    adapter, base = pair("dora", "llama")
    artifact = compiled(adapter, base, tmp_path / "store")
    manifest = artifact / "manifest.json"
    file, text = rank_file(artifact), manifest.read_text()
    if spoil == "rank file":
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(bytes(data))
    elif spoil == "manifest":
        manifest.write_text(text.replace("q_proj", "k_proj", 1))
    elif spoil == "another version":
        manifest.write_text(text.replace('"schema_version": "2.0"', '"schema_version": "3.0"'))
    else:
        file.rename(artifact.parent / "outside.safetensors")
        manifest.write_text(text.replace(file.name, "../outside.safetensors"))
    ran = scute("verify", artifact, "--adapter", adapter, "--base", base)
    assert ran.code == 1
    assert "SC6" in ran.err


def test_an_artifact_with_right_hashes_but_wrong_shapes_is_refused(pair: Pair, tmp_path: Path) -> None:
    adapter, base = pair("dora", "llama")
    artifact = compiled(adapter, base, tmp_path / "store")

    def shorten(tensors: dict[str, torch.Tensor]) -> None:
        key = next(key for key in tensors if key.endswith(".ds"))
        tensors[key] = tensors[key][:-1].contiguous()

    copy = tampered(artifact, "short", shorten)
    ran = scute("verify", copy, "--adapter", adapter, "--base", base)
    assert ran.code == 1
    assert "SC605" in ran.err


def test_a_killed_compile_leaves_nothing_that_a_reader_accepts(pair: Pair, tmp_path: Path) -> None:
    store, base = tmp_path / "store", pair("lora", "llama")[1]
    adapters = [pair(recipe, "llama")[0] for recipe in ("dora", "vera", "oft", "lora")]
    command = [
        sys.executable,
        "-m",
        "scute_compile",
        "compile",
        *map(str, adapters),
        "--base",
        str(base),
        "-o",
        str(store),
    ]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while running.poll() is None and not any(store.rglob("*.safetensors*")) and time.monotonic() < deadline:
        time.sleep(0.0005)
    running.kill()
    running.wait()
    for manifest in store.rglob("manifest.json"):
        complete = scute("inspect", manifest.parent, "--json")
        named = manifest.parent.name in {adapter.name for adapter in adapters}
        assert (complete.code == 0) == named, "a folder with a manifest is whole; any other is refused"
    again = compiled(adapters[0], base, store)
    assert _bytes_under(again) == _bytes_under(compiled(adapters[0], base, tmp_path / "clean"))

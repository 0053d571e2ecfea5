"""Fully sharded artifacts equal PEFT with one file per rank, and no value is stored twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.artifact_files import Tensors, manifest_of, rank_file, rank_tensors, tampered
from tests.support.bases import BASES
from tests.support.commands import compiled, scute, verified

FLOAT32 = 5e-5
"""Two rounded matrix products in place of one, through two layers: about 100 units in the last place of the effect."""
LOST = 1e-3
"""A slot that is dropped or taken from another rank changes the output by far more than rounding."""
METHODS = ("lora", "dora", "ia3", "vera", "oft", "adalora")
UNEVEN = [
    ("qwen2", 4, "rslora"),
    ("qwen2", 4, "lora-patterns"),
    ("qwen2", 4, "dora-rank-1"),
    ("llama-nine", 3, "lora-patterns"),
    ("llama-nine", 3, "dora-rank-1"),
    ("llama-nine", 3, "rsdora-patterns"),
]
RANKS = (
    ("llama", 2),
    ("llama", 4),
    ("llama-nine", 3),
    ("qwen2", 2),
    ("qwen2", 4),
    ("phi3", 4),
    ("gpt2", 2),
    ("gpt2", 4),
)
FULL = ("--lora-sharding", "full", "--dtype", "float32")

Pair = Callable[[str, str], tuple[Path, Path]]


def _assert_equals_peft(artifact: Path, adapter: Path, base: Path) -> None:
    figures = verified(artifact, adapter, base)
    assert figures["comparable"]
    assert figures["mean_abs_adapter_effect"] >= 0.1
    assert figures["relative_error"] <= FLOAT32


@pytest.mark.parametrize(
    ("base", "tp", "recipe"),
    [
        (*where, recipe)
        for where in RANKS
        for recipe in METHODS
        if not (BASES[where[0]].sites.conv1d and recipe == "oft")
    ],
)
def test_every_method_is_exact(base: str, tp: int, recipe: str, pair: Pair, tmp_path: Path) -> None:
    adapter, where = pair(recipe, base)
    artifact = compiled(adapter, where, tmp_path / "store", "--tp", tp, *FULL)
    _assert_equals_peft(artifact, adapter, where)


@pytest.mark.parametrize(("base", "tp", "recipe"), UNEVEN)
def test_ranks_that_do_not_divide_a_term_are_exact(base: str, tp: int, recipe: str, pair: Pair, tmp_path: Path) -> None:
    """Terms of rank 1, 4, 7 and 9: some ranks hold one row more than others, or none."""
    adapter, where = pair(recipe, base)
    artifact = compiled(adapter, where, tmp_path / "store", "--tp", tp, *FULL)
    terms = [term for site in manifest_of(artifact)["sites"] for term in site["terms"]]
    assert any(len({stop - start for start, stop in term["rows"]}) > 1 for term in terms if term.get("rows"))
    _assert_equals_peft(artifact, adapter, where)


@pytest.mark.parametrize("recipe", ["lora-base-bias", "vera-regenerated"])
def test_biases_and_regenerated_projections_are_exact(recipe: str, pair: Pair, tmp_path: Path) -> None:
    adapter, where = pair(recipe, "qwen2")
    _assert_equals_peft(compiled(adapter, where, tmp_path / "store", "--tp", 4, *FULL), adapter, where)


def _whole(slot: str, number: int, site: Mapping[str, Any], pieces: list[torch.Tensor]) -> torch.Tensor:
    """Join the ranks' pieces of a slot along the axis that the layout cuts."""
    term = site["terms"][number]
    if site["split"] == "column" and slot in "Ad":
        assert [len(piece) for piece in pieces] == [stop - start for start, stop in term["rows"]]
        return torch.cat(pieces)
    if site["split"] == "row" and slot in "Be":
        assert [piece.shape[-1] for piece in pieces] == [stop - start for start, stop in term["columns"]]
        return torch.cat(pieces, -1)
    if slot == "d":
        assert all(torch.equal(left, right) for left, right in pairwise(pieces))
        return pieces[0]
    ranges = site["outputs" if slot in "Be" else "inputs"]
    order = torch.cat([torch.arange(start, stop) for held in ranges for start, stop in held])
    assert sorted(order.tolist()) == list(range(len(order))), "two ranks hold one entry"
    return torch.cat(pieces, -1)[..., order.argsort()]


@pytest.mark.parametrize(
    ("base", "recipe", "tp"),
    [
        ("llama", "lora-patterns", 2),
        ("llama-nine", "dora", 3),
        ("phi3", "rslora", 2),
        ("gpt2", "dora-rank-1", 4),
        ("llama", "vera", 2),
    ],
)
def test_ranks_join_to_one_rank_without_overlaps(base: str, recipe: str, tp: int, pair: Pair, tmp_path: Path) -> None:
    """Bytes of A, B, e, and of d on column sites, add up to those of one rank."""
    adapter, where = pair(recipe, base)
    (whole,) = rank_tensors(compiled(adapter, where, tmp_path / "whole", *FULL[2:]))
    artifact = compiled(adapter, where, tmp_path / "many", "--tp", tp, *FULL)
    ranks, sites = rank_tensors(artifact), {site["name"]: site for site in manifest_of(artifact)["sites"]}
    assert all(rank.keys() == whole.keys() for rank in ranks)
    joined = 0
    for name, tensor in whole.items():
        if ".terms." not in name:
            continue
        site, rest = name.split(".terms.")
        number, slot = rest.split(".")
        pieces = [rank[name] for rank in ranks]
        assert torch.equal(_whole(slot, int(number), sites[site], pieces), tensor), name
        if not (slot == "d" and sites[site]["split"] == "row"):
            assert sum(piece.numel() for piece in pieces) == tensor.numel(), name
        joined += 1
    assert joined > 0


def test_only_copies_of_key_and_value_heads_are_stored_twice(pair: Pair, tmp_path: Path) -> None:
    """Four ranks share two key-value heads, so B's columns for them are stored twice, as the base's weights are."""
    adapter, where = pair("lora", "qwen2")
    (whole,) = rank_tensors(compiled(adapter, where, tmp_path / "whole", *FULL[2:]))
    ranks = rank_tensors(compiled(adapter, where, tmp_path / "many", "--tp", 4, *FULL))
    for name, tensor in whole.items():
        copied = name.endswith(".B") and ("k_proj" in name or "v_proj" in name)
        assert sum(rank[name].numel() for rank in ranks) == tensor.numel() * (2 if copied else 1), name


def _swapped(first: Tensors, second: Tensors, keys: list[str]) -> None:
    for key in keys:
        first[key], second[key] = second[key].clone(), first[key].clone()


CASES = [
    ("lora", "q_proj", "A"),
    ("lora", "q_proj", "B"),
    ("lora", "down_proj", "A"),
    ("lora", "down_proj", "B"),
    ("vera", "v_proj", "d"),
    ("vera", "v_proj", "e"),
    ("vera", "down_proj", "d"),
    ("vera", "down_proj", "e"),
]


@pytest.mark.parametrize(
    ("recipe", "site", "slot", "fault"),
    [
        (*case, fault)
        for case in CASES
        for fault in ("dropped", "of another rank")
        if (*case[1:], fault) != ("down_proj", "d", "of another rank")  # every rank holds all of it
    ],
)
def test_every_part_of_every_rank_is_used(
    recipe: str, site: str, slot: str, fault: str, pair: Pair, tmp_path: Path
) -> None:
    """The output changes when a rank's part is zero or another rank's."""
    adapter, base = pair(recipe, "llama")
    artifact = compiled(adapter, base, tmp_path / "store", "--tp", 2, *FULL)
    first, second = rank_tensors(artifact)
    keys = [key for key in first if f"{site}.terms." in key and key.endswith(f".{slot}")]
    assert keys
    if fault == "dropped":
        second = {key: torch.zeros_like(value) if key in keys else value for key, value in second.items()}
    else:
        _swapped(first, second, keys)
    parts = iter((first, second))
    copy = tampered(artifact, "copy", lambda tensors: tensors.update(next(parts)), every_rank=False)
    figures = verified(copy, adapter, base)
    assert figures["relative_error"] > LOST


def test_both_layouts_are_equal_on_one_rank(pair: Pair, tmp_path: Path) -> None:
    adapter, base = pair("lora", "llama")
    plain = compiled(adapter, base, tmp_path / "plain")
    full = compiled(adapter, base, tmp_path / "full", "--lora-sharding", "full")
    assert rank_file(plain).read_bytes() == rank_file(full).read_bytes()


def test_the_manifest_states_how_terms_are_cut(pair: Pair, tmp_path: Path) -> None:
    adapter, base = pair("lora", "llama")
    plain = manifest_of(compiled(adapter, base, tmp_path / "plain", "--tp", 2))
    full = manifest_of(compiled(adapter, base, tmp_path / "full", "--tp", 2, "--lora-sharding", "full"))
    assert (plain["lora_sharding"], full["lora_sharding"]) == ("default", "full")
    cuts = [
        {(term["rows"] is None, term["columns"] is None) for site in manifest["sites"] for term in site["terms"]}
        for manifest in (plain, full)
    ]
    assert cuts == [{(True, True)}, {(False, True), (True, False)}]


def test_commands_plan_for_the_requested_layout(pair: Pair, tmp_path: Path) -> None:
    adapter, base = pair("vera", "llama")
    asked = ("--base", base, "--tp", 4, "--json")
    plain, full = (scute("inspect", adapter, *asked, *more).answer for more in ((), ("--lora-sharding", "full")))
    assert (plain["lora_sharding"], full["lora_sharding"]) == ("default", "full")
    held = [sum(answer["bytes_per_rank"]["float32"]) for answer in (plain, full)]
    assert held[1] < held[0]
    artifact = compiled(adapter, base, tmp_path / "store", "--tp", 4, *FULL)
    assert scute("inspect", artifact, "--json").answer["bytes_per_rank"] == {
        "float32": full["bytes_per_rank"]["float32"]
    }
    assert "fully sharded" in scute("inspect", artifact).out
    moved = [
        {
            note["slot"]: dict(note["candidates"])
            for note in scute("explain-folds", adapter, *asked, *more).answer["notes"]
        }
        for more in ((), ("--lora-sharding", "full"))
    ]
    assert moved[1]["d"]["in the shrink"] < moved[0]["d"]["in the shrink"]
    assert scute("check", adapter, *asked, "--lora-sharding", "full").code == 0
    assert scute("check", adapter, *asked, "--lora-sharding", "half").code == 2

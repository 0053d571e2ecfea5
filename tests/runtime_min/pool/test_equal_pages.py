"""Ranks whose parts of an adapter differ in size make the same eviction decisions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from scute_compile.diagnostics import ScuteError
from scute_compile.ir.target import LoraSharding
from scute_compile.runtime_min.base_model import load_model
from scute_compile.runtime_min.batching.continuous_batch import ContinuousBatch
from scute_compile.runtime_min.model.served_model import ServedModel
from scute_compile.runtime_min.pool.directory import PAGE_BYTES, DirectoryEntry
from scute_compile.runtime_min.pool.equal_pages import with_equal_pages
from scute_compile.runtime_min.pool.packed_adapter import (
    PairWindow,
    SharedTerm,
    SiteContent,
    pack_adapter,
    pack_factor,
    window_of,
)
from scute_compile.runtime_min.ranks.group import RankGroup
from tests.support.adapters import lora, write_config
from tests.support.bases import BASES
from tests.support.commands import compiled
from tests.support.rank_processes import Answer, on_ranks
from tests.support.served import ids_of

SHIFTED = {"r": 1, "lora_bias": True, "target_modules": ["o_proj", "down_proj"]}
"""Only rank 0 adds the shift of row-parallel layers: here it needs two pages, and rank 1 one page."""


def steps(base: Path, store: Path, ids: torch.Tensor, layout: str, pages: int) -> Answer:
    """Serve two adapters in turn from a pool that has no room for both on rank 0."""
    served = ServedModel.for_rank(
        load_model(base),
        lora_sharding=LoraSharding(layout),
        max_adapters=4,
        pool_bytes=pages * PAGE_BYTES,
        shared_bytes="8KiB",
        max_num_batched_tokens=64,
    )
    for name in ("x", "y"):
        served.load_adapter(store / name, adapter_name=name)
    with pytest.raises(ScuteError, match="SC703") as refused:
        ContinuousBatch(served, cache_tokens=512)
    assert "2 ranks share" in str(refused.value)
    found: Answer = {}
    for number, name in enumerate(("y", "x", "y")):
        found[f"{number}"] = served(ids, adapter_names=[name, None]).logits
    try:
        served(ids, adapter_names=["x", "y"])
    except ScuteError as error:
        found["refused"] = torch.tensor(int(error.diagnostics[0].code.name[2:]))
    found["3"] = served(ids, adapter_names=["y", None]).logits
    found["pages"] = torch.tensor([served.pool.packed_adapters[name].pages for name in ("x", "y")])
    return found


@pytest.mark.parametrize("layout", ["default", "full"])
def test_all_ranks_refuse_a_batch_that_does_not_fit_on_one(
    layout: str, base_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    base = base_folder("llama")
    for seed, name in enumerate(("x", "y")):
        write_config(lora(**SHIFTED)(BASES["llama"].sites), "llama", base, tmp_path / name, seed=seed)
        options = ("--tp", 2, "--dtype", "float32", "--lora-sharding", layout)
        compiled(tmp_path / name, base, tmp_path / "store", *options)
    ranks = on_ranks(2, steps, base, tmp_path / "store", ids_of(2, 4), layout, 3)
    for rank in ranks:
        assert rank["refused"] == 804
        assert torch.equal(rank["0"], rank["2"])
        assert torch.equal(rank["0"], rank["3"])
        assert not torch.equal(rank["0"], rank["1"])
        assert torch.equal(rank["0"], ranks[0]["0"])
        assert rank["pages"].tolist() == [2, 2]


def small(base: Path, store: Path, ids: torch.Tensor) -> Answer:
    """Load an adapter for which only rank 0 has room, then serve the base on both ranks."""
    ranks = RankGroup()
    served = ServedModel.for_rank(
        load_model(base),
        max_adapters=4,
        pool_bytes="2KiB" if ranks.rank else "128KiB",
        shared_bytes="8KiB",
        max_num_batched_tokens=64,
    )
    with pytest.raises(ScuteError) as refused:
        served.load_adapter(store / "x", adapter_name="x")
    with pytest.raises(ScuteError, match="SC703") as timed:
        served.generate(ids, adapter_names=[None, None], max_new_tokens=1, max_time=1.0)
    assert "max_time" in str(timed.value)
    assert served.adapters == ()
    out = served(ids, adapter_names=[None, None]).logits
    return {"code": torch.tensor(int(refused.value.diagnostics[0].code.name[2:])), "out": out}


def test_no_rank_loads_an_adapter_larger_than_the_pool_of_one(
    base_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    base = base_folder("llama")
    write_config(lora(**SHIFTED)(BASES["llama"].sites), "llama", base, tmp_path / "x")
    compiled(tmp_path / "x", base, tmp_path / "store", "--tp", 2, "--dtype", "float32")
    first, second = on_ranks(2, small, base, tmp_path / "store", ids_of(2, 4))
    assert [int(rank["code"]) for rank in (first, second)] == [815, 805]
    assert torch.equal(first["out"], second["out"])


def uneven() -> Answer:
    """Pad an adapter with two shared factors, one of which is larger on rank 0."""
    ranks = RankGroup()
    a, b = (
        pack_factor(name, torch.full((4, width), 1.0 + ranks.rank), torch.float32)
        for name, width in (("a", 64 if ranks.rank else 1200), ("b", 64))
    )
    pair = PairWindow(a=window_of(a, torch.float32), b=window_of(b, torch.float32))
    term = SharedTerm(pair=pair, d=torch.ones(4), e=torch.ones(64))
    site = DirectoryEntry(name="x", in_features=64, out_features=64, gemm="x")
    contents = {"x": SiteContent(in_features=64, out_features=64, shared=term)}
    factors = {"a": a, "b": b}
    packed = with_equal_pages(pack_adapter("one", [site], contents, torch.float32), ranks, torch.device("cpu"), factors)
    larger = packed.pairs[0].a.factor
    assert packed.pairs[0].key == pair.key
    assert factors == {"a": larger, "b": b}
    assert packed.pairs[0].b.factor is b
    assert torch.equal(larger.buffer[: len(a.buffer)], a.buffer)
    assert not larger.buffer[len(a.buffer) :].any()
    again = with_equal_pages(packed, ranks, torch.device("cpu"), factors)
    assert again.pairs[0].a.factor is larger, "factors with equal pages stay"
    return {"pages": torch.tensor([larger.pages, b.pages, a.pages])}


def test_shared_factors_get_equal_pages_on_every_rank() -> None:
    first, second = (rank["pages"].tolist() for rank in on_ranks(2, uneven))
    assert first == [10, 1, 10]
    assert second == [10, 1, 1]

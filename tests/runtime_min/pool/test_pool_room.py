"""Who makes room for an adapter: nobody whom the same call names, and all whose pages and pairs are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch

from scute_compile.runtime_min.pool.packed_adapter import (
    PackedAdapter,
    PackedFactor,
    PairWindow,
    SharedTerm,
    SiteContent,
    pack_adapter,
    pack_factor,
    window_of,
)
from scute_compile.runtime_min.pool.resident_pool import ResidentPool
from tests.runtime_min.pool.small_adapters import (
    DTYPE,
    PAIR_RANK,
    SITES,
    assert_reads_back,
    packed,
    pool_of,
    shared_factors,
)

Call = Callable[[ResidentPool, Iterable[str]], object]


@pytest.mark.parametrize("call", [ResidentPool.ensure, ResidentPool.prefetch])
def test_who_is_named_later_in_a_call_stays_where_it_is(call: Call) -> None:
    pool = pool_of(200, 3)
    for number in range(3):
        pool.load(f"t{number}", packed("ia3", number))
    for number in range(3, 5):
        pool.add(f"t{number}", packed("ia3", number))
    place = pool.resident["t0"]
    call(pool, ["t3", "t4", "t0"])
    assert pool.resident["t0"] == place
    assert set(pool.resident) == {"t0", "t3", "t4"}


def test_the_only_row_for_a_pair_is_freed_by_its_last_tenant() -> None:
    pool = ResidentPool(SITES, num_pages=200, max_adapters=8, dtype=DTYPE, device=torch.device("cpu"), pairs=1)
    for name, seed in (("one", 1), ("two", 3), ("other", 2)):
        pool.add(name, packed("vera", seed))
    pool.add("plain", packed("ia3", 4))
    pool.ensure(["one", "two", "plain"])
    slot = pool.ensure(["other"])["other"]
    assert set(pool.resident) == {"plain", "other"}
    assert_reads_back(pool, slot, "vera", 2)


def test_a_factor_of_another_pair_that_is_needed_counts_as_no_room() -> None:
    a, b = shared_factors(0)
    wide = pack_factor("wide", torch.ones(PAIR_RANK, 360, dtype=DTYPE), DTYPE)
    assert b.pages < wide.pages <= a.pages + b.pages
    pool = pool_of(200, 8, shared_pages=2 * (a.pages + b.pages))
    for seed in (0, 1):  # all shared pages are taken now
        pool.load(f"t{seed}", packed("vera", seed))
    pool.add("mixed", _of_pair(a, wide))
    pool.ensure(["mixed"])
    assert set(pool.resident) == {"mixed"}
    assert set(pool.stats().factors) == {a.key, wide.key}


def _of_pair(a: PackedFactor, b: PackedFactor) -> PackedAdapter:
    term = SharedTerm(pair=PairWindow(a=window_of(a, DTYPE), b=window_of(b, DTYPE)))
    contents = {
        site.name: SiteContent(in_features=site.in_features, out_features=site.out_features, shared=term)
        for site in SITES
    }
    return pack_adapter("mixed", SITES, contents, DTYPE)

"""The choice of adapters to evict: none that the call names, and as many as pages and pairs require."""

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
    load,
    packed,
    pool_of,
    shared_factors,
)

Call = Callable[[ResidentPool, Iterable[str]], object]


@pytest.mark.parametrize("call", [ResidentPool.ensure, ResidentPool.prefetch])
def test_adapters_that_a_call_names_later_are_not_evicted(call: Call) -> None:
    pool = pool_of(200, 3)
    for number in range(3):
        load(pool, f"t{number}", packed("ia3", number))
    for number in range(3, 5):
        pool.add(f"t{number}", packed("ia3", number))
    index = pool.resident["t0"]
    call(pool, ["t3", "t4", "t0"])
    assert pool.resident["t0"] == index
    assert set(pool.resident) == {"t0", "t3", "t4"}


def test_evicting_the_last_user_of_a_pair_frees_its_index() -> None:
    pool = ResidentPool(SITES, num_pages=200, max_adapters=8, dtype=DTYPE, device=torch.device("cpu"), pairs=1)
    for name, seed in (("one", 1), ("two", 3), ("other", 2)):
        pool.add(name, packed("vera", seed))
    pool.add("plain", packed("ia3", 4))
    pool.ensure(["one", "two", "plain"])
    index = pool.ensure(["other"])["other"]
    assert set(pool.resident) == {"plain", "other"}
    assert_reads_back(pool, index, "vera", 2)


def test_evicting_users_of_a_needed_factor_of_another_pair_frees_no_room_for_it() -> None:
    a, b = shared_factors(0)
    wide = pack_factor("wide", torch.ones(PAIR_RANK, 360, dtype=DTYPE), DTYPE)
    assert b.pages < wide.pages <= a.pages + b.pages
    pool = pool_of(200, 8, shared_pages=2 * (a.pages + b.pages))
    for seed in (0, 1):  # takes all shared pages
        load(pool, f"t{seed}", packed("vera", seed))
    pool.add("mixed", _with_pair(a, wide))
    pool.ensure(["mixed"])
    assert set(pool.resident) == {"mixed"}
    assert set(pool.stats().factors) == {a.key, wide.key}


def _with_pair(a: PackedFactor, b: PackedFactor) -> PackedAdapter:
    term = SharedTerm(pair=PairWindow(a=window_of(a, DTYPE), b=window_of(b, DTYPE)))
    contents = {
        site.name: SiteContent(in_features=site.in_features, out_features=site.out_features, shared=term)
        for site in SITES
    }
    return pack_adapter("mixed", SITES, contents, DTYPE)

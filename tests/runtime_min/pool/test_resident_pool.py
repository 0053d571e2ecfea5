"""The resident pool: what is in reads back bit for bit, what is held stays, and refusals leave everything as it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from timeit import repeat

import pytest
import torch

from scute_compile.diagnostics import ScuteError
from scute_compile.runtime_min.pool.directory import PAGE_BYTES, Field, granules
from scute_compile.runtime_min.pool.packed_adapter import (
    PackedAdapter,
    PairWindow,
    SharedTerm,
    SiteContent,
    pack_adapter,
    pack_factor,
    window_of,
)
from scute_compile.runtime_min.pool.pages import PagePool
from tests.runtime_min.pool.small_adapters import (
    DTYPE,
    METHODS,
    SITES,
    assert_reads_back,
    packed,
    pool_of,
    shared_factors,
)


def code_of(error: pytest.ExceptionInfo[ScuteError]) -> str:
    """The code of the first finding."""
    return error.value.diagnostics[0].code.name


@pytest.mark.parametrize("method", METHODS)
def test_methods_of_odd_shapes_read_back(method: str) -> None:
    pool = pool_of(200, 2)
    for seed in (5, 6):
        assert_reads_back(pool, pool.load(f"{method}{seed}", packed(method, seed)), method, seed)


def test_a_shared_pair_is_stored_once_and_goes_with_its_last_tenant() -> None:
    pool = pool_of(200, 4)
    pool.load("first", packed("vera", 1))
    one = pool.stats()
    pool.load("second", packed("vera", 3))
    two = pool.stats()
    assert set(one.factors) == set(two.factors) == {"a1", "b1"}
    assert two.pages.in_use - one.pages.in_use == packed("vera", 3).pages
    assert {facts.pair for facts in pool.facts.values()} == {0}
    pool.evict("first")
    assert_reads_back(pool, pool.resident["second"], "vera", 3)
    pool.evict("second")
    assert pool.stats().factors == {}
    assert pool.stats().pages.in_use == 0
    assert not any(any(row) for row in pool.pairs)


def test_a_shared_pair_stays_while_its_tenants_take_turns() -> None:
    pool = pool_of(200, 1)
    pool.load("first", packed("vera", 1))
    before = pool.pairs
    pool.memory.shared.fill_(7.0)
    pool.load("second", packed("vera", 3))
    assert tuple(pool.resident) == ("second",)
    assert pool.pairs == before
    assert bool((pool.memory.shared == 7.0).all()), "it was copied in again"


def test_a_pair_that_is_needed_counts_as_no_room() -> None:
    """The pair's pages don't become free when its last tenant makes way for another tenant of it."""
    one, two, other = packed("vera", 1), packed("vera", 3), packed("vera", 2)
    pool = pool_of(200, 3, shared_pages=sum(factor.pages for factor in shared_factors(1)))
    pool.load("one", one)
    pool.add("two", two)
    pool.add("other", other)
    with pool.in_use(["one"]):
        assert pool.prefetch(["two", "other"]) == ("two",)
        with pytest.raises(ScuteError, match="bytes of shared factors") as refused:
            pool.ensure(["two", "other"])
    assert code_of(refused) == "SC804"
    assert pool.prefetch(["other"]) == ("other",)
    assert tuple(pool.resident) == ("other",)


def test_shared_factors_close_their_gaps() -> None:
    """Factors lie in one piece each: when gaps are too short, those that stay are copied in again from the host."""
    packed = {rank: _of_rank(rank) for rank in (8, 16, 24)}
    sizes = {rank: sum(factor.pages for factor in made.factors) for rank, made in packed.items()}
    pool = pool_of(50, 3, shared_pages=sizes[16] + sizes[24])
    pool.load("8", packed[8])
    pool.load("16", packed[16])
    pool.evict("8")
    slot = pool.load("24", packed[24])
    assert pool.stats().shared_moved == sizes[16]
    for name, rank in (("16", 16), ("24", 24)):
        for field, factor, width in zip((Field.A_OFFSET, Field.B_OFFSET), packed[rank].factors, (40, 72), strict=True):
            rows = factor.buffer.view(DTYPE)[: rank * granules(factor.features, DTYPE) * 8].view(rank, -1)
            assert torch.equal(pool.read_back(pool.resident[name], "q", field, (rank, width)), rows[:, :width])
    assert slot == pool.resident["24"]


def _of_rank(rank: int) -> PackedAdapter:
    """One site on a pair of this rank that no other adapter uses."""
    generator = torch.Generator().manual_seed(rank)
    a, b = (
        window_of(pack_factor(f"{name}-{rank}", torch.randn(rank, width, generator=generator).to(DTYPE), DTYPE), DTYPE)
        for name, width in (("a", 300), ("b", 72))
    )
    site = SITES[0]
    content = SiteContent(
        in_features=site.in_features, out_features=site.out_features, shared=SharedTerm(pair=PairWindow(a=a, b=b))
    )
    return pack_adapter(f"rank {rank}", SITES, {site.name: content}, DTYPE)


def test_the_least_recently_used_goes_first() -> None:
    pool = pool_of(200, 3)
    for seed in (1, 2, 3):
        pool.load(f"t{seed}", packed("ia3", seed))
    with pool.in_use(["t1"]):
        pass
    pool.load("t4", packed("ia3", 4))
    assert list(pool.resident) == ["t3", "t1", "t4"]
    pool.ensure(["t3", "t2"])
    assert list(pool.resident) == ["t4", "t3", "t2"]


def _seconds(asked: Callable[[], object]) -> float:
    return min(repeat(asked, number=20, repeat=10))


def test_counting_pages_costs_no_more_in_a_large_pool() -> None:
    """An engine asks for its adapters at every step; a pool of some GB has millions of pages."""
    large, small = (PagePool(pages, DTYPE, torch.device("meta")) for pages in (2_000_000, 2_000))
    assert _seconds(lambda: large.counts) < 10 * _seconds(lambda: small.counts)


def test_asking_for_what_is_resident_costs_less_than_a_check() -> None:
    pool = pool_of(200, 3)
    pool.load("t1", packed("ia3", 1))
    assert 2 * _seconds(lambda: pool.ensure(["t1"])) < _seconds(lambda: pool.fits(["t1"]))


def test_what_a_step_uses_or_a_pin_holds_is_never_evicted() -> None:
    pool = pool_of(200, 3)
    for seed in (1, 2, 3):
        pool.load(f"t{seed}", packed("dora", seed))
    pool.pin("t1")
    with pool.in_use(["t2"]) as slots:
        pool.load("t4", packed("dora", 4))
        assert "t3" not in pool.resident
        with pytest.raises(ScuteError) as crowded:
            pool.ensure(["t3", "t4"])
        assert code_of(crowded) == "SC804"
        assert pool.prefetch(["t3"]) == ("t3",)
        for name in ("t1", "t2"):
            with pytest.raises(ScuteError) as held:
                pool.evict(name)
            assert code_of(held) == "SC806"
        assert_reads_back(pool, slots["t2"], "dora", 2)
    assert_reads_back(pool, pool.resident["t1"], "dora", 1)


def test_running_steps_keep_reading_what_was_replaced() -> None:
    pool = pool_of(400, 2)
    pool.load("tenant", packed("lora", 1))
    lease = pool.acquire(["tenant"])
    pool.replace("tenant", packed("oft", 2))
    assert_reads_back(pool, lease.indices["tenant"], "lora", 1)
    assert_reads_back(pool, pool.ensure(["tenant"])["tenant"], "oft", 2)
    pool.release(lease)
    assert pool.stats().slots_in_use == 1
    assert pool.stats().adapters == {"tenant": packed("oft", 2).pages * PAGE_BYTES}


def test_the_only_slot_is_enough_to_replace_an_idle_adapter() -> None:
    pool = pool_of(200, 1)
    pool.load("tenant", packed("lora", 1))
    pool.pin("tenant")
    pool.replace("tenant", packed("vera", 2))
    assert_reads_back(pool, pool.resident["tenant"], "vera", 2)
    with pytest.raises(ScuteError, match="pinned"):
        pool.evict("tenant")


def test_an_adapter_that_a_step_reads_is_not_replaced_where_no_room_is() -> None:
    pool = pool_of(200, 1)
    pool.load("tenant", packed("lora", 1))
    with pool.in_use(["tenant"]) as slots:
        with pytest.raises(ScuteError) as refused:
            pool.replace("tenant", packed("ia3", 2))
        assert code_of(refused) == "SC804"
        assert_reads_back(pool, slots["tenant"], "lora", 1)
    assert_reads_back(pool, pool.ensure(["tenant"])["tenant"], "lora", 1)


def test_unknown_adapters_are_named_together() -> None:
    pool = pool_of(100, 2)
    pool.add("here", packed("ia3", 1))
    with pytest.raises(ScuteError) as refused:
        pool.acquire(["one", "here", "two"])
    assert [(item.code.name, item.where) for item in refused.value.diagnostics] == [("SC802", "one"), ("SC802", "two")]
    assert not pool.resident


def test_more_distinct_adapters_than_slots_are_refused_before_anything_moves() -> None:
    pool = pool_of(400, 2)
    for seed in (1, 2, 3):
        pool.add(f"t{seed}", packed("lora", seed))
    pool.ensure(["t1"])
    with pytest.raises(ScuteError, match="3 slots") as refused:
        pool.ensure(["t1", "t2", "t3", "t1"])
    assert code_of(refused) == "SC804"
    assert list(pool.resident) == ["t1"]


def test_what_fits_together_is_told_without_moving_anything() -> None:
    pool = pool_of(200, 2)
    for number in range(3):
        pool.add(f"n{number}", packed("lora", number))
    pool.ensure(["n0"])
    assert pool.fits(["n1", "n2"])
    assert not pool.fits(["n0", "n1", "n2"])
    pool.pin("n0")
    assert pool.fits(["n1", "n0", "n1"])
    assert not pool.fits(["n1", "n2"])
    assert tuple(pool.resident) == ("n0",)
    with pytest.raises(ScuteError, match="SC802"):
        pool.fits(["nobody"])


def test_an_adapter_larger_than_the_pool_says_both_sizes() -> None:
    large = packed("dora", 12)
    pool = pool_of(large.pages - 1, 2)
    with pytest.raises(ScuteError) as refused:
        pool.load("tenant", large)
    assert code_of(refused) == "SC805"
    text = str(refused.value)
    assert f"{large.pages * PAGE_BYTES} bytes needed" in text
    assert f"{(large.pages - 1) * PAGE_BYTES} bytes" in text
    assert pool.names == ()


def test_a_name_is_taken_until_it_is_removed() -> None:
    pool = pool_of(100, 2)
    pool.load("tenant", packed("ia3", 1))
    with pytest.raises(ScuteError) as refused:
        pool.add("tenant", packed("ia3", 2))
    assert code_of(refused) == "SC806"
    pool.remove("tenant")
    pool.load("tenant", packed("ia3", 2))
    assert_reads_back(pool, pool.resident["tenant"], "ia3", 2)


def test_a_lease_is_given_back_once() -> None:
    """A second time would take the hold of another step, whose adapter could then be evicted while it is read."""
    pool = pool_of(200, 2)
    pool.load("tenant", packed("ia3", 1))
    first, second = pool.acquire(["tenant"]), pool.acquire(["tenant"])
    pool.release(first)
    with pytest.raises(ScuteError, match="given back already") as refused:
        pool.release(first)
    assert code_of(refused) == "SC703"
    with pytest.raises(ScuteError, match="running steps") as held:
        pool.evict("tenant")
    assert code_of(held) == "SC806"
    pool.release(second)
    pool.evict("tenant")


@pytest.mark.parametrize("sizes", [{"num_pages": 0}, {"max_adapters": 0}, {"max_adapters": -1}, {"shared_pages": -1}])
def test_a_pool_of_no_size_is_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ScuteError) as refused:
        pool_of(**{"num_pages": 8, "max_adapters": 2, **sizes})
    assert code_of(refused) == "SC703"


def test_a_cache_and_adapters_draw_on_one_budget() -> None:
    lora = packed("lora", 5)
    pool = pool_of(2 * lora.pages + 4, 4, lendable=lora.pages + 10)
    pool.load("idle", lora)
    pool.load("busy", packed("lora", 5))
    with pool.in_use(["busy"]) as slots:
        loan = pool.lend(5)  # one page more than is free: the idle adapter goes
        assert list(pool.resident) == ["busy"]
        pool.memory.pages[loan.long()] = 7.0
        assert_reads_back(pool, slots["busy"], "lora", 5)
        assert (pool.stats().pages.lent, pool.stats().pages.in_use) == (5, lora.pages)
        with pytest.raises(ScuteError, match="lent already") as refused:
            pool.lend(lora.pages + 6)
        assert code_of(refused) == "SC805"
        with pytest.raises(ScuteError, match="what is lent") as crowded:
            pool.ensure(["idle"])
        assert code_of(crowded) == "SC804"
        pool.reclaim(loan)
        pool.ensure(["idle"])
    assert_reads_back(pool, pool.resident["idle"], "lora", 5)


def test_the_page_map_closes_its_gaps_and_no_page_moves() -> None:
    small, large = packed("ia3", 4), packed("dora", 12)
    count = 2 * -(-large.pages // small.pages)
    pool = pool_of(count * small.pages, count, map_entries=0)
    for number in range(count):
        pool.load(f"t{number}", small)
    for number in range(0, count, 2):
        pool.evict(f"t{number}")
    kept = tuple(pool.resident)
    pool.load("large", large)
    assert pool.stats().map_moved == len(kept) * small.pages > 0
    assert pool.stats().pages.moved == 0
    assert_reads_back(pool, pool.resident["large"], "dora", 12)
    for name in kept:
        assert_reads_back(pool, pool.resident[name], "ia3", 4)


def test_statistics_print_and_serialize() -> None:
    pool = pool_of(100, 4, lendable=10)
    pool.load("tenant", packed("vera", 1))
    pool.lend(3)
    stats = pool.stats()
    told = json.loads(json.dumps(stats.to_json()))
    assert told["pages"]["in_use"] + told["pages"]["lent"] + told["pages"]["free"] == told["pages"]["total"] == 100
    assert told["adapters"] == {"tenant": packed("vera", 1).pages * PAGE_BYTES}
    assert sum(told["factors"].values()) == sum(factor.pages for factor in shared_factors(1)) * PAGE_BYTES
    assert f"{stats.pages.waste_ratio:.2%}" in str(stats)

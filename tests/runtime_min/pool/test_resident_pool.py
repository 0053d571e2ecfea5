"""The resident pool: adapters read back bit for bit, held adapters stay, and refusals change nothing."""

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
    code_of,
    in_use,
    load,
    packed,
    pool_of,
    read_back,
    shared_factors,
)


@pytest.mark.parametrize("method", METHODS)
def test_adapters_of_odd_shapes_read_back(method: str) -> None:
    pool = pool_of(200, 2)
    for seed in (5, 6):
        assert_reads_back(pool, load(pool, f"{method}{seed}", packed(method, seed)), method, seed)


def test_a_shared_pair_is_stored_once_and_freed_with_its_last_user() -> None:
    pool = pool_of(200, 4)
    load(pool, "first", packed("vera", 1))
    with_one = pool.stats()
    load(pool, "second", packed("vera", 3))
    with_two = pool.stats()
    assert set(with_one.factors) == set(with_two.factors) == {"a1", "b1"}
    assert with_two.pages.in_use - with_one.pages.in_use == packed("vera", 3).pages
    assert {facts.pair for facts in pool.facts.values()} == {0}
    pool.evict("first")
    assert_reads_back(pool, pool.resident["second"], "vera", 3)
    pool.evict("second")
    assert pool.stats().factors == {}
    assert pool.stats().pages.in_use == 0
    assert not any(any(row) for row in pool.pairs)


def test_a_shared_pair_stays_while_one_user_replaces_another() -> None:
    pool = pool_of(200, 1)
    load(pool, "first", packed("vera", 1))
    before = pool.pairs
    pool.memory.shared.fill_(7.0)
    load(pool, "second", packed("vera", 3))
    assert tuple(pool.resident) == ("second",)
    assert pool.pairs == before
    assert bool((pool.memory.shared == 7.0).all()), "the factors were copied again"


def test_evicting_the_last_user_of_a_needed_pair_frees_no_room() -> None:
    """The pair's pages stay in use when its last user is evicted for another user of it."""
    one, two, other = packed("vera", 1), packed("vera", 3), packed("vera", 2)
    pool = pool_of(200, 3, shared_pages=sum(factor.pages for factor in shared_factors(1)))
    load(pool, "one", one)
    pool.add("two", two)
    pool.add("other", other)
    with in_use(pool, "one"):
        assert pool.prefetch(["two", "other"]) == ("two",)
        with pytest.raises(ScuteError, match="bytes of shared factors") as refused:
            pool.ensure(["two", "other"])
    assert code_of(refused) == "SC804"
    assert pool.prefetch(["other"]) == ("other",)
    assert tuple(pool.resident) == ("other",)


def test_shared_memory_is_compacted() -> None:
    """Factors are contiguous: when gaps are too short, the resident factors are copied again from the host."""
    adapters = {rank: _of_rank(rank) for rank in (8, 16, 24)}
    sizes = {rank: sum(factor.pages for factor in adapter.factors) for rank, adapter in adapters.items()}
    pool = pool_of(50, 3, shared_pages=sizes[16] + sizes[24])
    load(pool, "8", adapters[8])
    load(pool, "16", adapters[16])
    pool.evict("8")
    index = load(pool, "24", adapters[24])
    assert pool.stats().shared_moved == sizes[16]
    for name, rank in (("16", 16), ("24", 24)):
        factors = zip((Field.A_OFFSET, Field.B_OFFSET), adapters[rank].factors, (40, 72), strict=True)
        for field, factor, width in factors:
            rows = factor.buffer.view(DTYPE)[: rank * granules(factor.features, DTYPE) * 8].view(rank, -1)
            assert torch.equal(read_back(pool, pool.resident[name], "q", field, (rank, width)), rows[:, :width])
    assert index == pool.resident["24"]


def _of_rank(rank: int) -> PackedAdapter:
    """Return an adapter of one site whose pair has this rank and no other user."""
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


def test_the_least_recently_used_adapter_is_evicted_first() -> None:
    pool = pool_of(200, 3)
    for seed in (1, 2, 3):
        load(pool, f"t{seed}", packed("ia3", seed))
    with in_use(pool, "t1"):
        pass
    load(pool, "t4", packed("ia3", 4))
    assert list(pool.resident) == ["t3", "t1", "t4"]
    pool.ensure(["t3", "t2"])
    assert list(pool.resident) == ["t4", "t3", "t2"]


def _seconds(call: Callable[[], object]) -> float:
    return min(repeat(call, number=20, repeat=10))


def test_counting_pages_takes_no_longer_in_a_large_pool() -> None:
    """Engines ask for counts at every step, and a pool of several GB has millions of pages."""
    large, small = (PagePool(pages, DTYPE, torch.device("meta")) for pages in (2_000_000, 2_000))
    assert _seconds(lambda: large.counts) < 10 * _seconds(lambda: small.counts)


def test_ensuring_resident_adapters_takes_less_time_than_a_check() -> None:
    pool = pool_of(200, 3)
    load(pool, "t1", packed("ia3", 1))
    assert 2 * _seconds(lambda: pool.ensure(["t1"])) < _seconds(lambda: pool.fits(["t1"]))


def test_adapters_that_steps_read_are_never_evicted() -> None:
    pool = pool_of(200, 3)
    for seed in (1, 2, 3):
        load(pool, f"t{seed}", packed("dora", seed))
    with in_use(pool, "t1"), in_use(pool, "t2") as indices:
        load(pool, "t4", packed("dora", 4))
        assert "t3" not in pool.resident
        with pytest.raises(ScuteError) as crowded:
            pool.ensure(["t3", "t4"])
        assert code_of(crowded) == "SC804"
        assert pool.prefetch(["t3"]) == ("t3",)
        for name in ("t1", "t2"):
            with pytest.raises(ScuteError) as held:
                pool.evict(name)
            assert code_of(held) == "SC806"
        assert_reads_back(pool, indices["t2"], "dora", 2)
    assert_reads_back(pool, pool.resident["t1"], "dora", 1)


def test_running_steps_keep_reading_a_replaced_adapter() -> None:
    pool = pool_of(400, 2)
    load(pool, "tenant", packed("lora", 1))
    lease = pool.acquire(["tenant"])
    pool.replace("tenant", packed("oft", 2))
    assert_reads_back(pool, lease.indices["tenant"], "lora", 1)
    assert_reads_back(pool, pool.ensure(["tenant"])["tenant"], "oft", 2)
    pool.release(lease)
    assert pool.stats().indices_in_use == 1
    assert pool.stats().adapters == {"tenant": packed("oft", 2).pages * PAGE_BYTES}


def test_an_idle_adapter_is_replaced_in_a_pool_of_one() -> None:
    pool = pool_of(200, 1)
    load(pool, "tenant", packed("lora", 1))
    pool.replace("tenant", packed("vera", 2))
    assert_reads_back(pool, pool.resident["tenant"], "vera", 2)


def test_an_adapter_that_a_step_reads_is_not_replaced_without_room() -> None:
    pool = pool_of(200, 1)
    load(pool, "tenant", packed("lora", 1))
    with in_use(pool, "tenant") as indices:
        with pytest.raises(ScuteError) as refused:
            pool.replace("tenant", packed("ia3", 2))
        assert code_of(refused) == "SC804"
        assert_reads_back(pool, indices["tenant"], "lora", 1)
    assert_reads_back(pool, pool.ensure(["tenant"])["tenant"], "lora", 1)


def test_all_unknown_adapters_are_named() -> None:
    pool = pool_of(100, 2)
    pool.add("here", packed("ia3", 1))
    with pytest.raises(ScuteError) as refused:
        pool.acquire(["one", "here", "two"])
    assert [(item.code.name, item.where) for item in refused.value.diagnostics] == [("SC802", "one"), ("SC802", "two")]
    assert not pool.resident


def test_more_adapters_than_max_adapters_are_refused_without_evictions() -> None:
    pool = pool_of(400, 2)
    for seed in (1, 2, 3):
        pool.add(f"t{seed}", packed("lora", seed))
    pool.ensure(["t1"])
    with pytest.raises(ScuteError, match="3 adapters") as refused:
        pool.ensure(["t1", "t2", "t3", "t1"])
    assert code_of(refused) == "SC804"
    assert list(pool.resident) == ["t1"]


def test_fits_answers_without_evictions() -> None:
    pool = pool_of(200, 2)
    for number in range(3):
        pool.add(f"n{number}", packed("lora", number))
    pool.ensure(["n0"])
    assert pool.fits(["n1", "n2"])
    assert not pool.fits(["n0", "n1", "n2"])
    with in_use(pool, "n0"):
        assert pool.fits(["n1", "n0", "n1"])
        assert not pool.fits(["n1", "n2"])
    assert tuple(pool.resident) == ("n0",)
    with pytest.raises(ScuteError, match="SC802"):
        pool.fits(["unknown"])


def test_refusing_an_adapter_larger_than_the_pool_names_both_sizes() -> None:
    large = packed("dora", 12)
    pool = pool_of(large.pages - 1, 2)
    with pytest.raises(ScuteError) as refused:
        load(pool, "tenant", large)
    assert code_of(refused) == "SC805"
    text = str(refused.value)
    assert f"{large.pages * PAGE_BYTES} bytes needed" in text
    assert f"{(large.pages - 1) * PAGE_BYTES} bytes" in text
    assert pool.names == ()


def test_a_name_is_taken_until_its_adapter_is_removed() -> None:
    pool = pool_of(100, 2)
    load(pool, "tenant", packed("ia3", 1))
    with pytest.raises(ScuteError) as refused:
        pool.add("tenant", packed("ia3", 2))
    assert code_of(refused) == "SC806"
    pool.remove("tenant")
    load(pool, "tenant", packed("ia3", 2))
    assert_reads_back(pool, pool.resident["tenant"], "ia3", 2)


def test_a_lease_is_released_once() -> None:
    """A second release would release another step's hold, and its adapter could be evicted while it is read."""
    pool = pool_of(200, 2)
    load(pool, "tenant", packed("ia3", 1))
    first, second = pool.acquire(["tenant"]), pool.acquire(["tenant"])
    pool.release(first)
    with pytest.raises(ScuteError, match="released already") as refused:
        pool.release(first)
    assert code_of(refused) == "SC703"
    with pytest.raises(ScuteError, match="running steps") as held:
        pool.evict("tenant")
    assert code_of(held) == "SC806"
    pool.release(second)
    pool.evict("tenant")


@pytest.mark.parametrize("sizes", [{"num_pages": 0}, {"max_adapters": 0}, {"max_adapters": -1}, {"shared_pages": -1}])
def test_impossible_pool_sizes_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ScuteError) as refused:
        pool_of(**{"num_pages": 8, "max_adapters": 2, **sizes})
    assert code_of(refused) == "SC703"


def test_the_page_map_is_compacted() -> None:
    small, large = packed("ia3", 4), packed("dora", 12)
    count = 2 * -(-large.pages // small.pages)
    pool = pool_of(count * small.pages, count, map_entries=0)
    for number in range(count):
        load(pool, f"t{number}", small)
    for number in range(0, count, 2):
        pool.evict(f"t{number}")
    kept = tuple(pool.resident)
    load(pool, "large", large)
    assert pool.stats().map_moved == len(kept) * small.pages > 0
    assert_reads_back(pool, pool.resident["large"], "dora", 12)
    for name in kept:
        assert_reads_back(pool, pool.resident[name], "ia3", 4)


def test_statistics_are_given_as_text_and_json() -> None:
    pool = pool_of(100, 4)
    load(pool, "tenant", packed("vera", 1))
    stats = pool.stats()
    values = json.loads(json.dumps(stats.to_json()))
    assert values["pages"]["in_use"] + values["pages"]["free"] == values["pages"]["total"] == 100
    assert (values["max_adapters"], values["indices_in_use"]) == (4, 1)
    assert values["adapters"] == {"tenant": packed("vera", 1).pages * PAGE_BYTES}
    assert sum(values["factors"].values()) == sum(factor.pages for factor in shared_factors(1)) * PAGE_BYTES
    assert f"{stats.pages.waste_ratio:.2%}" in str(stats)

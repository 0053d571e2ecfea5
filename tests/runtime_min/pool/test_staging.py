"""Small adapters that come in by one call share a copy and a scatter; each is then where it would be by itself."""

from __future__ import annotations

import pytest
import torch

from scute_compile.diagnostics import ScuteError
from scute_compile.runtime_min.pool import device_memory
from scute_compile.runtime_min.pool import staging as gathered
from scute_compile.runtime_min.pool.leases import Resident
from scute_compile.runtime_min.pool.packed_adapter import PackedAdapter
from scute_compile.runtime_min.pool.resident_pool import ResidentPool
from tests.runtime_min.pool.small_adapters import METHODS, assert_reads_back, packed, pool_of

MANY = [(method, seed) for seed in range(3) for method in METHODS]


def added(pool: ResidentPool, adapters: list[tuple[str, int]]) -> dict[str, tuple[str, int]]:
    """Put adapters into host memory, by name."""
    names = {f"{method}-{seed}": (method, seed) for method, seed in adapters}
    for name, adapter in names.items():
        pool.add(name, packed(*adapter))
    return names


@pytest.mark.parametrize("staging", [4, 9, 1000])
def test_all_read_back_whatever_the_staging_holds(staging: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "ROOM_PAGES", staging)
    monkeypatch.setattr(gathered, "RECORDS", 1 + staging % 4)
    monkeypatch.setattr(device_memory, "STAGING_PAGES", 4)
    monkeypatch.setattr(device_memory, "SMALL_PAGES", 3)  # some come in by themselves, between others
    pool = pool_of(400, len(MANY), shared_pages=128)
    names = added(pool, MANY)
    sizes = {pool.packed_adapters[name].pages for name in names}
    assert min(sizes) <= 3 < max(sizes)
    pool.memory.pages.fill_(float("nan"))
    slots = pool.ensure(names)
    assert pool.memory._gathered is None  # nor is its staging memory kept
    for name, slot in slots.items():
        assert_reads_back(pool, slot, *names[name])


def test_adapters_take_the_places_of_others_in_one_call() -> None:
    pool = pool_of(400, 3)
    names = added(pool, MANY)
    for first in range(0, len(names), 3):
        group = list(names)[first : first + 3]
        for name, slot in pool.ensure(group).items():
            assert_reads_back(pool, slot, *names[name])
        assert set(pool.resident) == set(group)


def test_the_page_map_closes_its_gaps_between_two_that_come_in() -> None:
    small, large = packed("ia3", 4), packed("dora", 12)
    count = 2 * -(-large.pages // small.pages) + 4
    pool = pool_of(count * small.pages, count, map_entries=0)
    for number in range(count):
        pool.load(f"t{number}", small)
    for number in range(0, count, 2):
        pool.evict(f"t{number}")
    for name, coming in (("large", large), ("another", packed("ia3", 8)), ("last", packed("ia3", 12))):
        pool.add(name, coming)
    kept = set(pool.resident)
    pool.ensure(["another", "large", "last"])
    assert pool.stats().map_moved > 0
    new = {"large": ("dora", 12), "another": ("ia3", 8), "last": ("ia3", 12)}
    for name, slot in pool.resident.items():
        assert_reads_back(pool, slot, *new.get(name, ("ia3", 4)))
    assert kept <= set(pool.resident)


def test_those_before_a_refused_one_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(400, len(MANY))
    names = added(pool, MANY[:4])
    whole = ResidentPool._bring_in

    def failing(self: ResidentPool, coming: PackedAdapter, candidates: object) -> object:
        if coming.name == list(names)[2]:
            raise torch.OutOfMemoryError
        return whole(self, coming, candidates)  # type: ignore[arg-type] # passed on as it came

    monkeypatch.setattr(ResidentPool, "_bring_in", failing)
    with pytest.raises(torch.OutOfMemoryError):
        pool.ensure(names)
    assert list(pool.resident) == list(names)[:2]
    for name, slot in pool.resident.items():
        assert_reads_back(pool, slot, *names[name])
    monkeypatch.undo()
    for name, slot in pool.ensure(names).items():
        assert_reads_back(pool, slot, *names[name])


def test_without_memory_for_all_of_them_they_come_in_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(400, 4)
    names = added(pool, MANY[:4])

    def full(*_sizes: object, **_options: object) -> torch.Tensor:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", full)
        slots = pool.ensure(names)
    for name, slot in slots.items():
        assert_reads_back(pool, slot, *names[name])


@pytest.mark.parametrize("at", [0, 1])
def test_what_could_not_be_written_is_not_resident(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(400, 4)
    names = added(pool, MANY[:5])
    pool.ensure(list(names)[4:])
    whole, calls = torch.Tensor.index_copy_, []

    def failing(self: torch.Tensor, *given: object) -> torch.Tensor:
        calls.append(given)
        if len(calls) > at:
            raise torch.OutOfMemoryError
        return whole(self, *given)  # type: ignore[arg-type] # passed on as they came

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "index_copy_", failing)
        with pytest.raises(ScuteError) as error:
            pool.ensure(list(names)[:4])
        assert error.value.diagnostics[0].code.name == "SC805"
        assert not set(pool.prefetch(list(names)[:4])) & set(list(names)[:4])  # it is for the next batch to be refused
    assert not set(pool.resident) & set(list(names)[:4])
    for name, slot in pool.ensure(list(names)[1:4]).items():  # and nothing of it is left behind
        assert_reads_back(pool, slot, *names[name])
    pool.ensure(list(names)[:1])
    assert_reads_back(pool, pool.resident[next(iter(names))], *names[next(iter(names))])


def test_an_adapter_looks_at_few_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of many once looked at all that were resident: 2048 tenants took eleven seconds to come in."""
    count, small, looks = 200, packed("ia3", 4), []
    pool = pool_of(count * small.pages, count, map_entries=count * small.pages)
    for number in range(2 * count):
        pool.add(f"t{number}", small)
    names = list(pool.packed_adapters)
    pool.ensure(names[:count])
    held = Resident.held.fget  # type: ignore[attr-defined] # a property's function

    def looked(resident: Resident) -> bool:
        looks.append(resident)
        return bool(held(resident))

    monkeypatch.setattr(Resident, "held", property(looked))
    pool.ensure(names[count:])
    assert count <= len(looks) <= 4 * count

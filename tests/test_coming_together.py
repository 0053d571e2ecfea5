"""Small adapters that come in by one call share a copy and a scatter; each is then where it would be by itself."""

from __future__ import annotations

from timeit import default_timer

import pytest
import torch

from scute_compile.diagnostics import ScuteError
from scute_compile.runtime_min import device_memory
from scute_compile.runtime_min.image import AdapterImage
from scute_compile.runtime_min.resident_pool import ResidentPool
from tests.pool_images import METHODS, assert_reads_back, image, pool_of

MANY = [(method, seed) for seed in range(3) for method in METHODS]


def added(pool: ResidentPool, adapters: list[tuple[str, int]]) -> dict[str, tuple[str, int]]:
    """Put adapters into host memory, by name."""
    names = {f"{method}-{seed}": (method, seed) for method, seed in adapters}
    for name, adapter in names.items():
        pool.add(name, image(*adapter))
    return names


@pytest.mark.parametrize("staging", [4, 9, 1000])
def test_all_read_back_whatever_the_staging_holds(staging: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "STAGING_PAGES", staging)
    monkeypatch.setattr(device_memory, "SMALL_PAGES", min(staging, 3))  # some come in by themselves, between others
    pool = pool_of(400, len(MANY), shared_pages=128)
    names = added(pool, MANY)
    sizes = {pool.images[name].pages for name in names}
    assert min(sizes) <= 3 < max(sizes)
    pool.memory.pages.fill_(float("nan"))
    for name, slot in pool.ensure(names).items():
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
    small, large = image("ia3", 4), image("dora", 12)
    count = 2 * -(-large.pages // small.pages) + 4
    pool = pool_of(count * small.pages, count, map_entries=0)
    for number in range(count):
        pool.load(f"t{number}", small)
    for number in range(0, count, 2):
        pool.evict(f"t{number}")
    for name, coming in (("large", large), ("another", image("ia3", 8)), ("last", image("ia3", 12))):
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

    def failing(self: ResidentPool, coming: AdapterImage, candidates: object) -> object:
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


def test_no_memory_to_stage_in_is_refused_before_anything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(400, 2)
    names = list(added(pool, MANY[:4]))
    pool.ensure(names[:2])

    def full(*_sizes: object, **_options: object) -> torch.Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(ScuteError) as error:
        pool.ensure(names[2:])
    assert error.value.diagnostics[0].code.name == "SC805"
    assert list(pool.resident) == names[:2]


def test_an_adapter_costs_no_more_beside_hundreds() -> None:
    """Each of many once searched all that were resident: 2048 tenants took eleven seconds."""

    def seconds_each(count: int) -> float:
        pool = pool_of(2 * count, count, map_entries=2 * count)
        small = image("ia3", 4)
        for number in range(2 * count):
            pool.add(f"t{number}", small)
        names = list(pool.images)
        pool.ensure(names[:count])
        start = default_timer()
        pool.ensure(names[count:])
        return (default_timer() - start) / count

    assert image("ia3", 4).pages <= 2
    assert min(seconds_each(1000) for _ in range(3)) < 3 * min(seconds_each(50) for _ in range(3))

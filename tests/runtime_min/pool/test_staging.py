"""Batched staging: small adapters of one call share a scatter, and read back as if each were staged alone."""

from __future__ import annotations

import pytest
import torch

from scute_compile.diagnostics import ScuteError
from scute_compile.runtime_min.pool import device_memory, staging
from scute_compile.runtime_min.pool.leases import Resident
from scute_compile.runtime_min.pool.packed_adapter import PackedAdapter
from scute_compile.runtime_min.pool.resident_pool import ResidentPool
from tests.runtime_min.pool.small_adapters import METHODS, assert_reads_back, load, packed, pool_of

MANY = [(method, seed) for seed in range(3) for method in METHODS]


def added(pool: ResidentPool, adapters: list[tuple[str, int]]) -> dict[str, tuple[str, int]]:
    """Add adapters to host memory, and return them by name."""
    names = {f"{method}-{seed}": (method, seed) for method, seed in adapters}
    for name, adapter in names.items():
        pool.add(name, packed(*adapter))
    return names


@pytest.mark.parametrize("batch_pages", [4, 9, 1000])
def test_adapters_read_back_for_every_size_of_the_batch(batch_pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "BATCH_PAGES", batch_pages)
    monkeypatch.setattr(staging, "ROWS_AT_ONCE", 1 + batch_pages % 4)
    monkeypatch.setattr(device_memory, "COPY_PAGES", 4)
    monkeypatch.setattr(device_memory, "SMALL_PAGES", 3)  # some adapters are staged alone, between the others
    pool = pool_of(400, len(MANY), shared_pages=128)
    names = added(pool, MANY)
    sizes = {pool.packed_adapters[name].pages for name in names}
    assert min(sizes) <= 3 < max(sizes)
    pool.memory.pages.fill_(float("nan"))
    indices = pool.ensure(names)
    assert pool.memory._batch is None  # its staging memory is freed
    for name, index in indices.items():
        assert_reads_back(pool, index, *names[name])


def test_one_call_replaces_all_resident_adapters() -> None:
    pool = pool_of(400, 3)
    names = added(pool, MANY)
    for first in range(0, len(names), 3):
        group = list(names)[first : first + 3]
        for name, index in pool.ensure(group).items():
            assert_reads_back(pool, index, *names[name])
        assert set(pool.resident) == set(group)


def test_the_page_map_is_compacted_between_two_adapters_of_a_batch() -> None:
    small, large = packed("ia3", 4), packed("dora", 12)
    count = 2 * -(-large.pages // small.pages) + 4
    pool = pool_of(count * small.pages, count, map_entries=0)
    for number in range(count):
        load(pool, f"t{number}", small)
    for number in range(0, count, 2):
        pool.evict(f"t{number}")
    for name, adapter in (("large", large), ("another", packed("ia3", 8)), ("last", packed("ia3", 12))):
        pool.add(name, adapter)
    kept = set(pool.resident)
    pool.ensure(["another", "large", "last"])
    assert pool.stats().map_moved > 0
    new = {"large": ("dora", 12), "another": ("ia3", 8), "last": ("ia3", 12)}
    for name, index in pool.resident.items():
        assert_reads_back(pool, index, *new.get(name, ("ia3", 4)))
    assert kept <= set(pool.resident)


def test_adapters_before_a_refused_one_stay_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(400, len(MANY))
    names = added(pool, MANY[:4])
    swap_in = ResidentPool._swap_in

    def failing(self: ResidentPool, adapter: PackedAdapter, candidates: object) -> object:
        if adapter.name == list(names)[2]:
            raise torch.OutOfMemoryError
        return swap_in(self, adapter, candidates)  # type: ignore[arg-type] # passed through

    monkeypatch.setattr(ResidentPool, "_swap_in", failing)
    with pytest.raises(torch.OutOfMemoryError):
        pool.ensure(names)
    assert list(pool.resident) == list(names)[:2]
    for name, index in pool.resident.items():
        assert_reads_back(pool, index, *names[name])
    monkeypatch.undo()
    for name, index in pool.ensure(names).items():
        assert_reads_back(pool, index, *names[name])


def test_adapters_are_staged_alone_without_memory_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(400, 4)
    names = added(pool, MANY[:4])

    def full(*_sizes: object, **_options: object) -> torch.Tensor:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", full)
        indices = pool.ensure(names)
    for name, index in indices.items():
        assert_reads_back(pool, index, *names[name])


@pytest.mark.parametrize("successful", [0, 1])
def test_adapters_that_could_not_be_written_are_not_resident(successful: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(400, 4)
    names = added(pool, MANY[:5])
    pool.ensure(list(names)[4:])
    index_copy, calls = torch.Tensor.index_copy_, []

    def failing(self: torch.Tensor, *given: object) -> torch.Tensor:
        calls.append(given)
        if len(calls) > successful:
            raise torch.OutOfMemoryError
        return index_copy(self, *given)  # type: ignore[arg-type] # passed through

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "index_copy_", failing)
        with pytest.raises(ScuteError) as error:
            pool.ensure(list(names)[:4])
        assert error.value.diagnostics[0].code.name == "SC805"
        assert not set(pool.prefetch(list(names)[:4])) & set(list(names)[:4])  # the next `ensure` is refused
    assert not set(pool.resident) & set(list(names)[:4])
    for name, index in pool.ensure(list(names)[1:4]).items():
        assert_reads_back(pool, index, *names[name])
    pool.ensure(list(names)[:1])
    assert_reads_back(pool, pool.resident[next(iter(names))], *names[next(iter(names))])


def test_loading_an_adapter_checks_few_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checking all residents for each of 2048 adapters would take eleven seconds."""
    count, small, checks = 200, packed("ia3", 4), []
    pool = pool_of(count * small.pages, count, map_entries=count * small.pages)
    for number in range(2 * count):
        pool.add(f"t{number}", small)
    names = list(pool.packed_adapters)
    pool.ensure(names[:count])
    held = Resident.held.fget  # type: ignore[attr-defined] # a property's function

    def counted(resident: Resident) -> bool:
        checks.append(resident)
        return bool(held(resident))

    monkeypatch.setattr(Resident, "held", property(counted))
    pool.ensure(names[count:])
    assert count <= len(checks) <= 4 * count

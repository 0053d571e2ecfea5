"""Random operations on a small pool, against a model of its contents; every step reads all tensors back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scute_compile.diagnostics import Diagnostic, ScuteError
from scute_compile.runtime_min.pool import device_memory, staging
from scute_compile.runtime_min.pool.directory import PAGE_BYTES, Field
from scute_compile.runtime_min.pool.leases import Lease
from tests.runtime_min.pool.small_adapters import METHODS, assert_reads_back, packed, pool_of

PAGES, MAX_ADAPTERS = 24, 4
SHARED_PAGES = 15
"""Room for one and a half shared pairs: adapters of both pairs can't be resident together."""
NAMES = tuple(f"tenant-{number}" for number in range(7))
ADAPTERS = st.tuples(st.sampled_from(METHODS), st.integers(0, 5))
Adapter = tuple[str, int]


def refused(call: Callable[[], object]) -> tuple[Diagnostic, ...]:
    """Make a call and return the findings of its refusal; empty when it succeeds."""
    try:
        call()
    except ScuteError as error:
        return error.diagnostics
    return ()


def code(found: tuple[Diagnostic, ...]) -> str:
    """Return the code of the first finding; empty without findings."""
    return found[0].code.name if found else ""


class Churn(RuleBasedStateMachine):
    """Loads, evictions, replacements, leases and prefetches in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool_of(PAGES, MAX_ADAPTERS, map_entries=0, shared_pages=SHARED_PAGES)
        self.added: dict[str, Adapter] = {}
        self.leases: list[tuple[Lease, dict[str, Adapter]]] = []

    def held(self) -> set[str]:
        """Return the adapters that must stay on the device."""
        return {name for lease, of in self.leases for name in of if self.pool.resident.get(name) == lease.indices[name]}

    @rule(name=st.sampled_from(NAMES), adapter=ADAPTERS)
    def add(self, name: str, adapter: Adapter) -> None:
        """Add an adapter; a second one of the same name is refused."""
        found = refused(lambda: self.pool.add(name, packed(*adapter)))
        assert code(found) == ("SC806" if name in self.added else "")
        self.added.setdefault(name, adapter)

    @rule(names=st.sets(st.sampled_from(NAMES), max_size=4), keep=st.booleans())
    def step(self, names: set[str], *, keep: bool) -> None:
        """Begin a step, and end it unless `keep`."""
        before = self.held()
        got: list[Lease] = []
        found = refused(lambda: got.append(self.pool.acquire(sorted(names))))
        assert [item.where for item in found if item.code.name == "SC802"] == sorted(names - self.added.keys())
        assert code(found) in {"", "SC802", "SC804", "SC805"}
        for lease in got:
            assert set(lease.indices) == names
            if keep:
                self.leases.append((lease, {name: self.added[name] for name in names}))
            else:
                self.pool.release(lease)
        assert before <= set(self.pool.resident)

    @precondition(lambda self: self.leases)
    @rule(which=st.integers(0, 9))
    def end_step(self, which: int) -> None:
        """End a step."""
        self.pool.release(self.leases.pop(which % len(self.leases))[0])

    @precondition(lambda self: self.added)
    @rule(data=st.data(), adapter=ADAPTERS)
    def replace(self, data: st.DataObject, adapter: Adapter) -> None:
        """Replace an adapter; where there is no room, the old one keeps its name."""
        name = data.draw(st.sampled_from(sorted(self.added)))
        found = refused(lambda: self.pool.replace(name, packed(*adapter)))
        assert code(found) in {"", "SC804"}
        if not found:
            self.added[name] = adapter

    @precondition(lambda self: self.added)
    @rule(data=st.data(), forget=st.booleans())
    def evict_or_remove(self, data: st.DataObject, *, forget: bool) -> None:
        """Evict or remove an adapter; a held one is refused."""
        name = data.draw(st.sampled_from(sorted(self.added)))
        resident, held = name in self.pool.resident, name in self.held()
        found = refused(lambda: self.pool.remove(name) if forget else self.pool.evict(name))
        assert code(found) == ("SC806" if held else "" if resident or forget else "SC802")
        if forget and not found:
            del self.added[name]

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def prefetch(self, data: st.DataObject) -> None:
        """Prefetch adapters; held ones stay."""
        names = data.draw(st.sets(st.sampled_from(sorted(self.added)), max_size=3))
        before = self.held()
        assert set(self.pool.prefetch(names)) <= set(self.pool.resident)
        assert before <= set(self.pool.resident)

    @invariant()
    def everything_reads_back(self) -> None:
        """Resident adapters read back at their index, and adapters of running steps at their lease's index."""
        for name, index in self.pool.resident.items():
            assert_reads_back(self.pool, index, *self.added[name])
        for lease, adapters in self.leases:
            for name, index in lease.indices.items():
                assert_reads_back(self.pool, index, *adapters[name])

    @invariant()
    def everything_adds_up(self) -> None:
        """The counts are those of the adapters on the device, with each factor once; free indices have empty rows."""
        stats = self.pool.stats()
        adapters = {index: packed(*self.added[name]) for name, index in self.pool.resident.items()}
        adapters |= {index: packed(*of[name]) for lease, of in self.leases for name, index in lease.indices.items()}
        factors = {factor.key: factor.pages * PAGE_BYTES for held in adapters.values() for factor in held.factors}
        assert stats.pages.in_use == sum(held.pages for held in adapters.values())
        assert stats.pages.payload == sum(held.payload for held in adapters.values())
        assert stats.pages.in_use + stats.pages.free == PAGES
        assert stats.indices_in_use == len(adapters)
        assert set(self.pool.facts) == set(adapters)
        assert stats.factors == factors
        empty = [index for index in range(MAX_ADAPTERS) if index not in adapters]
        self.pool.memory.wait()  # as before every step
        assert bool((self.pool.memory.directory[empty][..., Field.OWN_PAGES] == -1).all())


TestChurn = Churn.TestCase
TestChurn.settings = settings(max_examples=16, stateful_step_count=30, deadline=None)


class BatchedChurn(Churn):
    """The same operations with small staging batches, adapters that are staged alone, and failing writes."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()

    @initialize(
        batch=st.integers(3, 12),
        small=st.integers(1, 3),
        rows=st.integers(1, 4),
        adapters=st.tuples(*[ADAPTERS] * len(NAMES)),
    )
    def begin(self, batch: int, small: int, rows: int, adapters: tuple[Adapter, ...]) -> None:
        """Start with all adapters in host memory."""
        self.patch.setattr(staging, "BATCH_PAGES", batch)
        self.patch.setattr(staging, "ROWS_AT_ONCE", rows)
        self.patch.setattr(device_memory, "SMALL_PAGES", small)
        for name, adapter in zip(NAMES, adapters, strict=True):
            self.add(name, adapter)

    @precondition(lambda self: self.added)
    @rule(
        data=st.data(), broken=st.sampled_from(["_foreach_copy_", "tensor"]), ahead=st.booleans(), evict=st.booleans()
    )
    def run_out_of_memory(self, data: st.DataObject, broken: str, *, ahead: bool, evict: bool) -> None:
        """Run out of memory between writes, and evict an adapter that may not have been written."""
        names = data.draw(st.lists(st.sampled_from(sorted(self.added)), min_size=1, max_size=4))
        before = self.held()

        def full(*_given: object, **_options: object) -> None:
            raise torch.OutOfMemoryError

        with self.patch.context() as patch:
            patch.setattr(torch, broken, full)
            found = refused(lambda: self.pool.prefetch(names) if ahead else self.pool.ensure(names))
            assert code(found) in {"", "SC804", "SC805"}
        free = sorted(self.pool.resident.keys() - self.held())
        if free and evict:
            self.pool.evict(data.draw(st.sampled_from(free)))
            self.pool.prefetch(data.draw(st.lists(st.sampled_from(sorted(self.added)), max_size=3)))
        assert before <= set(self.pool.resident)

    def teardown(self) -> None:
        """Restore the sizes of staging."""
        self.patch.undo()


TestBatchedChurn = BatchedChurn.TestCase
TestBatchedChurn.settings = TestChurn.settings

"""Random traffic through a small pool, against a model of what must be resident; every step reads everything back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scute_compile.diagnostics import Diagnostic, ScuteError
from scute_compile.runtime_min.pool import device_memory
from scute_compile.runtime_min.pool import staging as gathered
from scute_compile.runtime_min.pool.directory import PAGE_BYTES, Field
from scute_compile.runtime_min.pool.leases import Lease
from tests.runtime_min.pool.small_adapters import METHODS, assert_reads_back, packed, pool_of

PAGES, SLOTS, LENDABLE = 24, 4, 14
SHARED_PAGES = 15
"""Room for one pair and a half: tenants of the two pairs can't be resident together."""
NAMES = tuple(f"tenant-{number}" for number in range(7))
ADAPTERS = st.tuples(st.sampled_from(METHODS), st.integers(0, 5))
Adapter = tuple[str, int]


def refused(call: Callable[[], object]) -> tuple[Diagnostic, ...]:
    """Make a call and return what it was refused with; empty when it went through."""
    try:
        call()
    except ScuteError as error:
        return error.diagnostics
    return ()


def code(found: tuple[Diagnostic, ...]) -> str:
    """The code of the first finding, or nothing."""
    return found[0].code.name if found else ""


class Churn(RuleBasedStateMachine):
    """Loads, evictions, replacements, pins, leases, prefetches and loans in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool_of(PAGES, SLOTS, map_entries=0, lendable=LENDABLE, shared_pages=SHARED_PAGES)
        self.added: dict[str, Adapter] = {}
        self.leases: list[tuple[Lease, dict[str, Adapter]]] = []
        self.pinned: set[str] = set()
        self.loans: list[torch.Tensor] = []

    def held(self) -> set[str]:
        """What must stay on the device."""
        return self.pinned | {
            name for lease, of in self.leases for name in of if self.pool.resident.get(name) == lease.indices[name]
        }

    @rule(name=st.sampled_from(NAMES), adapter=ADAPTERS)
    def add(self, name: str, adapter: Adapter) -> None:
        """Add, or be refused a second adapter of that name."""
        found = refused(lambda: self.pool.add(name, packed(*adapter)))
        assert code(found) == ("SC806" if name in self.added else "")
        self.added.setdefault(name, adapter)

    @rule(names=st.sets(st.sampled_from(NAMES), max_size=4), keep=st.booleans())
    def step(self, names: set[str], *, keep: bool) -> None:
        """Run a step, and maybe let it run on."""
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
        """A step ends."""
        self.pool.release(self.leases.pop(which % len(self.leases))[0])

    @precondition(lambda self: self.added)
    @rule(data=st.data(), adapter=ADAPTERS)
    def replace(self, data: st.DataObject, adapter: Adapter) -> None:
        """Replace, or be refused for want of room; then the old one is still meant by its name."""
        name = data.draw(st.sampled_from(sorted(self.added)))
        found = refused(lambda: self.pool.replace(name, packed(*adapter)))
        assert code(found) in {"", "SC804"}
        if not found:
            self.added[name] = adapter

    @precondition(lambda self: self.added)
    @rule(data=st.data(), forget=st.booleans())
    def evict_or_remove(self, data: st.DataObject, *, forget: bool) -> None:
        """Take an adapter away unless it is held."""
        name = data.draw(st.sampled_from(sorted(self.added)))
        resident, held = name in self.pool.resident, name in self.held()
        found = refused(lambda: self.pool.remove(name) if forget else self.pool.evict(name))
        assert code(found) == ("SC806" if held else "" if resident or forget else "SC802")
        if forget and not found:
            del self.added[name]

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def toggle_pin(self, data: st.DataObject) -> None:
        """Pin or unpin."""
        name = data.draw(st.sampled_from(sorted(self.added)))
        if name in self.pinned:
            self.pool.unpin(name)
            self.pinned.remove(name)
        else:
            found = refused(lambda: self.pool.pin(name))
            assert code(found) in {"", "SC804", "SC805"}
            self.pinned |= set() if found else {name}

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def prefetch(self, data: st.DataObject) -> None:
        """Fetch ahead without touching what is held."""
        names = data.draw(st.sets(st.sampled_from(sorted(self.added)), max_size=3))
        before = self.held()
        assert set(self.pool.prefetch(names)) <= set(self.pool.resident)
        assert before <= set(self.pool.resident)

    @rule(count=st.integers(0, LENDABLE))
    def lend(self, count: int) -> None:
        """Lend pages and fill them with what no adapter holds."""
        lent, before = sum(map(len, self.loans)), self.held()
        found = refused(lambda: self.loans.append(self.pool.lend(count)))
        assert code(found) in {"", "SC805"}
        assert found or lent + count <= LENDABLE
        for loan in self.loans:
            self.pool.memory.pages[loan.long()] = float("nan")
        assert before <= set(self.pool.resident)

    @precondition(lambda self: self.loans)
    @rule()
    def reclaim(self) -> None:
        """Take the oldest loan back."""
        self.pool.reclaim(self.loans.pop(0))

    @invariant()
    def everything_reads_back(self) -> None:
        """Residents under their name, and what running steps hold under their lease's slot."""
        for name, slot in self.pool.resident.items():
            assert_reads_back(self.pool, slot, *self.added[name])
        for lease, adapters in self.leases:
            for name, slot in lease.indices.items():
                assert_reads_back(self.pool, slot, *adapters[name])
        for loan in self.loans:
            assert bool(self.pool.memory.pages[loan.long()].isnan().all())

    @invariant()
    def everything_adds_up(self) -> None:
        """Pages are the residents' own, and factors are there once each; free slots announce nothing."""
        stats = self.pool.stats()
        packed_adapters = {slot: packed(*self.added[name]) for name, slot in self.pool.resident.items()}
        packed_adapters |= {
            slot: packed(*of[name]) for lease, of in self.leases for name, slot in lease.indices.items()
        }
        factors = {
            factor.key: factor.pages * PAGE_BYTES for held in packed_adapters.values() for factor in held.factors
        }
        assert stats.pages.in_use == sum(held.pages for held in packed_adapters.values())
        assert stats.pages.payload == sum(held.payload for held in packed_adapters.values())
        assert stats.pages.lent == sum(map(len, self.loans))
        assert stats.pages.in_use + stats.pages.lent + stats.pages.free == PAGES
        assert (stats.slots_in_use, stats.pages.moved) == (len(packed_adapters), 0)
        assert set(self.pool.facts) == set(packed_adapters)
        assert stats.factors == factors
        empty = [slot for slot in range(SLOTS) if slot not in packed_adapters]
        self.pool.memory.wait()  # as before every step
        assert bool((self.pool.memory.directory[empty][..., Field.OWN_PAGES] == -1).all())


TestChurn = Churn.TestCase
TestChurn.settings = settings(max_examples=16, stateful_step_count=30, deadline=None)


class ChurnTogether(Churn):
    """The same with staging memory for a few pages, where some come in alone, and with writes that break off."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()

    @initialize(
        staging=st.integers(3, 12),
        small=st.integers(1, 3),
        records=st.integers(1, 4),
        adapters=st.tuples(*[ADAPTERS] * len(NAMES)),
    )
    def begin(self, staging: int, small: int, records: int, adapters: tuple[Adapter, ...]) -> None:
        """Start with all adapters in host memory."""
        self.patch.setattr(gathered, "ROOM_PAGES", staging)
        self.patch.setattr(gathered, "RECORDS", records)
        self.patch.setattr(device_memory, "SMALL_PAGES", small)
        for name, adapter in zip(NAMES, adapters, strict=True):
            self.add(name, adapter)

    @precondition(lambda self: self.added)
    @rule(
        data=st.data(), broken=st.sampled_from(["_foreach_copy_", "tensor"]), ahead=st.booleans(), evict=st.booleans()
    )
    def break_off(self, data: st.DataObject, broken: str, *, ahead: bool, evict: bool) -> None:
        """Run out of memory in the middle of the writes, and take one away whose bytes never arrived."""
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
        """Let other tests have their staging memory."""
        self.patch.undo()


TestChurnTogether = ChurnTogether.TestCase
TestChurnTogether.settings = TestChurn.settings

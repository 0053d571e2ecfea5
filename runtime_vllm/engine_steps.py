"""Steps of an engine: each token's adapter, written where captured graphs and eager layers read it.

Buffers and their capacities are fixed when the model is built. A step has one of two forms by its number of rows alone:
few rows run the decode kernels, more the prefill kernels. So a graph that was captured for a number of rows finds its
plan in the same place at every replay, whatever the mix.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from scute_compile.diagnostics import Code, fail
from scute_compile.runtime_min.pool.leases import Lease
from scute_compile.runtime_min.pool.resident_pool import ResidentPool
from scute_compile.runtime_min.step.arguments import Features, features_of, fixed_features
from scute_compile.runtime_min.step.plan import WIDE_RANK, Capacity, StepBuffers, StepPlan, plan_step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """How large an engine's steps may be."""

    max_num_batched_tokens: int
    max_num_seqs: int
    """Most rows of the decode form."""
    max_lora_rank: int
    pair_rank: int
    rotations: bool
    padded_beyond: bool = False
    """Whether an engine may pad a step of fewer rows to more than `max_num_seqs`, where graphs read the other form."""


class EngineSteps:
    """The steps of one model on one rank.

    Args:
        pool: Its adapters.
        limits: Sizes that every step keeps.
    """

    def __init__(self, pool: ResidentPool, limits: StepLimits) -> None:
        self.pool, self.limits = pool, limits
        self.slots = len(pool.memory.directory)
        self.buffers = {
            prefill: StepBuffers(_capacity(pool, limits, tokens, prefill=prefill), pool.device)
            for prefill, tokens in (
                (False, limits.max_num_seqs),
                (True, max(limits.max_num_batched_tokens, limits.max_num_seqs)),
            )
        }
        self._plans: dict[bool, StepPlan | None] = {False: None, True: None}
        self._tokens = 0
        self._lease: Lease | None = None
        self.rehearsing = False
        """Whether the engine's adapters are stand-ins: it measures its memory, or warms up what it will capture."""
        self.current = False
        """Whether what is written is the step that the engine prepares now, and not the one before."""

    def write(self, names: Sequence[str | None]) -> None:
        """Give each row of the next steps an adapter of the pool; adapters are held until the next call.

        Args:
            names: The pool's name of each row's adapter; None for the base.

        Raises:
            ScuteError: SC804 when there are more rows than the buffers hold, SC802 and SC805 as `ResidentPool.acquire`.
        """
        if len(names) > self.buffers[True].capacity.tokens:
            fail(
                Code.SC804,
                where="a step",
                found=f"{len(names)} tokens",
                expected=f"at most {self.buffers[True].capacity.tokens}, the engine's max_num_batched_tokens",
                next="start the engine with a larger max_num_batched_tokens",
            )
        wanted = tuple(dict.fromkeys(name for name in names if name is not None))
        lease = self.pool.acquire(wanted) if wanted else None
        self.release()
        self._lease = lease
        slots: dict[str | None, int] = {None: -1}
        slots.update(lease.indices if lease is not None else {})
        rows = tuple(map(slots.__getitem__, names))
        self._tokens = len(rows)
        self._plans = {False: None, True: None}
        for prefill in self._forms(len(rows)):
            buffers = self.buffers[prefill]
            plan = plan_step(rows, self.pool.facts, self.pool.pairs, buffers.capacity)
            buffers.fill(plan)
            self._plans[prefill] = plan

    def _forms(self, rows: int) -> tuple[bool, ...]:
        """Return the forms in which a step of so many rows may run, decode as False and prefill as True."""
        if rows > self.limits.max_num_seqs:
            return (True,)
        return (False, True) if self.limits.padded_beyond else (False,)

    def release(self) -> None:
        """Let go of the adapters of the steps so far, whose kernels were all given to the current stream."""
        if self._lease is not None:
            self.pool.release(self._lease)
            self._lease = None

    def adapted(self) -> bool:
        """Whether any row of the current step has an adapter."""
        return self._lease is not None

    @property
    def plain(self) -> bool:
        """Whether the step that the engine prepares now needs no shared pair and turns no input."""
        plans = [plan for plan in self._plans.values() if plan is not None]
        written = self.current and not self.rehearsing and self.adapted() and bool(plans)
        return written and not any(plan.shared or plan.rotated for plan in plans)

    def rehearses(self, rows: int) -> bool:
        """Whether a call with `rows` rows should do all that any step of so many rows may need.

        The engine then measures the memory of such a step before it gives the rest to its KV cache, and the kernels are
        compiled and loaded before a capture, in which that may be forbidden.
        """
        return self.rehearsing and self.written_for(rows)

    def written_for(self, rows: int) -> bool:
        """Whether a layer that is called with `rows` rows sees every token of the current step."""
        return self._plans[rows > self.limits.max_num_seqs] is not None and self._tokens <= rows

    def form(self, rows: int, *, fixed: bool, plain: bool = False) -> tuple[StepBuffers, Features]:
        """Return the buffers and the features for a layer that is called with `rows` rows.

        Args:
            rows: Of the call, which may be padded.
            fixed: Whether the call is being captured, and so must do what any later step of so many rows may need.
            plain: Whether only plain steps will run what is captured.

        Raises:
            ScuteError: SC703 when the step was written for more rows than the layer sees.
        """
        prefill = rows > self.limits.max_num_seqs
        buffers, plan = self.buffers[prefill], self._plans[prefill]
        if plan is None or not self.written_for(rows):
            fail(
                Code.SC703,
                where="a step",
                found=f"a layer with {rows} rows in a step of {self._tokens}",
                expected="layers that see every token of the step",
                next="report the model; adapters can't be served on it this way",
            )
        if fixed:
            return buffers, self._most(rows, prefill=prefill, plain=plain)
        features = features_of(plan, whole_granules=True)
        most = self._most(rows, prefill=prefill, plain=not (features.shared or features.rotated))
        return buffers, _as_rehearsed(features, most)

    def rehearsal(self, rows: int) -> tuple[StepBuffers, tuple[Features, ...]]:
        """Return the buffers, and what kernels must have been compiled for before an engine answers anybody.

        What a step needs chooses among a kernel's variants, and a variant that is compiled while requests wait holds
        all of them up for seconds. So steps keep to two: plain ones, and all others.

        Args:
            rows: Of the call that rehearses.
        """
        buffers, most = self.form(rows, fixed=True)
        return buffers, (self.form(rows, fixed=True, plain=True)[1], most)

    def _most(self, rows: int, *, prefill: bool, plain: bool) -> Features:
        """Return what any step of so many rows may need, or any plain one."""
        buffers = self.buffers[prefill]
        capacity = dataclasses.replace(
            buffers.capacity,
            tokens=rows,
            ranks=buffers.capacity.ranks // buffers.capacity.tokens * rows,
            rotated=rows if self.limits.rotations else 0,
        )
        most = fixed_features(capacity, max_adapters=self.slots, prefill=prefill, whole_granules=True, plain=plain)
        return dataclasses.replace(most, tall=0) if self.limits.max_lora_rank <= WIDE_RANK else most


def _as_rehearsed(features: Features, most: Features) -> Features:
    """Return a step's features, with those that choose another variant of a kernel as in the rehearsal."""
    rotated = max(features.rotated, min(1, most.rotated))
    return dataclasses.replace(features, owned=most.owned, shared=most.shared, tall=most.tall, rotated=rotated)


def _capacity(pool: ResidentPool, limits: StepLimits, tokens: int, *, prefill: bool) -> Capacity:
    """Return what the buffers of one form hold; prefill keeps the rows of shared pairs beside those of own terms."""
    rank = max(limits.max_lora_rank, limits.pair_rank) if prefill else limits.max_lora_rank
    return Capacity(
        tokens=tokens,
        ranks=tokens * rank,
        pairs=len(pool.pairs),
        pair_ranks=limits.pair_rank,
        rotated=tokens if limits.rotations else 0,
        prefill=prefill,
    )

"""The step writer: holds the adapters of a step on the device, plans its rows and fills the buffers that kernels read.

Buffers keep their addresses from step to step, so that a captured graph finds the plan of every later step where it
read the first one.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scute_compile.diagnostics import Code, fail
from scute_compile.runtime_min.pool.directory import Field, values_per_granule
from scute_compile.runtime_min.pool.leases import Lease
from scute_compile.runtime_min.pool.packed_adapter import PackedAdapter
from scute_compile.runtime_min.pool.resident_pool import ResidentPool
from scute_compile.runtime_min.step.arguments import Features, features_of, fixed_features
from scute_compile.runtime_min.step.plan import WIDE_RANK, Capacity, StepBuffers, StepPlan, plan_step

DECODE_ROWS_PER_ADAPTER = 16
"""Largest number of rows of one adapter in the decode form, which reads the adapter's factors once per row."""
LEAST_PAIR_RANK = 16
"""Smallest rank of a shared pair that buffers are made for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The limits of a step, and the settings that decide its form."""

    max_num_batched_tokens: int
    max_num_seqs: int
    """Largest number of rows of the decode form."""
    max_lora_rank: int = 0
    pair_rank: int = 0
    """Largest rank of a shared pair."""
    rotations: bool = False
    """Whether an adapter may rotate its inputs."""
    whole_granules: bool = True
    """Whether every rotation block's width is a multiple of a granule; diagonals count as whole."""
    shares: int = 1
    """Number of ranks among which fully sharded terms are divided."""
    fixed: bool = False
    """Whether the form depends on the number of rows alone, as graphs captured per number of rows require."""
    padded_beyond: bool = False
    """Whether a step of fewer rows may be padded to more than `max_num_seqs`, where graphs read the prefill form."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepForm:
    """One of the two forms, decode or prefill, in which the current step is written."""

    buffers: StepBuffers
    plan: StepPlan
    """The plan that the buffers hold."""


class StepWriter:
    """Writes the steps of one model on one rank.

    Args:
        pool: The adapters.
        limits: The limits of steps; `fit` raises those that depend on the adapters.
    """

    def __init__(self, pool: ResidentPool, limits: StepLimits) -> None:
        self.pool, self.limits = pool, limits
        self.max_adapters = len(pool.memory.directory)
        self.tokens = 0
        """Rows of the current step."""
        self._buffers: dict[bool, StepBuffers] = {}
        """The buffers by form: False for decode, True for prefill."""
        self._planned: dict[bool, StepForm] = {}
        """The last step that was written in each form for the held adapters."""
        self.forms: tuple[StepForm, ...] = ()
        """The forms of the current step, decode first."""
        self._lease: Lease | None = None
        self._make_buffers()

    def fit(self, packed: PackedAdapter) -> None:
        """Raise the limits to those of an adapter and make the buffers large enough. No limit is ever lowered."""
        widths = packed.rows[:, Field.R_BLOCK]
        values = values_per_granule(packed.dtype)
        self.limits = dataclasses.replace(
            self.limits,
            max_lora_rank=max(self.limits.max_lora_rank, packed.own_rank),
            pair_rank=max([self.limits.pair_rank, *(pair.rank for pair in packed.pairs)]),
            rotations=self.limits.rotations or packed.rotated,
            whole_granules=self.limits.whole_granules and not (widths[widths > 1] % values).any(),
        )
        self._make_buffers()

    def _make_buffers(self) -> None:
        self._planned.clear()
        self.forms = ()
        for prefill in (False, True):
            buffers, capacity = self._buffers.get(prefill), self._capacity(prefill=prefill)
            if buffers is None or buffers.capacity != capacity:
                self._buffers[prefill] = StepBuffers(capacity, self.pool.device)

    def _capacity(self, *, prefill: bool) -> Capacity:
        """Return the capacity of one form; in prefill, ranks of shared pairs count as those of owned terms do."""
        limits = self.limits
        tokens = max(limits.max_num_batched_tokens, limits.max_num_seqs) if prefill else limits.max_num_seqs
        rank = max(1, limits.max_lora_rank, limits.pair_rank if prefill else 0)
        return Capacity(
            tokens=tokens,
            ranks=tokens * -(-rank // limits.shares) * limits.shares,
            pairs=len(self.pool.pairs),
            pair_ranks=max(LEAST_PAIR_RANK, limits.pair_rank),
            rotated=tokens if limits.rotations else 0,
            prefill=prefill,
        )

    @property
    def max_tokens(self) -> int:
        """Largest number of rows of a step."""
        return self._buffers[True].capacity.tokens

    @property
    def held(self) -> bool:
        """Whether `hold` was called and not followed by `release`."""
        return self._lease is not None

    @property
    def adapted(self) -> bool:
        """Whether any adapter is held, so that rows of the current step may have one."""
        return self._lease is not None and bool(self._lease.indices)

    def hold(self, names: Iterable[str | None]) -> None:
        """Hold the adapters of the next steps on the device until the next call or `release`.

        Args:
            names: The pool's names; None (the base) and repetitions are ignored.

        Raises:
            ScuteError: SC802, SC804 and SC805 as `ResidentPool.acquire`; what was held before is then still held.
        """
        lease = self.pool.acquire(name for name in dict.fromkeys(names) if name is not None)
        self.release()
        self._lease = lease
        self._planned.clear()

    def release(self) -> None:
        """Release the held adapters, once all kernels that read them are launched on the current stream."""
        if self._lease is not None:
            self.pool.release(self._lease)
            self._lease = None

    def write(self, names: Sequence[str | None]) -> None:
        """Set the adapter of each row of the next call. A form that already holds these rows is not written again.

        Args:
            names: The name of each row's adapter, which must be held; None for the base.

        Raises:
            ScuteError: SC804 when there are more rows than the buffers hold.
        """
        if len(names) > self.max_tokens:
            fail(
                Code.SC804,
                where="a step",
                found=f"{len(names)} tokens",
                expected=f"at most {self.max_tokens}, the max_num_batched_tokens of the buffers",
                next="split the batch, shorten the prompts, or start with a larger max_num_batched_tokens",
            )
        indices: dict[str | None, int] = {None: -1}
        indices.update(self._lease.indices if self._lease else {})
        rows = tuple(map(indices.__getitem__, names))
        self.tokens, self.forms = len(rows), ()
        self.forms = tuple(self._plan(prefill, rows) for prefill in self._forms_of(rows))

    def _plan(self, prefill: bool, rows: tuple[int, ...]) -> StepForm:
        form = self._planned.get(prefill)
        if form is None or form.plan.rows != rows:
            self._planned.pop(prefill, None)
            buffers = self._buffers[prefill]
            form = StepForm(buffers=buffers, plan=plan_step(rows, self.pool.facts, self.pool.pairs, buffers.capacity))
            buffers.fill(form.plan)
            self._planned[prefill] = form
        return form

    def _forms_of(self, rows: Sequence[int]) -> tuple[bool, ...]:
        """Return the forms that a step is written in, decode as False and prefill as True.

        Args:
            rows: The adapter index of each row.
        """
        if len(rows) > self.limits.max_num_seqs:
            return (True,)
        if self.limits.padded_beyond:
            return (False, True)
        if self.limits.fixed:
            return (False,)
        counts = Counter(row for row in rows if row >= 0)
        return (max(counts.values(), default=0) > DECODE_ROWS_PER_ADAPTER,)

    def form_for(self, rows: int) -> StepForm | None:
        """Return the form that a call with `rows` rows, with padding, reads; None if no form of the step fits."""
        fitting = (form for form in self.forms if self.tokens <= rows <= form.buffers.capacity.tokens)
        return next(fitting, None)

    def arguments(self) -> tuple[StepBuffers, Features]:
        """Return the buffers and features that launches of the current step take.

        Where the limits are `fixed`, these are the features of any step in its form.
        """
        form, *_ = self.forms
        return form.buffers, self.fixed(form) if self.limits.fixed else self.exact(form)

    def exact(self, form: StepForm) -> Features:
        """Return the features that the plan in a form needs."""
        return features_of(form.plan, whole_granules=self.limits.whole_granules)

    def fixed(self, form: StepForm, rows: int | None = None, *, plain: bool = False) -> Features:
        """Return the features that any step in a form may need.

        Args:
            form: One of the current step's forms.
            rows: Number of rows of every such step, with padding; None for the form's capacity.
            plain: Whether no such step has a shared pair or a rotation.
        """
        capacity = form.buffers.capacity
        rows = capacity.tokens if rows is None else rows
        capacity = dataclasses.replace(
            capacity, tokens=rows, ranks=capacity.ranks // capacity.tokens * rows, rotated=min(rows, capacity.rotated)
        )
        most = fixed_features(
            capacity, max_adapters=self.max_adapters, whole_granules=self.limits.whole_granules, plain=plain
        )
        return dataclasses.replace(most, tall=0) if self.limits.max_lora_rank <= WIDE_RANK else most

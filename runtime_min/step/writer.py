"""Steps of a served model: which adapter each token has, written to where all layers read it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scute_compile.diagnostics import Code, fail
from scute_compile.runtime_min.pool.directory import Field, values_per_granule
from scute_compile.runtime_min.pool.leases import ResidentFacts
from scute_compile.runtime_min.pool.packed_adapter import PackedAdapter
from scute_compile.runtime_min.pool.resident_pool import ResidentPool
from scute_compile.runtime_min.step.arguments import capacity_numbers, features_of, fixed_features
from scute_compile.runtime_min.step.layer import StepState
from scute_compile.runtime_min.step.plan import Capacity, StepBuffers, plan_step

DECODE_ROWS = 16
"""Most rows of one adapter in the decode form, which reads a factor once for every two of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedFacts:
    """What a model must know of a loaded adapter before any step."""

    sites: frozenset[int]
    """Indices of the layers that it touches."""
    terms: frozenset[int]
    """Indices of those where it has low-rank terms."""
    rank: int
    """Largest of its own terms and its shared pair."""
    pair_rank: int
    rotated: bool
    whole_granules: bool
    """Whether every rotation block's width is a multiple of a granule; diagonals count as whole."""

    @classmethod
    def of(cls, packed: PackedAdapter) -> LoadedFacts:
        """Read the facts off a packed adapter's directory rows."""
        records = packed.rows
        turned = records[:, Field.R_OFFSET] >= 0
        touched = turned | (records[:, Field.RANK] > 0)
        touched |= (records[:, Field.DS_OFFSET] >= 0) | (records[:, Field.SHIFT_OFFSET] >= 0)
        blocks = set(records[turned, Field.R_BLOCK].tolist()) - {1}
        pair_rank = max((pair.rank for pair in packed.pairs), default=0)
        return cls(
            sites=frozenset(touched.nonzero().flatten().tolist()),
            terms=frozenset((records[:, Field.RANK] > 0).nonzero().flatten().tolist()),
            rank=max(packed.own_rank, pair_rank),
            pair_rank=pair_rank,
            rotated=packed.rotated,
            whole_granules=all(block % values_per_granule(packed.dtype) == 0 for block in blocks),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSizes:
    """How large a step may be."""

    max_num_batched_tokens: int
    max_num_seqs: int
    """Most tokens of the decode form."""
    max_lora_rank: int
    """Ranks per token that the buffers hold from the start."""
    max_adapters: int
    fixed: bool
    """Whether every step is launched alike, whatever its adapters."""
    shares: int = 1
    """Among how many ranks terms are divided."""


class StepWriter:
    """Plans steps and fills their buffers; a step that is the same as the one before costs nothing."""

    def __init__(self, pool: ResidentPool, state: StepState, sizes: StepSizes) -> None:
        self._pool, self._state, self.sizes = pool, state, sizes
        self._buffers: dict[bool, StepBuffers] = {}
        """By form: True for prefill."""
        self._written: dict[bool, tuple[int, ...]] = {}
        self._features: dict[bool, list[int]] = {}
        self._slots: Mapping[str, int] | None = None
        self._facts: Mapping[int, ResidentFacts] = {}
        self._pairs: tuple[tuple[int, ...], ...] = ()
        self._whole_granules = True
        self.fit(())

    def fit(self, loaded: Iterable[LoadedFacts]) -> None:
        """Make the buffers large enough for every mix of these adapters; they never shrink."""
        facts = list(loaded)
        held = [buffers.capacity for buffers in self._buffers.values()]
        self._whole_granules = all(one.whole_granules for one in facts)
        shares = self.sizes.shares
        rank = -(-max([1, self.sizes.max_lora_rank, *(one.rank for one in facts)]) // shares) * shares
        pair_rank = max([16, *(one.pair_rank for one in facts), *(capacity.pair_ranks for capacity in held)])
        rotated = any(one.rotated for one in facts) or any(capacity.rotated for capacity in held)
        for prefill, tokens in ((True, self.sizes.max_num_batched_tokens), (False, self.sizes.max_num_seqs)):
            before = self._buffers.get(prefill)
            capacity = Capacity(
                tokens=tokens,
                ranks=max(tokens * rank, before.capacity.ranks if before else 0),
                pairs=len(self._pool.pairs),
                pair_ranks=pair_rank,
                rotated=tokens if rotated else 0,
                prefill=prefill,
            )
            if before is None or capacity != before.capacity:
                self._buffers[prefill] = StepBuffers(capacity, self._state.pages.device)
                self._written.pop(prefill, None)

    def begin(self, slots: Mapping[str, int] | None) -> None:
        """Start steps with these adapters, which are held until the last of them; None: with the base alone."""
        self._slots = slots
        self._written.clear()
        self._facts, self._pairs = self._pool.facts, self._pool.pairs

    def write(self, adapters: Sequence[str | None]) -> None:
        """Let the next call of the model give each token the adapter of the same place.

        Raises:
            ScuteError: SC804 when there are more tokens than the buffers hold.
        """
        tokens = len(adapters)
        self._state.tokens = tokens
        if self._slots is None:
            return
        if tokens > self.sizes.max_num_batched_tokens:
            fail(
                Code.SC804,
                where="a step",
                found=f"{tokens} tokens",
                expected=f"at most {self.sizes.max_num_batched_tokens}, for which the model was wrapped",
                next="split the batch, shorten the prompts, or wrap the model with a larger max_num_batched_tokens",
            )
        rows = tuple(-1 if name is None else self._slots[name] for name in adapters)
        prefill = self._is_prefill(rows)
        buffers = self._buffers[prefill]
        if self._written.get(prefill) != rows:
            plan = plan_step(rows, self._facts, self._pairs, buffers.capacity)
            buffers.fill(plan)
            self._written[prefill] = rows
            if self.sizes.fixed:
                features = fixed_features(
                    buffers.capacity,
                    max_adapters=self.sizes.max_adapters,
                    prefill=prefill,
                    whole_granules=self._whole_granules,
                )
            else:
                features = features_of(plan, whole_granules=self._whole_granules)
            self._features[prefill] = list(features.numbers())
        self._state.buffer = buffers.device_copy
        self._state.capacity = list(capacity_numbers(buffers.capacity))
        self._state.features = self._features[prefill]

    def _is_prefill(self, rows: Sequence[int]) -> bool:
        """Whether tiles of many tokens serve a step better; fixed steps go by their size alone."""
        if len(rows) > self.sizes.max_num_seqs:
            return True
        counts = Counter(rows)
        del counts[-1]
        return not self.sizes.fixed and max(counts.values(), default=0) > DECODE_ROWS

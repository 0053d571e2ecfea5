"""The step writer on the host: the form of a step, repeated rows, and buffers that grow with the adapters."""

from __future__ import annotations

import pytest
import torch

from scute_compile.base.shapes import gated_shape
from scute_compile.diagnostics import Code, ScuteError
from scute_compile.runtime_min.pool.resident_pool import ResidentPool
from scute_compile.runtime_min.step.writer import DECODE_ROWS_PER_ADAPTER, StepLimits, StepWriter
from tests.support.drawn_adapters import pair_of, sites_of, tenant

SITES = sites_of(gated_shape("small", layers=1, hidden=64, kv=32, mlp=128))


def writer_of(*, fixed: bool = False) -> StepWriter:
    """Return a writer for steps of up to 64 tokens, with adapters of four methods in its pool."""
    pool = ResidentPool(
        SITES, num_pages=300, max_adapters=4, dtype=torch.float32, device=torch.device("cpu"), shared_pages=64, pairs=1
    )
    pair = pair_of(SITES, 24, torch.float32)
    for method in ("lora", "ia3", "vera", "oft"):
        chosen = pair if method == "vera" else None
        pool.add(method, tenant(method, SITES, torch.float32, rank=20, block=2 if method == "oft" else 8, pair=chosen))
    pool.ensure(["lora", "ia3", "vera", "oft"])
    return StepWriter(pool, StepLimits(max_num_batched_tokens=64, max_num_seqs=32, fixed=fixed))


@pytest.mark.parametrize("fixed", [False, True])
def test_many_rows_of_one_adapter_are_a_prefill_step_unless_the_form_is_fixed(fixed: bool) -> None:
    writer = writer_of(fixed=fixed)
    writer.hold(["ia3"])
    for names, prefill in (
        (["ia3"] * DECODE_ROWS_PER_ADAPTER + [None] * 8, False),
        (["ia3"] * (DECODE_ROWS_PER_ADAPTER + 1), not fixed),
        ([None] * 32, False),
        ([None] * 33, True),
    ):
        writer.write(names)
        buffers, features = writer.arguments()
        assert features.prefill is buffers.capacity.prefill is prefill
        assert buffers.region("row_adapter")[: len(names)].tolist() == list(writer.forms[0].plan.rows)


def test_rows_that_repeat_are_planned_once_for_the_held_adapters() -> None:
    writer = writer_of()
    writer.hold(["ia3", None])
    writer.write(["ia3", None])
    first = writer.forms[0].plan
    writer.write([None] * 40)
    writer.write(["ia3", None])
    assert writer.forms[0].plan is first
    writer.write([None, "ia3"])
    assert writer.forms[0].plan is not first
    writer.hold(["ia3"])
    writer.write(["ia3", None])
    assert writer.forms[0].plan is not first


def test_adapters_are_held_until_the_next_hold_or_release() -> None:
    writer = writer_of()
    writer.hold(["ia3"])
    with pytest.raises(ScuteError):
        writer.pool.evict("ia3")
    with pytest.raises(ScuteError, match="unknown"):
        writer.hold(["unknown"])
    assert writer.adapted
    writer.hold([None])
    assert (writer.held, writer.adapted) == (True, False)
    writer.pool.evict("ia3")
    writer.release()
    assert not writer.held


def test_buffers_grow_with_the_adapters_and_never_shrink() -> None:
    writer = writer_of()
    for method in ("lora", "vera", "oft", "ia3"):
        writer.fit(writer.pool.packed_adapters[method])
    limits = writer.limits
    assert (limits.max_lora_rank, limits.pair_rank, limits.rotations, limits.whole_granules) == (20, 24, True, False)
    names = ["lora", "vera", "oft", "ia3"] * 4
    writer.hold(names)
    for step in (names, [*names, *names, *names]):
        writer.write(step)
        buffers, features = writer.arguments()
        rank = 24 if features.prefill else 20
        assert buffers.capacity.ranks == rank * buffers.capacity.tokens
        assert features.ranks <= buffers.capacity.ranks


def test_a_step_that_is_too_long_is_refused() -> None:
    writer = writer_of()
    with pytest.raises(ScuteError, match="65 tokens") as refused:
        writer.write([None] * 65)
    assert [found.code for found in refused.value.diagnostics] == [Code.SC804]

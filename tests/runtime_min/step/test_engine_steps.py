"""Steps of an engine on the host: their form, the copy of their metadata, and the variants of their launches."""

from __future__ import annotations

import pytest
import torch

from scute_compile.base.shapes import gated_shape
from scute_compile.runtime_min.pool.directory import DirectoryEntry
from scute_compile.runtime_min.pool.leases import ResidentFacts
from scute_compile.runtime_min.pool.resident_pool import ResidentPool
from scute_compile.runtime_min.step.arguments import Features
from scute_compile.runtime_min.step.plan import Capacity, StepBuffers, plan_step
from scute_compile.runtime_min.step.writer import StepLimits
from scute_compile.runtime_vllm.engine_steps import EngineSteps
from tests.support.drawn_adapters import pair_of, sites_of, tenant


def _steps(*, padded_beyond: bool) -> EngineSteps:
    site = DirectoryEntry(name="o_proj", in_features=64, out_features=64, gemm="o_proj")
    pool = ResidentPool(
        (site,), num_pages=4, max_adapters=2, dtype=torch.float32, device=torch.device("cpu"), shared_pages=1, pairs=1
    )
    limits = StepLimits(
        max_num_batched_tokens=64,
        max_num_seqs=8,
        max_lora_rank=4,
        pair_rank=4,
        rotations=False,
        padded_beyond=padded_beyond,
    )
    return EngineSteps(pool, limits)


def test_a_step_is_written_in_the_form_that_its_padded_rows_have() -> None:
    steps = _steps(padded_beyond=False)
    steps.write([None] * 5)
    assert [steps.form_for(rows) is not None for rows in (4, 5, 8, 9)] == [False, True, True, False]
    steps.write([None] * 9)
    assert [steps.form_for(rows) is not None for rows in (8, 9, 64)] == [False, True, True]


def test_a_step_that_may_be_padded_to_the_other_form_is_written_in_both() -> None:
    steps = _steps(padded_beyond=True)
    steps.write([None] * 5)
    assert [steps.form_for(rows) is not None for rows in (4, 5, 8, 9, 64)] == [False, True, True, True, True]


@pytest.mark.parametrize("tokens", [16, 1024])
def test_a_step_is_copied_whole_whatever_was_in_the_buffers_before(tokens: int) -> None:
    capacity = Capacity(
        tokens=tokens, ranks=tokens * 256, pairs=1, pair_ranks=256, rotated=tokens, prefill=tokens == 1024
    )
    facts = {
        0: ResidentFacts(rank=16),
        1: ResidentFacts(rank=0, pair=0, pair_rank=256),
        2: ResidentFacts(rank=3, rotated=True),
    }
    buffers = StepBuffers(capacity, torch.device("cpu"))
    for rows in ([row % 3 for row in range(tokens)], [2, -1, 1, 0, 0], [-1]):
        plan = plan_step(rows, facts, [[256, 0, 0, 0, 0, 0, 0, 0]], capacity)
        buffers.fill(plan)
        for name, values in plan.regions.items():
            assert buffers.region(name)[: len(values)].tolist() == list(values), name
        assert buffers.region("row_adapter")[len(rows) :].eq(-1).all()
        if capacity.prefill:
            assert buffers.region("tile")[4 * plan.tiles :: 4].eq(-1).all()
        else:
            assert not buffers.region("block")[4 * plan.blocks :].any()
            assert buffers.region("work")[4 * plan.work :].eq(-1).all()
            assert buffers.region("segment")[4 * plan.segments :].eq(-1).all()


def _variant(features: Features) -> tuple[bool, ...]:
    """Return the features that select among compiled variants of the kernels."""
    return features.owned, features.shared, features.tall > 0, features.rotated > 0, features.prefill


@pytest.mark.parametrize("rows", [5, 20])
@pytest.mark.parametrize("rotations", [True, False])
def test_eager_steps_need_only_kernels_that_the_rehearsal_compiled(rotations: bool, rows: int) -> None:
    steps = _five_methods(rotations=rotations)
    methods = steps.pool.names
    seen = set()
    for mix in ((methods[0],), *((method, None) for method in methods), methods):
        names = [mix[row % len(mix)] for row in range(rows)]
        steps.hold(names)
        steps.write(names)
        _, rehearsed = steps.rehearsal(rows)
        _, features = steps.arguments_for(rows, fixed=False)
        assert _variant(features) in {_variant(variant) for variant in rehearsed}
        seen.add(_variant(features))
    steps.release()
    assert len(seen) == 2


def _five_methods(*, rotations: bool, max_lora_rank: int = 32) -> EngineSteps:
    sites = sites_of(gated_shape("small", layers=1, hidden=64, kv=32, mlp=128))
    pool = ResidentPool(
        sites, num_pages=300, max_adapters=4, dtype=torch.float32, device=torch.device("cpu"), shared_pages=64, pairs=1
    )
    methods = ("lora", "ia3", "vera", *(("oft",) if rotations else ()))
    pair = pair_of(sites, 16, torch.float32)
    for method in methods:
        pool.add(method, tenant(method, sites, torch.float32, rank=4, block=8, pair=pair if method == "vera" else None))
    pool.ensure(methods)
    limits = StepLimits(
        max_num_batched_tokens=64, max_num_seqs=8, max_lora_rank=max_lora_rank, pair_rank=16, rotations=rotations
    )
    return EngineSteps(pool, limits)


def test_steps_are_plain_without_shared_pairs_and_rotations() -> None:
    steps = _five_methods(rotations=True)
    for mix, plain in ((("lora",), True), (("ia3", None), True), (("vera", "lora"), False), (("oft",), False)):
        steps.hold(mix)
        steps.write(mix)
        steps.current = True
        assert steps.plain is plain
        _, features = steps.arguments_for(len(mix), fixed=True, plain=True)
        assert (features.shared, features.rotated, features.blocks) == (False, 0, 0)
        _, features = steps.arguments_for(len(mix), fixed=True)
        assert features.shared
        assert features.rotated
    steps.hold(("lora",))
    steps.write(("lora",))
    assert steps.plain
    steps.current = False
    assert not steps.plain, "the written step may be the previous one"
    steps.current, steps.rehearsing = True, True
    assert not steps.plain, "stand-ins are empty, later adapters may not be"
    steps.release()


def test_engines_of_small_ranks_launch_nothing_for_large_ranks() -> None:
    for max_lora_rank, tall in ((16, False), (17, True)):
        steps = _five_methods(rotations=False, max_lora_rank=max_lora_rank)
        steps.hold(["lora"])
        steps.write(["lora"] * 8)
        assert all(bool(steps.arguments_for(8, fixed=fixed)[1].tall) is tall for fixed in (True, False))
        steps.release()

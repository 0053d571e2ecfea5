"""On SmolLM2-135M, nine adapters and a base row in one batch equal PEFT: at one rank and at three."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from tests.runtime_vllm.adapters_by_method import BOUND, SERVED, Tenants, prompt_of
from tests.runtime_vllm.engine import SEVERAL_PROCESSES, Answer, Engine, Engines, Row
from tests.support.artifact_files import tampered
from tests.support.dropped_slots import DROPPED

DROPS = ("one A of LoRA", "s of DoRA", "s of IA3", "d of VeRA", "one R of OFT")
REPORTED = 20
RANKS: Mapping[int, Mapping[str, str]] = {1: {}, 3: SEVERAL_PROCESSES}


@pytest.fixture(scope="module", params=RANKS, ids=lambda tp: f"tp{tp}")
def tp(request: pytest.FixtureRequest) -> int:
    ranks: int = request.param
    return ranks


@pytest.fixture(scope="module")
def engine(tp: int, smollm2: Tenants, engines: Engines) -> Iterator[Engine]:
    with engines.started(
        f"smollm2-{tp}",
        smollm2.base,
        settings=RANKS[tp],
        tensor_parallel_size=tp,
        max_logprobs=REPORTED,
        logprobs=REPORTED,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def batch(engine: Engine, tp: int, smollm2: Tenants) -> dict[str | None, Answer]:
    answers = engine.generate([smollm2.row(name, seed, tp=tp) for seed, name in enumerate(SERVED)])
    return dict(zip(SERVED, answers, strict=True))


@pytest.mark.parametrize("name", SERVED)
def test_each_row_equals_peft_on_a_real_base(
    name: str | None, batch: dict[str | None, Answer], smollm2: Tenants
) -> None:
    smollm2.assert_equal(batch[name], name)
    if name is not None:
        assert smollm2.difference(batch[name], None).worst > 10 * BOUND


@pytest.mark.parametrize("what", DROPS)
def test_a_dropped_slot_changes_the_answer_on_a_real_base(what: str, engine: Engine, tp: int, smollm2: Tenants) -> None:
    recipe, _, drop = DROPPED[what]
    damaged = tampered(smollm2.artifact(recipe, tp=tp), f"without-{DROPS.index(what)}", drop)
    (dropped,) = engine.generate([Row(prompt=prompt_of(3), adapter=smollm2.request(damaged))])
    assert smollm2.difference(dropped, recipe).worst > 10 * BOUND

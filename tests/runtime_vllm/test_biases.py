"""On a base whose q, k and v have biases, the shift `b` is correct for every method that needs it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime_vllm.adapters_by_method import BOUND, Tenants, prompt_of
from tests.runtime_vllm.engine import Answer, Engine, Engines, Row
from tests.support.artifact_files import tampered
from tests.support.dropped_slots import DROPPED

NAMES = (None, "dora", "ia3", "lora-bias-on-b", "lora-base-bias", "oft", "vera")
DROPS = ("s of DoRA", "s of IA3", *(what for what, (_, base, _) in DROPPED.items() if base == "qwen2"))


@pytest.fixture(scope="module")
def engine(qwen2: Tenants, engines: Engines) -> Iterator[Engine]:
    with engines.started("biases", qwen2.base) as running:
        yield running


@pytest.fixture(scope="module")
def batch(engine: Engine, qwen2: Tenants) -> dict[str | None, Answer]:
    answers = engine.generate([qwen2.row(name, seed) for seed, name in enumerate(NAMES)])
    return dict(zip(NAMES, answers, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_each_row_equals_peft_beside_biases(name: str | None, batch: dict[str | None, Answer], qwen2: Tenants) -> None:
    qwen2.assert_equal(batch[name], name)


@pytest.mark.parametrize("what", DROPS)
def test_a_dropped_slot_changes_the_answer_beside_biases(what: str, engine: Engine, qwen2: Tenants) -> None:
    recipe, _, drop = DROPPED[what]
    damaged = tampered(qwen2.artifact(recipe), f"without-{DROPS.index(what)}", drop)
    dropped, whole = engine.generate([Row(prompt=prompt_of(3), adapter=qwen2.request(damaged)), qwen2.row(recipe, 3)])
    qwen2.assert_equal(whole, recipe)
    assert qwen2.difference(dropped, recipe).worst > 10 * BOUND

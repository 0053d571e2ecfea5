"""Nine adapters of five methods and a base row in one batch equal PEFT, and every slot takes part."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime_vllm.adapters_by_method import BOUND, SERVED, Tenants, prompt_of
from tests.runtime_vllm.engine import Answer, Engine, Engines, Row
from tests.support.artifact_files import tampered
from tests.support.dropped_slots import DROPPED

DROPS = tuple(what for what, (recipe, base, _) in DROPPED.items() if base == "llama" and recipe != "vera-regenerated")


@pytest.fixture(scope="module")
def engine(llama: Tenants, engines: Engines) -> Iterator[Engine]:
    with engines.started("mixed", llama.base) as running:
        yield running


@pytest.fixture(scope="module")
def batch(engine: Engine, llama: Tenants) -> dict[str | None, Answer]:
    """One batch: a row per adapter and one of the base, with different prompts."""
    answers = engine.generate([llama.row(name, seed) for seed, name in enumerate(SERVED)])
    return dict(zip(SERVED, answers, strict=True))


@pytest.mark.parametrize("name", SERVED)
def test_each_row_of_the_batch_equals_peft(name: str | None, batch: dict[str | None, Answer], llama: Tenants) -> None:
    llama.assert_equal(batch[name], name)


@pytest.mark.parametrize("name", SERVED[1:])
def test_no_adapter_is_ignored(name: str, batch: dict[str | None, Answer], llama: Tenants) -> None:
    assert llama.difference(batch[name], None).worst > 100 * BOUND


@pytest.mark.parametrize("what", DROPS)
def test_a_dropped_slot_changes_the_answer(what: str, engine: Engine, llama: Tenants) -> None:
    """The comparison fails when the artifact lacks one slot, so no slot is ignored."""
    recipe, _, drop = DROPPED[what]
    damaged = tampered(llama.artifact(recipe), f"without-{DROPS.index(what)}", drop)
    row = Row(prompt=prompt_of(3), adapter=llama.request(damaged))
    dropped, whole = engine.generate([row, llama.row(recipe, 3)])
    llama.assert_equal(whole, recipe)
    assert llama.difference(dropped, recipe).worst > 10 * BOUND


def test_one_prompt_gets_a_different_answer_from_each_adapter(engine: Engine, llama: Tenants) -> None:
    names = ("lora", "dora", "ia3", "vera", "oft")
    rows = [Row(prompt=prompt_of(8), adapter=llama.row(name, 8).adapter) for name in names]
    answers = engine.generate(rows)
    for name, answer in zip(names, answers, strict=True):
        llama.assert_equal(answer, name)
    assert len({answer.logprobs[0][answer.tokens[0]] for answer in answers}) == len(names)


def test_several_rows_share_an_adapter(engine: Engine, llama: Tenants) -> None:
    llama.assert_served(engine, "vera", "vera-twin", None, "vera", "oft", "vera-twin", "vera")


def test_a_row_does_not_depend_on_the_rest_of_the_batch(engine: Engine, llama: Tenants) -> None:
    alone = {name: engine.generate([llama.row(name, 6)])[0] for name in SERVED}
    together = engine.generate([llama.row(name, 6) for name in SERVED])
    for name, answer in zip(SERVED, together, strict=True):
        assert answer.tokens == alone[name].tokens
        llama.assert_equal(alone[name], name)


def test_adalora_equals_peft(engine: Engine, llama: Tenants) -> None:
    llama.assert_served(engine, "adalora", None)

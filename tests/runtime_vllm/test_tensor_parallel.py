"""With two ranks the same batch equals PEFT, from artifacts that were compiled for two ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime_vllm.adapters_by_method import BOUND, SERVED, Tenants, prompt_of
from tests.runtime_vllm.engine import SEVERAL_PROCESSES, Answer, Engine, Engines, RefusedError, Row, tried
from tests.support.artifact_files import tampered
from tests.support.dropped_slots import DROPPED

TP = 2
NAMES = (*SERVED, "lora-bias-on-b", "ia3-inputs")
"""Only one rank may add a bias on B of a row-parallel layer."""
DROPS = ("one B of LoRA", "s of DoRA", "R of IA3 on o_proj", "e of VeRA", "R of OFT")


@pytest.fixture(scope="module")
def engine(llama: Tenants, engines: Engines) -> Iterator[Engine]:
    with engines.started("tp2", llama.base, settings=SEVERAL_PROCESSES, tensor_parallel_size=TP) as running:
        yield running


@pytest.fixture(scope="module")
def batch(engine: Engine, llama: Tenants) -> dict[str | None, Answer]:
    answers = engine.generate([llama.row(name, seed, tp=TP) for seed, name in enumerate(NAMES)])
    return dict(zip(NAMES, answers, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_each_row_equals_peft_on_two_ranks(name: str | None, batch: dict[str | None, Answer], llama: Tenants) -> None:
    llama.assert_equal(batch[name], name)


@pytest.mark.parametrize("what", DROPS)
def test_a_dropped_slot_changes_the_answer_on_two_ranks(what: str, engine: Engine, llama: Tenants) -> None:
    recipe, _, drop = DROPPED[what]
    damaged = tampered(llama.artifact(recipe, tp=TP), f"without-{DROPS.index(what)}", drop)
    (dropped,) = engine.generate([Row(prompt=prompt_of(3), adapter=llama.request(damaged))])
    assert llama.difference(dropped, recipe).worst > 10 * BOUND


def test_a_stock_adapter_is_sharded_by_the_engine(engine: Engine, llama: Tenants) -> None:
    names = ("rslora", None, "lora", "lora-head", "lora-only-head")
    rows = [
        Row(prompt=prompt_of(seed), adapter=llama.request(llama.folder(name)) if name else None)
        for seed, name in enumerate(names)
    ]
    for name, answer in zip(names, engine.generate(rows), strict=True):
        llama.assert_equal(answer, name)


@pytest.mark.parametrize("compiled_for", [1, 4])
@pytest.mark.parametrize("name", ["dora", "oft"])
def test_an_artifact_for_another_number_of_ranks_is_served_correctly_or_refused_with_both_numbers(
    compiled_for: int, name: str, engine: Engine, llama: Tenants
) -> None:
    adapter = llama.request(llama.artifact(name, tp=compiled_for))
    loaded = tried(lambda: engine.load(adapter))
    if isinstance(loaded, RefusedError):
        text = str(loaded)
        assert f"tp {compiled_for}" in text or f"{compiled_for} rank" in text
        assert f"tp {TP}" in text or f"{TP} rank" in text
        assert f"--tp {TP}" in text
        assert adapter.lora_id not in engine.loaded()
    else:
        (answer,) = engine.generate([Row(prompt=prompt_of(5), adapter=adapter)])
        llama.assert_equal(answer, name)
    good, base = engine.generate([llama.row(name, 2, tp=TP), llama.row(None, 3)])
    llama.assert_equal(good, name)
    llama.assert_equal(base, None)

"""LoRA of the output head is served beside other adapters, and is skipped in steps without it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime_vllm.adapters_by_method import BOUND, Tenants, prompt_of
from tests.runtime_vllm.engine import Engine, Engines, Row

MAX_LORAS = 2
HEADS = ("lora-head", "lora-only-head")
"""The second has the smaller rank: at the index of the first, it must not use the rest of the first's weights."""


@pytest.fixture(scope="module")
def engine(llama: Tenants, engines: Engines) -> Iterator[Engine]:
    with engines.started("logits", llama.base, max_loras=MAX_LORAS, max_cpu_loras=3) as running:
        running.ask("additions")
        yield running


@pytest.fixture(autouse=True)
def emptied(engine: Engine, llama: Tenants) -> None:
    """Start each test with an engine without adapters, and with no additions to logits."""
    for lora_id in engine.loaded():
        engine.ask("unload", lora_id=lora_id)
    llama.assert_served(engine, None)
    engine.ask("additions")


def _row(llama: Tenants, name: str | None, seed: int) -> Row:
    return Row(prompt=prompt_of(seed), adapter=llama.request(llama.folder(name)) if name else None)


def _served(engine: Engine, llama: Tenants, *names: str | None) -> int:
    """Assert that PEFT's folders are served in one batch; returns how often vLLM added to logits."""
    answers = engine.generate([_row(llama, name, seed) for seed, name in enumerate(names)])
    for name, answer in zip(names, answers, strict=True):
        llama.assert_equal(answer, name)
    return int(engine.ask("additions"))


def _unload(engine: Engine, llama: Tenants, name: str) -> None:
    assert engine.unload(llama.request(llama.folder(name)))


def test_nothing_is_added_without_adapters_of_the_head(engine: Engine, llama: Tenants) -> None:
    assert _served(engine, llama, "lora", None, "rslora") == 0
    assert engine.ask("logits_equal_the_bases", rows=5)
    llama.assert_served(engine, "dora", "oft", None)
    assert engine.ask("additions") == 0


@pytest.mark.parametrize("name", HEADS)
def test_an_adapter_of_the_head_equals_peft_beside_others(name: str, engine: Engine, llama: Tenants) -> None:
    assert _served(engine, llama, name, "lora", None, name) > 0
    (answer,) = engine.generate([_row(llama, name, 1)])
    assert llama.difference(answer, None).worst > 100 * BOUND


def test_nothing_is_added_after_the_last_adapter_of_the_head_was_unloaded(engine: Engine, llama: Tenants) -> None:
    _served(engine, llama, "lora-head", "lora-only-head", None)
    _unload(engine, llama, "lora-head")
    assert _served(engine, llama, "lora", "lora-only-head", None) > 0
    _unload(engine, llama, "lora-only-head")
    assert _served(engine, llama, None) == 0
    assert _served(engine, llama, "lora", "rslora", None) == 0
    assert engine.ask("logits_equal_the_bases", rows=5)


@pytest.mark.parametrize("before", HEADS)
@pytest.mark.parametrize("after", [*HEADS, "lora"])
@pytest.mark.parametrize("unloaded", [False, True])
def test_an_adapter_index_of_the_head_is_reused(
    before: str, after: str, unloaded: bool, engine: Engine, llama: Tenants
) -> None:
    """One index stays filled, so LoRA is added: the other index must hold only the new adapter's weights."""
    stays, comes = f"{before}-twin-stays", f"{after}-twin-comes"
    _served(engine, llama, before, stays)
    if unloaded:
        _unload(engine, llama, before)
    assert _served(engine, llama, stays, comes, None) > 0
    assert _served(engine, llama, "rslora", "lora", None) == 0
    assert _served(engine, llama, comes, "rslora", None) == 0 or after in HEADS


def test_stand_ins_of_the_warm_up_have_no_weights_of_the_head(engine: Engine, llama: Tenants) -> None:
    engine.ask("rehearse", tokens=4, adapters=MAX_LORAS + 1)
    assert engine.ask("logits_equal_the_bases", rows=4)
    assert engine.ask("additions") == 0
    engine.ask("end_of_rehearsals")
    assert _served(engine, llama, "lora", "rslora", None) == 0
    assert _served(engine, llama, "lora-head", "rslora", None) > 0
    engine.ask("rehearse", tokens=4, adapters=MAX_LORAS + 1)
    engine.ask("end_of_rehearsals")
    assert _served(engine, llama, "lora", "rslora", None) == 0


def test_buffers_that_a_sleep_overwrote_are_not_added(engine: Engine, llama: Tenants) -> None:
    assert _served(engine, llama, "lora", "rslora", None) == 0
    engine.ask("lose_buffers_of_logits")
    assert _served(engine, llama, "lora", "rslora", None) == 0
    assert _served(engine, llama, "lora-only-head", "lora", None) > 0

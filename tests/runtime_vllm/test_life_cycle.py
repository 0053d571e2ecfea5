"""Adapters share few adapter indices, and every answer is correct whichever adapter had the index before."""

from __future__ import annotations

import pytest

from tests.runtime_vllm.adapters_by_method import SERVED, Tenants, prompt_of
from tests.runtime_vllm.engine import Adapter, Engine, RefusedError, Row

HELD = 3
"""The engine's max_cpu_loras."""
EIGHT = ("lora", "oft", "ia3", "dora", "vera", "rsdora-attention", "oft-shared", "vera-twin")


@pytest.fixture
def engine(crowded: Engine) -> Engine:
    return crowded


def _adapter(llama: Tenants, name: str) -> Adapter:
    return llama.request(llama.artifact(name))


def test_an_adapter_is_loaded_unloaded_and_loaded_again(engine: Engine, llama: Tenants) -> None:
    adapter = _adapter(llama, "dora")
    assert engine.load(adapter)
    assert adapter.lora_id in engine.loaded()
    llama.assert_served(engine, "dora", None)
    assert engine.unload(adapter)
    assert adapter.lora_id not in engine.loaded()
    llama.assert_served(engine, None, "lora")
    assert engine.load(adapter)
    llama.assert_served(engine, "dora", None)


def test_unloading_an_unknown_adapter_changes_nothing(engine: Engine, llama: Tenants) -> None:
    engine.load(_adapter(llama, "ia3"))
    assert not engine.unload(Adapter(name="unknown", lora_id=4242, path="unknown"))
    llama.assert_served(engine, "ia3", None)


def test_loading_twice_is_loading_once(engine: Engine, llama: Tenants) -> None:
    adapter = _adapter(llama, "oft")
    engine.load(adapter)
    engine.load(adapter)
    assert engine.loaded().count(adapter.lora_id) == 1
    llama.assert_served(engine, "oft")
    assert engine.unload(adapter)
    assert adapter.lora_id not in engine.loaded()


def test_unloading_one_adapter_keeps_the_others(engine: Engine, llama: Tenants) -> None:
    llama.assert_served(engine, "vera", "vera-twin", None)
    engine.unload(_adapter(llama, "vera"))
    llama.assert_served(engine, "vera-twin", None, seed=4)


@pytest.mark.parametrize("before", EIGHT)
def test_an_adapter_index_is_reused_by_every_other_method(before: str, engine: Engine, llama: Tenants) -> None:
    """An adapter does not inherit slots from the adapter that had its index before."""
    for after in ("lora", "ia3", "vera", "oft"):
        if after != before:
            llama.assert_served(engine, before, before)
            engine.unload(_adapter(llama, before))
            llama.assert_served(engine, after, None)
            engine.unload(_adapter(llama, after))


def test_more_adapters_than_max_loras_are_served_in_one_batch(engine: Engine, llama: Tenants) -> None:
    llama.assert_served(engine, *EIGHT, None)


def test_eight_adapters_cycle_through_few_indices(engine: Engine, llama: Tenants) -> None:
    for seed in range(3):
        for name in EIGHT:
            llama.assert_served(engine, name, None, seed=seed)
            assert len(engine.loaded()) <= HELD


def test_every_adapter_is_served_beside_a_folder(engine: Engine, llama: Tenants) -> None:
    folder = Row(prompt=prompt_of(2), adapter=llama.request(llama.folder("rslora")))
    for name in SERVED:
        other, stock = engine.generate([llama.row(name, 1), folder])
        llama.assert_equal(other, name)
        llama.assert_equal(stock, "rslora")


def test_the_least_recently_used_adapter_is_evicted(engine: Engine, llama: Tenants) -> None:
    first, second, third, fourth = (_adapter(llama, name) for name in EIGHT[:4])
    for adapter in (first, second, third):
        engine.load(adapter)
    llama.assert_served(engine, EIGHT[0])
    engine.load(fourth)
    assert set(engine.loaded()) == {first.lora_id, third.lora_id, fourth.lora_id}
    llama.assert_served(engine, EIGHT[0], EIGHT[3])
    llama.assert_served(engine, EIGHT[1], None)


def test_a_pinned_adapter_stays(engine: Engine, llama: Tenants) -> None:
    pinned = _adapter(llama, "oft")
    engine.load(pinned)
    assert engine.pin(pinned)
    for name in ("lora", "dora", "ia3", "vera", "vera-twin"):
        llama.assert_served(engine, name, None)
        assert pinned.lora_id in engine.loaded()
    llama.assert_served(engine, "oft", "dora", None)
    assert engine.unload(pinned)
    llama.assert_served(engine, "lora", "dora", None)


def test_pinning_an_unknown_adapter_is_refused(engine: Engine, llama: Tenants) -> None:
    with pytest.raises(RefusedError, match="4242"):
        engine.pin(Adapter(name="unknown", lora_id=4242, path="unknown"))
    llama.assert_served(engine, "lora", None)


@pytest.mark.parametrize("loading", [("lora",), ("lora", "oft"), ("lora", "oft", "ia3", "vera")])
def test_a_running_request_keeps_its_adapter_while_others_are_loaded(
    loading: tuple[str, ...], engine: Engine, llama: Tenants
) -> None:
    names = ("dora", None)
    rows = [llama.row(name, seed) for seed, name in enumerate(names)]
    answers, refusals = engine.meanwhile(rows, [("load", _adapter(llama, name)) for name in loading])
    assert refusals == ("",) * len(loading)
    for name, answer in zip(names, answers, strict=True):
        llama.assert_equal(answer, name)
    for name in loading:
        llama.assert_served(engine, name, "dora")


def test_a_refused_load_takes_no_index(engine: Engine, llama: Tenants) -> None:
    for _ in range(HELD + 1):
        with pytest.raises(RefusedError):
            engine.load(_adapter(llama, "lora-rank-32"))
    llama.assert_served(engine, "lora", "dora", None)
    llama.assert_served(engine, *EIGHT)

"""Adapters that can't be served correctly are refused by name, and the engine still serves the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime_vllm.adapters_by_method import Tenants, prompt_of
from tests.runtime_vllm.bad_adapters import BAD, a_folder_with_one_level_too_many
from tests.runtime_vllm.engine import Adapter, Engine, Engines, RefusedError, Row, tried


@pytest.fixture
def engine(crowded: Engine) -> Engine:
    return crowded


def _assert_serves_others(engine: Engine, llama: Tenants, refused: Adapter) -> None:
    """Assert that the refused adapter is not loaded, and that the base, artifacts and folders are served."""
    assert refused.lora_id not in engine.loaded()
    llama.assert_served(engine, None, "dora", "oft")
    folder = Row(prompt=prompt_of(11), adapter=llama.request(llama.folder("rslora")))
    for answer, name in zip(engine.generate([folder, Row(prompt=prompt_of(1))]), ("rslora", None), strict=True):
        llama.assert_equal(answer, name)


def _assert_contains(refusal: str, words: tuple[str, ...]) -> None:
    text = refusal.lower()
    assert not [word for word in words if word not in text], text


@pytest.mark.parametrize("what", BAD)
def test_loading_is_refused_by_name_and_the_rest_is_served(what: str, engine: Engine, llama: Tenants) -> None:
    bad = llama.request(BAD[what].made(llama))
    with pytest.raises(RefusedError) as refused:
        engine.load(bad)
    _assert_contains(str(refused.value), BAD[what].words)
    _assert_serves_others(engine, llama, bad)


@pytest.mark.parametrize("what", BAD)
def test_a_request_for_an_adapter_that_is_not_loaded_is_refused_and_the_rest_is_served(
    what: str, engine: Engine, llama: Tenants
) -> None:
    """In one process the call has the reason; with several the one request ends, and the log has the reason."""
    bad = llama.request(BAD[what].made(llama))
    written = len(engine.log)
    rows = [llama.row("dora", 1), Row(prompt=prompt_of(2), adapter=bad), llama.row(None, 3)]
    answers = tried(lambda: engine.generate(rows, partly=True))
    if isinstance(answers, RefusedError):
        _assert_contains(str(answers), BAD[what].words)
    else:
        assert answers[1].ended in ("abort", "error")
        assert not answers[1].tokens
        _assert_contains(engine.log[written:], BAD[what].words)
        llama.assert_equal(answers[0], "dora")
        llama.assert_equal(answers[2], None)
    _assert_serves_others(engine, llama, bad)


def test_a_refused_request_leaves_nothing_behind(engine: Engine, llama: Tenants) -> None:
    """A request that is left would block the next call."""
    bad = llama.request(BAD["a changed byte"].made(llama))
    with pytest.raises(RefusedError) as refused:
        engine.generate([llama.row("dora", 1), Row(prompt=prompt_of(2), adapter=bad)])
    assert refused.value.left == 0


def test_an_adapter_that_was_refused_is_served_once_it_is_corrected(
    engine: Engine, llama: Tenants, tmp_path: Path
) -> None:
    adapter = llama.request(tmp_path / "later")
    with pytest.raises(RefusedError):
        engine.load(adapter)
    llama.compiled(llama.folder("dora"), tmp_path, name="later")
    engine.load(adapter)
    (answer,) = engine.generate([Row(prompt=prompt_of(2), adapter=adapter)])
    llama.assert_equal(answer, "dora")


def test_a_folder_with_one_level_too_many_is_served_correctly_or_refused(engine: Engine, llama: Tenants) -> None:
    """Stock vLLM loads such a folder and serves the base."""
    adapter = llama.request(a_folder_with_one_level_too_many(llama))
    loaded = tried(lambda: engine.load(adapter))
    if isinstance(loaded, RefusedError):
        _assert_contains(str(loaded), ("inner.model",))
    else:
        (answer,) = engine.generate([Row(prompt=prompt_of(2), adapter=adapter)])
        llama.assert_equal(answer, "lora")


@pytest.fixture(scope="module")
def cramped(llama: Tenants, engines: Engines) -> Iterator[Engine]:
    """An engine with a small pool and without rotations."""
    settings = {"SCUTE_VLLM_POOL_MIB": "1", "SCUTE_VLLM_ROTATIONS": "0"}
    with engines.started("cramped", llama.base, settings=settings, max_lora_rank=128) as running:
        yield running


LIMITS = {
    "the pool is too small": ("lora-rank-128", ("scute_vllm_pool_mib",)),
    "rotations are off": ("oft", ("scute_vllm_rotations",)),
    "rotations are off, diagonal ones too": ("ia3-inputs", ("scute_vllm_rotations",)),
}


@pytest.mark.parametrize("what", LIMITS)
@pytest.mark.parametrize("way", ["loaded", "asked for"])
def test_a_limit_that_is_exceeded_is_named_with_its_setting(
    what: str, way: str, cramped: Engine, llama: Tenants
) -> None:
    name, words = LIMITS[what]
    bad = llama.request(llama.artifact(name))
    rows = [llama.row(None, 1), Row(prompt=prompt_of(2), adapter=bad)]
    with pytest.raises(RefusedError) as refused:
        _ = cramped.load(bad) if way == "loaded" else cramped.generate(rows)
    _assert_contains(str(refused.value), words)
    assert bad.lora_id not in cramped.loaded()
    llama.assert_served(cramped, None, "lora", "dora", "vera")


def _refused_by_option(engine: Engine, llama: Tenants, path: Path, option: str, words: tuple[str, ...]) -> None:
    adapter = llama.request(path)
    engine.unload(adapter)
    with engine.with_option(option, value=True), pytest.raises(RefusedError) as refused:
        engine.load(adapter)
    _assert_contains(str(refused.value), ("sc811", *words))
    assert adapter.lora_id not in engine.loaded()


@pytest.mark.parametrize("option", ["fully_sharded_loras", "enable_tower_connector_lora"])
def test_artifacts_are_refused_by_engines_with_an_option(option: str, cramped: Engine, llama: Tenants) -> None:
    _refused_by_option(cramped, llama, llama.artifact("dora"), option, (option.split("_")[1],))
    llama.assert_served(cramped, "dora", None)


def test_all_adapters_are_refused_where_steps_are_split(cramped: Engine, llama: Tenants) -> None:
    for path in (llama.artifact("dora"), llama.folder("lora")):
        _refused_by_option(cramped, llama, path, "splits_steps", ("microbatches",))
    with cramped.with_option("stock_kernels", value=True):  # artifacts run in the plugin's layers all the same
        _refused_by_option(cramped, llama, llama.artifact("dora"), "splits_steps", ("microbatches",))
    llama.assert_served(cramped, "dora", None)


def test_a_full_pool_evicts_adapters(cramped: Engine, llama: Tenants) -> None:
    """max_loras is 16 and the pool has 1 MiB: more adapters than pages, one after the other."""
    names = [f"rslora-twin-{number}" for number in range(8)]
    for name in names:
        llama.assert_served(cramped, name, None)


def test_a_batch_that_needs_more_than_the_pool_is_answered_or_refused(cramped: Engine, llama: Tenants) -> None:
    names = [f"rslora-twin-{number}" for number in range(12)]
    answers = tried(lambda: cramped.generate([llama.row(name, 5) for name in names]))
    if isinstance(answers, RefusedError):
        _assert_contains(str(answers), ("scute_vllm_pool_mib",))
    else:
        for name, answer in zip(names, answers, strict=True):
            llama.assert_equal(answer, name)
    llama.assert_served(cramped, None, "dora")

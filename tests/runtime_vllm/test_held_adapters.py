"""Files and loaded adapters may change while requests use them: the engine continues, and answers stay correct."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runtime_vllm.adapters_by_method import Tenants, prompt_of
from tests.runtime_vllm.conftest import LONG
from tests.runtime_vllm.engine import SEVERAL_PROCESSES, Adapter, Engine, Engines, RefusedError, Row

FIVE = ("lora", "dora", "ia3", "vera", "oft")
"""More than max_loras, 2, and more than max_cpu_loras, 3."""


@pytest.fixture
def engine(crowded: Engine) -> Engine:
    return crowded


def _copies(llama: Tenants, names: Sequence[str], tmp_path: Path, *, raw: bool = False) -> list[Adapter]:
    """Return adapters whose files belong to one test."""
    adapters = []
    for name in names:
        if raw:
            shutil.copytree(llama.folder(name), tmp_path / "folders" / name)
            adapters.append(llama.request(tmp_path / "folders" / name))
        else:
            adapters.append(llama.request(llama.compiled(llama.folder(name), tmp_path / "store", name=name)))
    return adapters


def _rows(adapters: Sequence[Adapter]) -> list[Row]:
    return [Row(prompt=prompt_of(seed), adapter=adapter) for seed, adapter in enumerate(adapters)]


@pytest.mark.parametrize(
    ("names", "raw"),
    [(FIVE, False), (tuple(f"lora-twin-{number}" for number in range(5)), True)],
    ids=["artifacts", "folders"],
)
def test_waiting_requests_need_no_files_of_their_adapters(
    names: tuple[str, ...], raw: bool, engine: Engine, llama: Tenants, tmp_path: Path
) -> None:
    """All requests were admitted; ranks need some of the adapters again after their files were deleted."""
    adapters = _copies(llama, names, tmp_path, raw=raw)
    answers, refusals = engine.meanwhile(_rows(adapters), [("remove", adapter.path) for adapter in adapters])
    assert refusals == ("",) * len(adapters)
    for name, answer in zip(names, answers, strict=True):
        llama.assert_equal(answer, name)
    for name in ("rslora", "rsdora-attention", "oft-shared"):
        llama.assert_served(engine, name, None)
    with pytest.raises(RefusedError, match=adapters[0].name):
        engine.generate(_rows(adapters[:1]))
    llama.assert_served(engine, "dora", None)


@pytest.mark.skipif(os.environ.get(LONG) != "1", reason=f"starts two ranks for one test; set {LONG}=1")
def test_every_rank_keeps_the_adapters_of_admitted_requests(llama: Tenants, engines: Engines, tmp_path: Path) -> None:
    names = ("lora", "dora", "ia3", "vera")
    store = tmp_path / "store"
    adapters = [llama.request(llama.compiled(llama.folder(name), store, name=name, tp=2)) for name in names]
    with engines.started(
        "held-tp2", llama.base, settings=SEVERAL_PROCESSES, tensor_parallel_size=2, max_loras=1, max_cpu_loras=1
    ) as engine:
        answers, refusals = engine.meanwhile(_rows(adapters), [("remove", adapter.path) for adapter in adapters])
        assert refusals == ("",) * len(adapters)
        for name, answer in zip(names, answers, strict=True):
            llama.assert_equal(answer, name)


def test_an_adapter_that_is_unloaded_while_a_request_uses_it_serves_that_request(
    engine: Engine, llama: Tenants, tmp_path: Path
) -> None:
    names = ("lora", "dora")
    adapters = _copies(llama, names, tmp_path)
    operations = [("unload", adapters[0].lora_id), ("remove", adapters[0].path)]
    answers, refusals = engine.meanwhile(_rows(adapters), operations)
    assert refusals == ("", "")
    for name, answer in zip(names, answers, strict=True):
        llama.assert_equal(answer, name)
    with pytest.raises(RefusedError, match=adapters[0].name):
        engine.generate(_rows(adapters[:1]))
    llama.assert_served(engine, "dora", None)


@pytest.mark.parametrize("in_place", [False, True])
def test_the_content_of_an_id_is_not_replaced_while_a_request_uses_it(
    in_place: bool, engine: Engine, llama: Tenants, tmp_path: Path
) -> None:
    (first,) = _copies(llama, ("lora",), tmp_path)
    other = replace(first, path=str(llama.artifact("dora")), in_place=in_place)
    (answer,), refusals = engine.meanwhile(_rows([first]), [("unload", first.lora_id), ("load", other)])
    assert refusals[0] == ""
    assert "requests still use" in refusals[1]
    llama.assert_equal(answer, "lora")
    engine.load(replace(other, in_place=False))
    (answer,) = engine.generate(_rows([replace(other, in_place=False)]))
    llama.assert_equal(answer, "dora")
    engine.unload(other)


def test_an_adapter_that_is_loaded_again_while_a_request_uses_it_stays(
    engine: Engine, llama: Tenants, tmp_path: Path
) -> None:
    (first,) = _copies(llama, ("lora",), tmp_path)
    (answer,), refusals = engine.meanwhile(_rows([first]), [("unload", first.lora_id), ("load", first)])
    assert refusals == ("", "")
    llama.assert_equal(answer, "lora")
    assert first.lora_id in engine.loaded()
    (answer,) = engine.generate(_rows([first]))
    llama.assert_equal(answer, "lora")


def test_content_that_was_replaced_on_disk_is_loaded_only_in_place(
    engine: Engine, llama: Tenants, tmp_path: Path
) -> None:
    """Ranks that have the adapter read no file, and would serve its older content as the new content."""
    (first,) = _copies(llama, ("lora",), tmp_path)
    llama.assert_equal(engine.generate(_rows([first]))[0], "lora")
    llama.compiled(llama.folder("lora-twin"), tmp_path / "store", name="lora")
    with pytest.raises(RefusedError, match="load_inplace"):
        engine.load(first)
    engine.load(replace(first, in_place=True))
    llama.assert_equal(engine.generate(_rows([first]))[0], "lora-twin")

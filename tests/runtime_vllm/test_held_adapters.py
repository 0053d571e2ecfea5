"""What happens to files and to loaded adapters while requests use them ends no engine, and mixes nothing."""

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
"""More than the engine's two slots, and more than the three that it holds."""


@pytest.fixture
def engine(crowded: Engine) -> Engine:
    return crowded


def _own(llama: Tenants, names: Sequence[str], tmp_path: Path, *, raw: bool = False) -> list[Adapter]:
    """Adapters whose files this test alone uses."""
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
def test_files_that_go_while_requests_wait_for_their_adapters_harm_none(
    names: tuple[str, ...], raw: bool, engine: Engine, llama: Tenants, tmp_path: Path
) -> None:
    """All were admitted; some are loaded a second time after their files are gone."""
    adapters = _own(llama, names, tmp_path, raw=raw)
    answers, said = engine.meanwhile(_rows(adapters), [("remove", adapter.path) for adapter in adapters])
    assert said == ("",) * len(adapters)
    for name, answer in zip(names, answers, strict=True):
        llama.assert_equal(answer, name)
    for name in ("rslora", "rsdora-attention", "oft-shared"):
        llama.assert_served(engine, name, None)
    with pytest.raises(RefusedError, match=adapters[0].name):
        engine.generate(_rows(adapters[:1]))
    llama.assert_served(engine, "dora", None)


@pytest.mark.skipif(os.environ.get(LONG) != "1", reason=f"starts two ranks for one question; set {LONG}=1")
def test_every_rank_keeps_what_requests_were_admitted_with(llama: Tenants, engines: Engines, tmp_path: Path) -> None:
    names = ("lora", "dora", "ia3", "vera")
    store = tmp_path / "store"
    adapters = [llama.request(llama.compiled(llama.folder(name), store, name=name, tp=2)) for name in names]
    with engines.started(
        "held-tp2", llama.base, settings=SEVERAL_PROCESSES, tensor_parallel_size=2, max_loras=1, max_cpu_loras=1
    ) as engine:
        answers, said = engine.meanwhile(_rows(adapters), [("remove", adapter.path) for adapter in adapters])
        assert said == ("",) * len(adapters)
        for name, answer in zip(names, answers, strict=True):
            llama.assert_equal(answer, name)


def test_an_adapter_that_is_unloaded_while_a_request_uses_it_serves_that_request(
    engine: Engine, llama: Tenants, tmp_path: Path
) -> None:
    names = ("lora", "dora")
    adapters = _own(llama, names, tmp_path)
    acts = [("unload", adapters[0].number), ("remove", adapters[0].path)]
    answers, said = engine.meanwhile(_rows(adapters), acts)
    assert said == ("", "")
    for name, answer in zip(names, answers, strict=True):
        llama.assert_equal(answer, name)
    with pytest.raises(RefusedError, match=adapters[0].name):
        engine.generate(_rows(adapters[:1]))
    llama.assert_served(engine, "dora", None)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_number_is_not_given_to_other_content_while_a_request_uses_it(
    in_place: bool, engine: Engine, llama: Tenants, tmp_path: Path
) -> None:
    (first,) = _own(llama, ("lora",), tmp_path)
    other = replace(first, path=str(llama.artifact("dora")), in_place=in_place)
    (answer,), said = engine.meanwhile(_rows([first]), [("unload", first.number), ("load", other)])
    assert said[0] == ""
    assert "requests still use" in said[1]
    llama.assert_equal(answer, "lora")
    engine.load(replace(other, in_place=False))
    (answer,) = engine.generate(_rows([replace(other, in_place=False)]))
    llama.assert_equal(answer, "dora")
    engine.unload(other)


def test_an_adapter_that_is_loaded_again_while_a_request_uses_it_stays(
    engine: Engine, llama: Tenants, tmp_path: Path
) -> None:
    (first,) = _own(llama, ("lora",), tmp_path)
    (answer,), said = engine.meanwhile(_rows([first]), [("unload", first.number), ("load", first)])
    assert said == ("", "")
    llama.assert_equal(answer, "lora")
    assert first.number in engine.loaded()
    (answer,) = engine.generate(_rows([first]))
    llama.assert_equal(answer, "lora")


def test_loading_again_what_was_replaced_on_disk_is_new_only_where_it_is_asked_for(
    engine: Engine, llama: Tenants, tmp_path: Path
) -> None:
    """Ranks that have the adapter read nothing, so its content would be taken for the new one's."""
    (first,) = _own(llama, ("lora",), tmp_path)
    llama.assert_equal(engine.generate(_rows([first]))[0], "lora")
    llama.compiled(llama.folder("lora-twin"), tmp_path / "store", name="lora")
    with pytest.raises(RefusedError, match="load_inplace"):
        engine.load(first)
    engine.load(replace(first, in_place=True))
    llama.assert_equal(engine.generate(_rows([first]))[0], "lora-twin")

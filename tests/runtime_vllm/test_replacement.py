"""An adapter that replaces another under its name never uses the other's keys and values in the prefix cache."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.runtime_vllm.adapters_by_method import BOUND, Tenants, prompt_of
from tests.runtime_vllm.engine import Adapter, Answer, Engine, RefusedError, Row, tried

BLOCK = 32
"""Tokens of a block of the cache; prompts are longer."""
PAIRS = (("lora", "dora"), ("dora", "dora-twin"), ("vera", "vera-twin"), ("oft", "ia3"))
IDS = [f"{old} by {new}" for old, new in PAIRS]


@pytest.fixture
def engine(crowded: Engine) -> Engine:
    return crowded


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A path that holds first one adapter, then another."""

    engine: Engine
    llama: Tenants
    folder: Path
    raw: bool = False
    """Whether it holds PEFT folders, not artifacts."""

    def put(self, name: str) -> None:
        """Write an adapter; what the path holds is replaced."""
        if not self.raw:
            self.llama.compiled(self.llama.folder(name), self.folder.parent, name=self.folder.name)
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.llama.folder(name), self.folder)

    @property
    def adapter(self) -> Adapter:
        """The adapter of requests for this path."""
        return self.llama.request(self.folder)

    def ask(self, adapter: Adapter | None = None) -> Answer:
        """Answer a prompt that fills a block of the cache."""
        (answer,) = self.engine.generate([Row(prompt=prompt_of(1, BLOCK + 9), adapter=adapter or self.adapter)])
        return answer

    def evict(self) -> None:
        """Serve other adapters until this one is evicted."""
        for name in ("lora-patterns", "rslora", "rsdora-attention"):
            self.engine.generate([self.llama.row(name, 1)])
        assert self.adapter.lora_id not in self.engine.loaded()


@pytest.fixture
def target(engine: Engine, llama: Tenants, tmp_path: Path) -> Target:
    return Target(engine=engine, llama=llama, folder=tmp_path / "store" / "tenant")


def test_the_cache_is_on_and_separate_for_each_adapter(target: Target, llama: Tenants) -> None:
    """The other tests of this file rely on it."""
    target.put("lora")
    first, second = target.ask(), target.ask()
    assert (first.cached, second.cached) == (0, BLOCK)
    llama.assert_equal(first, "lora")
    llama.assert_equal(second, "lora")
    (other,) = target.engine.generate([Row(prompt=first.prompt, adapter=llama.row("dora", 1).adapter)])
    llama.assert_equal(other, "dora")
    (base,) = target.engine.generate([Row(prompt=first.prompt)])
    llama.assert_equal(base, None)


def _unloaded_and_loaded(target: Target, adapter: Adapter) -> Adapter:
    target.engine.unload(adapter)
    target.engine.load(adapter)
    return adapter


def _loaded_in_place(target: Target, adapter: Adapter) -> Adapter:
    target.engine.load(replace(adapter, in_place=True))
    return adapter


def _loaded_under_another_id(target: Target, adapter: Adapter) -> Adapter:
    """Load as the OpenAI server does, which gives every load a new id."""
    target.engine.unload(adapter)
    other = replace(adapter, lora_id=adapter.lora_id + 1000)
    target.engine.load(other)
    return other


def _requested_in_place(target: Target, adapter: Adapter) -> Adapter:
    """Return an adapter whose request makes the engine read it again."""
    del target
    return replace(adapter, in_place=True)


RELOADS: Mapping[str, Callable[[Target, Adapter], Adapter]] = {
    "unloaded and loaded": _unloaded_and_loaded,
    "loaded in place": _loaded_in_place,
    "loaded under another id": _loaded_under_another_id,
    "requested in place": _requested_in_place,
}


def _is_new_or_refused(target: Target, way: str, new: str) -> None:
    answer = tried(lambda: target.ask(RELOADS[way](target, target.adapter)))
    if isinstance(answer, RefusedError):
        assert target.folder.name in str(answer)
    else:
        target.llama.assert_equal(answer, new)


@pytest.mark.parametrize("way", RELOADS)
@pytest.mark.parametrize(("old", "new"), PAIRS, ids=IDS)
def test_a_loaded_replacement_gives_its_answer(target: Target, old: str, new: str, way: str) -> None:
    target.put(old)
    target.llama.assert_equal(target.ask(), old)
    target.put(new)
    _is_new_or_refused(target, way, new)


@pytest.mark.parametrize("way", RELOADS)
def test_a_replaced_folder_gives_its_answer(target: Target, way: str) -> None:
    target = replace(target, raw=True)
    target.put("lora")
    target.llama.assert_equal(target.ask(), "lora")
    target.put("lora-twin")
    _is_new_or_refused(target, way, "lora-twin")


def test_an_artifact_replaces_a_folder(target: Target) -> None:
    folder = replace(target, raw=True)
    folder.put("lora")
    folder.llama.assert_equal(folder.ask(), "lora")
    shutil.rmtree(folder.folder)
    target.put("dora")
    _is_new_or_refused(target, "unloaded and loaded", "dora")


def _is_no_mixture(target: Target, old: str, new: str) -> None:
    """Assert that the answer is entirely one adapter's or the other's, or a refusal."""
    answer = tried(target.ask)
    if isinstance(answer, RefusedError):
        assert target.folder.name in str(answer)
        return
    differences = {name: target.llama.difference(answer, name) for name in (old, new)}
    assert any(difference.none for difference in differences.values()), differences


@pytest.mark.parametrize("raw", [False, True], ids=["artifact", "folder"])
def test_a_replacement_on_disk_alone_gives_no_mixed_answer(target: Target, raw: bool) -> None:
    target = replace(target, raw=raw)
    target.put("lora")
    target.llama.assert_equal(target.ask(), "lora")
    target.put("lora-twin")
    _is_no_mixture(target, "lora", "lora-twin")


@pytest.mark.parametrize("raw", [False, True], ids=["artifact", "folder"])
def test_a_replacement_on_disk_after_eviction_gives_no_mixed_answer(target: Target, raw: bool) -> None:
    """The engine reads the path again while the cache still holds keys and values of the older content."""
    target = replace(target, raw=raw)
    target.put("lora")
    target.llama.assert_equal(target.ask(), "lora")
    target.put("lora-twin")
    target.evict()
    _is_no_mixture(target, "lora", "lora-twin")
    target.evict()
    _is_no_mixture(target, "lora", "lora-twin")


def test_going_back_to_the_first_version_gives_its_answer(target: Target) -> None:
    for name in ("dora", "dora-twin", "dora"):
        target.put(name)
        _is_new_or_refused(target, "unloaded and loaded", name)


def test_a_replacement_that_is_refused_leaves_no_trace(target: Target) -> None:
    """After a replacement of too high a rank, the old adapter answers or the request is refused."""
    target.put("lora")
    target.llama.assert_equal(target.ask(), "lora")
    target.put("lora-rank-32")
    with pytest.raises(RefusedError) as refused:
        _loaded_in_place(target, target.adapter)
    assert "32" in str(refused.value)
    _is_no_mixture(target, "lora", "lora")
    target.put("dora")
    _is_new_or_refused(target, "unloaded and loaded", "dora")


def _cut_short(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-100])


DAMAGES: Mapping[str, tuple[bool, Callable[[Path], None]]] = {
    "an artifact that is gone": (False, shutil.rmtree),
    "an artifact that is cut short": (False, _cut_short),
    "a folder that is gone": (True, shutil.rmtree),
    "a folder that is cut short": (True, _cut_short),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_an_evicted_adapter_that_was_damaged_on_disk_is_refused_and_the_rest_is_served(
    what: str, target: Target
) -> None:
    """The engine has to read it again while it serves others."""
    raw, damage = DAMAGES[what]
    target = replace(target, raw=raw)
    target.put("lora")
    target.llama.assert_equal(target.ask(), "lora")
    target.evict()
    damage(target.folder)
    with pytest.raises(RefusedError, match=target.folder.name):
        target.ask()
    target.llama.assert_served(target.engine, "dora", None, "oft")
    target.put("lora-twin")
    _is_new_or_refused(target, "unloaded and loaded", "lora-twin")


def test_names_and_paths_need_not_correspond(target: Target, llama: Tenants, tmp_path: Path) -> None:
    target.put("lora")
    second = Target(engine=target.engine, llama=llama, folder=tmp_path / "other" / "tenant")
    second.put("dora")
    alias = llama.request(target.folder, name="alias")
    for where, name in ((target.adapter, "lora"), (alias, "lora"), (second.adapter, "dora"), (target.adapter, "lora")):
        llama.assert_equal(target.ask(where), name)
    assert llama.difference(target.ask(second.adapter), "lora").worst > 100 * BOUND

"""An adapter that is replaced under its name never answers with what its predecessor left in the prefix cache."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.runtime_vllm.adapters_by_method import BOUND, Tenants, prompt_of
from tests.runtime_vllm.engine import Adapter, Answer, Engine, RefusedError, Row, tried

BLOCK = 32
"""Tokens of a block of the cache: prompts are longer than one."""
PAIRS = (("lora", "dora"), ("dora", "dora-twin"), ("vera", "vera-twin"), ("oft", "ia3"))
IDS = [f"{old} by {new}" for old, new in PAIRS]


@pytest.fixture
def engine(crowded: Engine) -> Engine:
    return crowded


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A folder under which first one adapter lies, and then another."""

    engine: Engine
    llama: Tenants
    folder: Path
    raw: bool = False
    """Whether PEFT's folders lie there, not artifacts."""

    def put(self, name: str) -> None:
        """Lay an adapter there, in the place of what is there."""
        if not self.raw:
            self.llama.compiled(self.llama.folder(name), self.folder.parent, name=self.folder.name)
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.llama.folder(name), self.folder)

    @property
    def adapter(self) -> Adapter:
        """What requests for this place say."""
        return self.llama.request(self.folder)

    def ask(self, adapter: Adapter | None = None) -> Answer:
        """Ask with a prompt that fills a block of the cache."""
        (answer,) = self.engine.generate([Row(prompt=prompt_of(1, BLOCK + 9), adapter=adapter or self.adapter)])
        return answer

    def evict(self) -> None:
        """Serve others until nothing of the place is loaded."""
        for name in ("lora-patterns", "rslora", "rsdora-attention"):
            self.engine.generate([self.llama.row(name, 1)])
        assert self.adapter.number not in self.engine.loaded()


@pytest.fixture
def place(engine: Engine, llama: Tenants, tmp_path: Path) -> Place:
    return Place(engine=engine, llama=llama, folder=tmp_path / "store" / "tenant")


def test_the_cache_is_on_and_each_adapter_has_its_own(place: Place, llama: Tenants) -> None:
    """Without this the other tests would test nothing."""
    place.put("lora")
    first, second = place.ask(), place.ask()
    assert (first.cached, second.cached) == (0, BLOCK)
    llama.assert_equal(first, "lora")
    llama.assert_equal(second, "lora")
    (other,) = place.engine.generate([Row(prompt=first.prompt, adapter=llama.row("dora", 1).adapter)])
    llama.assert_equal(other, "dora")
    (base,) = place.engine.generate([Row(prompt=first.prompt)])
    llama.assert_equal(base, None)


def _unloaded_and_loaded(place: Place, adapter: Adapter) -> Adapter:
    place.engine.unload(adapter)
    place.engine.load(adapter)
    return adapter


def _loaded_in_place(place: Place, adapter: Adapter) -> Adapter:
    place.engine.load(replace(adapter, in_place=True))
    return adapter


def _loaded_under_another_number(place: Place, adapter: Adapter) -> Adapter:
    """The way of the OpenAI server: every load gets a number of its own."""
    place.engine.unload(adapter)
    other = replace(adapter, number=adapter.number + 1000)
    place.engine.load(other)
    return other


def _asked_for_in_place(place: Place, adapter: Adapter) -> Adapter:
    """The request itself says that the adapter is to be read again."""
    del place
    return replace(adapter, in_place=True)


WAYS: Mapping[str, Callable[[Place, Adapter], Adapter]] = {
    "unloaded and loaded": _unloaded_and_loaded,
    "loaded in place": _loaded_in_place,
    "loaded under another number": _loaded_under_another_number,
    "asked for in place": _asked_for_in_place,
}


def _is_new_or_refused(place: Place, way: str, new: str) -> None:
    answer = tried(lambda: place.ask(WAYS[way](place, place.adapter)))
    if isinstance(answer, RefusedError):
        assert place.folder.name in str(answer)
    else:
        place.llama.assert_equal(answer, new)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("old", "new"), PAIRS, ids=IDS)
def test_a_replacement_that_is_loaded_answers_for_itself(place: Place, old: str, new: str, way: str) -> None:
    place.put(old)
    place.llama.assert_equal(place.ask(), old)
    place.put(new)
    _is_new_or_refused(place, way, new)


@pytest.mark.parametrize("way", WAYS)
def test_a_folder_that_is_replaced_answers_for_itself(place: Place, way: str) -> None:
    there = replace(place, raw=True)
    there.put("lora")
    there.llama.assert_equal(there.ask(), "lora")
    there.put("lora-twin")
    _is_new_or_refused(there, way, "lora-twin")


def test_a_folder_gives_way_to_an_artifact(place: Place) -> None:
    there = replace(place, raw=True)
    there.put("lora")
    there.llama.assert_equal(there.ask(), "lora")
    shutil.rmtree(there.folder)
    place.put("dora")
    _is_new_or_refused(place, "unloaded and loaded", "dora")


def _is_no_mixture(place: Place, old: str, new: str) -> None:
    """The answer is the one adapter's or the other's, whole; or there is none."""
    answer = tried(place.ask)
    if isinstance(answer, RefusedError):
        assert place.folder.name in str(answer)
        return
    differences = {name: place.llama.difference(answer, name) for name in (old, new)}
    assert any(difference.none for difference in differences.values()), differences


@pytest.mark.parametrize("raw", [False, True], ids=["artifact", "folder"])
def test_what_is_replaced_on_disk_alone_still_answers_whole(place: Place, raw: bool) -> None:
    there = replace(place, raw=raw)
    there.put("lora")
    there.llama.assert_equal(there.ask(), "lora")
    there.put("lora-twin")
    _is_no_mixture(there, "lora", "lora-twin")


@pytest.mark.parametrize("raw", [False, True], ids=["artifact", "folder"])
def test_what_is_replaced_on_disk_and_evicted_answers_whole(place: Place, raw: bool) -> None:
    """The engine reads it again by itself, while the cache still holds what its predecessor computed."""
    there = replace(place, raw=raw)
    there.put("lora")
    there.llama.assert_equal(there.ask(), "lora")
    there.put("lora-twin")
    there.evict()
    _is_no_mixture(there, "lora", "lora-twin")
    there.evict()
    _is_no_mixture(there, "lora", "lora-twin")


def test_going_back_to_the_first_version_gives_its_answer(place: Place) -> None:
    for name in ("dora", "dora-twin", "dora"):
        place.put(name)
        _is_new_or_refused(place, "unloaded and loaded", name)


def test_a_replacement_that_is_refused_leaves_no_trace(place: Place) -> None:
    """A replacement of too high a rank: the old adapter answers whole, or nothing does."""
    place.put("lora")
    place.llama.assert_equal(place.ask(), "lora")
    place.put("lora-rank-32")
    with pytest.raises(RefusedError) as refused:
        _loaded_in_place(place, place.adapter)
    assert "32" in str(refused.value)
    _is_no_mixture(place, "lora", "lora")
    place.put("dora")
    _is_new_or_refused(place, "unloaded and loaded", "dora")


def _cut_short(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-100])


SPOILT: Mapping[str, tuple[bool, Callable[[Path], None]]] = {
    "an artifact that is gone": (False, shutil.rmtree),
    "an artifact that is cut short": (False, _cut_short),
    "a folder that is gone": (True, shutil.rmtree),
    "a folder that is cut short": (True, _cut_short),
}


@pytest.mark.parametrize("what", SPOILT)
def test_what_is_spoilt_on_disk_after_its_eviction_is_refused_and_the_rest_is_served(what: str, place: Place) -> None:
    """The engine has to read it again in the middle of serving others."""
    raw, spoil = SPOILT[what]
    there = replace(place, raw=raw)
    there.put("lora")
    there.llama.assert_equal(there.ask(), "lora")
    there.evict()
    spoil(there.folder)
    with pytest.raises(RefusedError, match=there.folder.name):
        there.ask()
    there.llama.assert_served(there.engine, "dora", None, "oft")
    there.put("lora-twin")
    _is_new_or_refused(there, "unloaded and loaded", "lora-twin")


def test_two_names_for_one_place_and_one_name_for_two_places(place: Place, llama: Tenants, tmp_path: Path) -> None:
    place.put("lora")
    second = Place(engine=place.engine, llama=llama, folder=tmp_path / "other" / "tenant")
    second.put("dora")
    alias = llama.request(place.folder, name="alias")
    for where, name in ((place.adapter, "lora"), (alias, "lora"), (second.adapter, "dora"), (place.adapter, "lora")):
        llama.assert_equal(place.ask(where), name)
    assert llama.difference(place.ask(second.adapter), "lora").worst > 100 * BOUND

"""With SCUTE_VLLM_COMPILE, PEFT folders of every method are compiled when they are loaded."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.runtime_vllm.adapters_by_method import BOUND, Tenants, prompt_of
from tests.runtime_vllm.engine import Answer, Engines, RefusedError, Row

NAMES = (None, "dora", "rsdora-attention", "ia3", "vera", "oft", "lora", "changing")
"""`changing` is a folder whose content changes between the two starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Starts:
    """The answers of two engines that were started one after the other with one store."""

    first: Mapping[str | None, Answer]
    second: Mapping[str | None, Answer]
    after_first: Mapping[str, int]
    """Files of the store, and the time of their last change in nanoseconds."""
    after_second: Mapping[str, int]
    refused: str
    """The first engine's refusal of a folder that can't be compiled."""
    after_refusal: Answer


def _files(store: Path) -> dict[str, int]:
    return {
        str(file.relative_to(store)): file.stat().st_mtime_ns for file in store.rglob("*.safetensors") if file.is_file()
    }


@pytest.fixture(scope="module")
def starts(llama: Tenants, engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Starts:
    folder = tmp_path_factory.mktemp("raw")
    changing, store = folder / "changing", folder / "store"
    shutil.copytree(llama.folder("dora"), changing)
    places = {name: changing if name == "changing" else llama.folder(name) for name in NAMES if name}
    rows = [
        Row(prompt=prompt_of(seed), adapter=llama.request(places[name]) if name else None)
        for seed, name in enumerate(NAMES)
    ]
    broken = folder / "broken"
    shutil.copytree(llama.folder("dora"), broken)
    (broken / "adapter_model.safetensors").write_bytes(b"no tensors")
    settings = {"SCUTE_VLLM_COMPILE": "1", "SCUTE_VLLM_STORE": str(store)}
    with engines.started("raw-1", llama.base, settings=settings) as engine:
        first = dict(zip(NAMES, engine.generate(rows), strict=True))
        with pytest.raises(RefusedError) as refused:
            engine.load(llama.request(broken))
        (after_refusal,) = engine.generate(rows[1:2])
    after_first = _files(store)
    shutil.rmtree(changing)
    shutil.copytree(llama.folder("dora-twin"), changing)
    with engines.started("raw-2", llama.base, settings=settings) as engine:
        second = dict(zip(NAMES, engine.generate(rows), strict=True))
    return Starts(
        first=first,
        second=second,
        after_first=after_first,
        after_second=_files(store),
        refused=str(refused.value),
        after_refusal=after_refusal,
    )


@pytest.mark.parametrize("name", NAMES[:-1])
def test_a_folder_that_was_never_compiled_equals_peft(name: str | None, starts: Starts, llama: Tenants) -> None:
    llama.assert_equal(starts.first[name], name)
    if name is not None:
        assert llama.difference(starts.first[name], None).worst > 100 * BOUND


@pytest.mark.parametrize("name", NAMES[:-1])
def test_a_second_start_gives_the_same_answers(name: str | None, starts: Starts, llama: Tenants) -> None:
    llama.assert_equal(starts.second[name], name)


def test_a_second_start_does_not_compile_unchanged_folders(starts: Starts) -> None:
    assert len(starts.after_first) >= 5
    unchanged = {name: starts.after_second.get(name) for name in starts.after_first}
    assert [name for name, written in unchanged.items() if written not in {None, starts.after_first[name]}] == []
    assert sum(written is None for written in unchanged.values()) <= 1, (
        "only the artifact of the changed folder may be gone"
    )


def test_a_folder_whose_content_changed_is_compiled_anew(starts: Starts, llama: Tenants) -> None:
    llama.assert_equal(starts.first["changing"], "dora")
    llama.assert_equal(starts.second["changing"], "dora-twin")


def test_a_folder_that_can_not_be_compiled_is_refused_with_the_compilers_findings(
    starts: Starts, llama: Tenants
) -> None:
    assert "SC1" in starts.refused or "SC2" in starts.refused, starts.refused
    assert "adapter_model.safetensors" in starts.refused
    llama.assert_equal(starts.after_refusal, "dora")

"""Plain LoRA folders are served beside artifacts, by the runtime's or vLLM's kernels; base rows equal the base."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.runtime_vllm.adapters_by_method import BOUND, Tenants, prompt_of
from tests.runtime_vllm.engine import Answer, Engine, Engines, RefusedError, Row

KERNELS = {"the runtime's kernels": {}, "vLLM's kernels": {"SCUTE_VLLM_STOCK_KERNELS": "1"}}
VLLM = find_spec("vllm")
assert VLLM is not None
assert VLLM.origin is not None
READS_PATTERNS = "rank_pattern" in Path(VLLM.origin).with_name("lora").joinpath("peft_helper.py").read_text()
"""vLLM 0.31 and newer; older releases use one rank and one scale for the whole adapter."""
FOLDERS: tuple[str, ...] = (
    "lora",
    "rslora",
    "lora-one-layer",
    "lora-head",
    *(("lora-patterns",) if READS_PATTERNS else ()),
)
ARTIFACTS = ("dora", "oft", "lora-twin")
MAX_LORAS = len(FOLDERS) + len(ARTIFACTS)
"""A full batch uses every index: vLLM's CPU kernels apply the adapter of the last index to base rows."""


@pytest.fixture(scope="module", params=KERNELS)
def engine(request: pytest.FixtureRequest, llama: Tenants, engines: Engines) -> Iterator[Engine]:
    with engines.started(
        f"stock-{request.param.partition(' ')[0]}", llama.base, settings=KERNELS[request.param], max_loras=MAX_LORAS
    ) as running:
        yield running


def _row(llama: Tenants, name: str | None, seed: int) -> Row:
    if name in FOLDERS:
        return Row(prompt=prompt_of(seed), adapter=llama.request(llama.folder(name)))
    return llama.row(name, seed)


def _answered(engine: Engine, llama: Tenants, *names: str | None) -> list[tuple[str | None, Answer]]:
    answers = engine.generate([_row(llama, name, seed) for seed, name in enumerate(names)])
    return list(zip(names, answers, strict=True))


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_equals_peft(name: str, engine: Engine, llama: Tenants) -> None:
    ((_, answer),) = _answered(engine, llama, name)
    llama.assert_equal(answer, name)
    assert llama.difference(answer, None).worst > 100 * BOUND


def test_folders_equal_peft_in_one_batch(engine: Engine, llama: Tenants) -> None:
    for name, answer in _answered(engine, llama, *FOLDERS):
        llama.assert_equal(answer, name)


@pytest.mark.parametrize(
    "beside", [("lora",), ("lora", "rslora"), ("dora",), ("lora", "dora", "oft"), FOLDERS, FOLDERS + ARTIFACTS]
)
def test_base_rows_beside_adapters_equal_the_base(beside: tuple[str, ...], engine: Engine, llama: Tenants) -> None:
    for name, answer in _answered(engine, llama, None, *beside, None):
        llama.assert_equal(answer, name)


def test_folders_and_artifacts_equal_peft_in_one_batch(engine: Engine, llama: Tenants) -> None:
    for name, answer in _answered(engine, llama, *FOLDERS, None, *ARTIFACTS):
        llama.assert_equal(answer, name)


def test_a_folder_and_its_artifact_give_one_answer(engine: Engine, llama: Tenants) -> None:
    prompt = prompt_of(4)
    places = (llama.folder("rslora"), llama.artifact("rslora"))
    for answer in engine.generate([Row(prompt=prompt, adapter=llama.request(place)) for place in places]):
        llama.assert_equal(answer, "rslora")


@pytest.mark.skipif(READS_PATTERNS, reason="this vLLM reads patterns")
def test_a_folder_with_patterns_is_refused_where_vllm_ignores_them(engine: Engine, llama: Tenants) -> None:
    row = Row(prompt=prompt_of(0), adapter=llama.request(llama.folder("lora-patterns")))
    with pytest.raises(RefusedError, match=r"ignores `rank_pattern`.*scute compile"):
        engine.generate([row])
    llama.assert_served(engine, "lora-twin", None)

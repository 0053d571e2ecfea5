"""The plugin under compilation and graph capture, as far as a CPU can run them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict

import pytest

from tests.runtime_vllm.adapters_by_method import Tenants
from tests.runtime_vllm.engine import Engine, Engines

MAX_LORAS = 3


@pytest.fixture(scope="module")
def engine(llama: Tenants, engines: Engines) -> Iterator[Engine]:
    with engines.started("captures", llama.base, max_loras=MAX_LORAS) as running:
        yield running


def test_all_blocks_of_a_model_compile_to_the_same_code(engine: Engine) -> None:
    """A compiler then compiles it once for all blocks."""
    first, second = (engine.ask("block_code", number=number) for number in (0, 1))
    assert len(re.findall(r"scute\.engine_linear", first)) == 2  # gate_up and down
    assert first == second


@pytest.mark.parametrize("tokens", [1, 2, 16])
def test_captured_graphs_hold_adapters_except_those_of_the_base(tokens: int, engine: Engine) -> None:
    for stand_ins in (MAX_LORAS + 1, 0, 1):  # as vLLM captures: for any number of adapters, for none, for one
        adapted, rehearsed = engine.ask("rehearse", tokens=tokens, adapters=stand_ins)
        assert adapted == (stand_ins > 0)
        assert rehearsed
    assert not engine.ask("end_of_rehearsals")


def test_steps_after_captures_equal_peft(engine: Engine, llama: Tenants) -> None:
    names = ("lora", None, "dora")
    engine.ask("rehearse", tokens=len(names), adapters=MAX_LORAS + 1)
    engine.ask("end_of_rehearsals")
    llama.assert_served(engine, *names)
    llama.assert_served(engine, None, None)


@pytest.mark.parametrize(
    ("names", "graph"),
    [
        (("lora", "dora", "ia3"), MAX_LORAS + 2),  # plain steps have graphs of their kind
        (("lora", "vera", None), MAX_LORAS + 1),
        (("dora", None), MAX_LORAS + 2),  # after a step that was not plain
        (("oft",), MAX_LORAS + 1),
        ((None, None), 0),
    ],
)
def test_a_step_runs_in_the_graph_of_its_kind(
    names: tuple[str | None, ...], graph: int, engine: Engine, llama: Tenants
) -> None:
    rows = [asdict(llama.row(name, place)) for place, name in enumerate(names)]
    chosen, kinds = engine.ask("graphs", rows=rows, tokens=4)
    assert kinds == [MAX_LORAS + 1, 0, MAX_LORAS + 2]  # vLLM reserves the memory of the first graph for all of them
    assert chosen[-3:] == [graph] * 3

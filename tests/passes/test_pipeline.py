"""The pipeline: its passes in order, the passes that need a base, and the end at the first pass with an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from scute_compile.diagnostics import Code, ScuteError
from scute_compile.driver.bases import open_model
from scute_compile.ir.method import Method
from scute_compile.ir.program import Factor, Program, Site, Stage, Term
from scute_compile.ir.target import Target
from scute_compile.passes.scale import column_norms
from scute_compile.pipeline import NEED_BASE, PIPELINE, plan, run
from tests.support import programs

Folder = Callable[[str], Path]
Adapter = Callable[[str, str], Path]


def test_every_pass_reaches_its_stage_in_order() -> None:
    assert [step.__name__ for step in PIPELINE] == [stage.value for stage in Stage if stage is not Stage.OPENED]
    linear = programs.linear("model.layers.0.self_attn.q_proj", 64, 64)
    pair = (programs.value("A", 8, 64), programs.value("B", 8, 64))
    term = Term(a=Factor(value=pair[0]), b=Factor(value=pair[1]), c=2.0)
    program = Program(method=Method.LORA, stage=Stage.PARSED, sites=(Site(linear=linear, terms=(term,)),))
    for step, stage in zip(PIPELINE[1:], list(Stage)[2:], strict=True):
        program = step(program, programs.context([linear]))
        assert program.stage is stage


@pytest.mark.parametrize("recipe", ["lora", "dora", "vera"])
def test_without_a_base_the_passes_that_need_one_are_left_out(
    recipe: str, base_folder: Folder, adapter_folder: Adapter
) -> None:
    assert {step.__name__ for step in PIPELINE if step not in NEED_BASE} == {"parse", "fold"}
    alone = plan(str(adapter_folder(recipe, "llama")), None, Target())
    known = plan(str(adapter_folder(recipe, "llama")), open_model(str(base_folder("llama")), weights=False), Target())
    assert alone.program is not None
    assert known.program is not None
    assert (alone.program.stage, known.program.stage) == (Stage.FOLDED, Stage.ROUTED)
    assert {site.name for site in alone.program.sites} == {site.name for site in known.program.sites}


def test_planning_ends_after_the_pass_that_finds_an_error() -> None:
    context = replace(programs.context([]), config={"peft_type": "LORA", "use_dora": "perhaps"})
    with pytest.raises(ScuteError) as caught:
        run(Program(method=Method.LORA, stage=Stage.OPENED, sites=()), context)
    assert Code.SC205 in {found.code for found in caught.value.diagnostics}


@pytest.mark.parametrize("other", ["dora-rank-1", "rsdora-patterns"])
def test_norms_of_different_adapters_over_one_weight_have_equal_tiles(
    other: str, base_folder: Folder, adapter_folder: Adapter
) -> None:
    """Packing reads a weight once for all of them; the tiles follow from its shape alone."""
    base = open_model(str(base_folder("llama")), weights=False)
    tiles = []
    for recipe, tp in (("dora", 1), (other, 2)):
        planned = plan(str(adapter_folder(recipe, "llama")), base, Target(tp=tp)).program
        assert planned is not None
        tiles.append({norm.weight.key: norm.tile_rows for norm in column_norms(planned.sites)})
    shared = tiles[0].keys() & tiles[1].keys()
    assert shared
    assert all(tiles[0][key] == tiles[1][key] > 0 for key in shared)

"""The kernels of several ranks with fully sharded terms, against PEFT.

Ranks are processes over gloo, which inherit the choice of Triton's interpreter. As in the other tests of kernels,
buffers hold NaN until they are written, and K is cut into several runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from scute_compile.ir.target import LoraSharding
from scute_compile.runtime_min.base_model import load_model
from scute_compile.runtime_min.model.served_model import ServedModel
from scute_compile.runtime_min.step import layer as served_layer
from scute_compile.runtime_min.step.arguments import Features
from scute_compile.runtime_min.step.op import _arguments
from tests.kernels.checks import spread_booleans
from tests.support.commands import compiled
from tests.support.rank_processes import Answer, on_ranks
from tests.support.served import Compiled, ids_of, logprobs, peft_model, relative_error

FLOAT32 = 5e-5
"""As in `test_served_ranks.py`."""
WIDE, ROWS = "lora-21", "lora-on-rows"
RECIPES = ("lora-5", "dora", WIDE, "vera")
"""LoRA ranks that two and three ranks do not divide, and one above the wide tiles of the expand."""


def by_kernels(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pages: torch.Tensor,
    page_map: torch.Tensor,
    directory: torch.Tensor,
    shared: torch.Tensor,
    step: torch.Tensor,
    first_site: int,
    widths: Sequence[int],
    capacity: Sequence[int],
    features: Sequence[int],
    exchange: Any = None,  # noqa: ANN401 - the stand-in of two functions
) -> torch.Tensor:
    """Run the layer as on a GPU."""
    from scute_compile.runtime_min.step import launch

    arguments = _arguments(pages, page_map, directory, shared, step, first_site, widths, capacity)
    return launch.adapted_linear(x, weight, bias, *arguments, Features.of_numbers(features), exchange)


def answers(base: Path, store: Path, recipes: Sequence[str], ids: torch.Tensor, options: dict[str, Any]) -> Answer:
    """Run one batch through the kernels, on every rank."""
    from scute_compile.runtime_min.step import launch_decode

    served = ServedModel.for_rank(
        load_model(base),
        max_adapters=len(recipes),
        pool_bytes="8MiB",
        shared_bytes="512KiB",
        max_num_batched_tokens=64,
        lora_sharding=LoraSharding.FULL,
        **options,
    )
    for recipe in dict.fromkeys(recipes):
        served.load_adapter(store / recipe, adapter_name=recipe)
    served.pool.ensure(recipes[::-1] if served.ranks.rank else recipes)  # adapter indices differ
    torch.use_deterministic_algorithms(mode=True)
    with (
        spread_booleans(),
        patch.object(launch_decode, "RUN_GRANULES", 8),
        patch.object(launch_decode, "SHARED_STEP", 32),
        patch.object(served_layer, "exchanged_linear", by_kernels),
        patch.object(served_layer, "adapted_linear", by_kernels),
    ):
        out = served(ids, adapter_names=[*recipes, None]).logits
    return {"out": torch.log_softmax(out, -1)}


@pytest.fixture
def store(base_folder: Callable[[str], Path], tmp_path: Path) -> Callable[[str, int], None]:
    """Return a function that writes and compiles every adapter for a base, on one layer only, for speed."""
    from tests.support.adapters import lora, vera, write_config
    from tests.support.bases import BASES

    def make(base: str, tp: int) -> None:
        where, sites, one = base_folder(base), BASES[base].sites, {"layers_to_transform": [1]}
        on_rows = {"target_modules": [sites.attention_out, sites.down]}  # not divided, but padded to whole shares
        configs = {
            "lora-5": lora(r=5, **one),
            "dora": lora(use_dora=True, **one),
            WIDE: lora(r=21, **one),
            ROWS: lora(**on_rows, **one),
            "vera": vera(**one).config,
        }
        for name, config in configs.items():
            write_config(config(sites), base, where, tmp_path / name)
            options = ("--tp", tp, "--dtype", "float32", "--lora-sharding", "full")
            compiled(tmp_path / name, where, tmp_path / "store", *options)

    return make


@pytest.mark.parametrize(
    ("base", "tp", "recipes", "tokens", "options"),
    [
        ("qwen2", 2, ("vera", "lora-5", "vera"), 1, {"max_num_seqs": 4, "fixed": True}),
        ("llama-nine", 3, (ROWS, "lora-5", WIDE, "vera"), 1, {"max_num_seqs": 8}),
        ("llama-nine", 3, RECIPES, 2, {"max_num_seqs": 8}),
    ],
    ids=["as for a graph", "decode", "prefill"],
)
def test_kernels_of_several_ranks_match_peft(
    base: str,
    tp: int,
    recipes: Sequence[str],
    tokens: int,
    options: dict[str, Any],
    base_folder: Callable[[str], Path],
    store: Callable[[str, int], None],
    tmp_path: Path,
) -> None:
    store(base, tp)
    where = base_folder(base)
    ids = ids_of(len(recipes) + 1, tokens)
    from tests.support.bases import load_base

    ranks = on_ranks(tp, answers, where, tmp_path / "store", recipes, ids, options)
    plain = logprobs(load_base(base, where), ids)
    assert all(torch.equal(ranks[0]["out"], rank["out"]) for rank in ranks)
    assert (ranks[0]["out"][-1] - plain[-1]).abs().max() < 1e-4
    for row, recipe in enumerate(recipes):
        chosen = Compiled(adapter=tmp_path / recipe, base=where, artifact=tmp_path / "store" / recipe)
        expected = logprobs(peft_model(base, chosen), ids[row : row + 1])[0]
        assert relative_error(ranks[0]["out"][row], expected, plain[row]) < FLOAT32, recipe

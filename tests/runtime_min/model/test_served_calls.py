"""Invalid calls of a served model are refused before anything runs; a call that raises releases its adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scute_compile.diagnostics import ScuteError
from scute_compile.runtime_min.model.served_model import ServedModel
from tests.support.bases import load_base
from tests.support.served import Compiled, Pair, artifact_of, ids_of, logits_of, served

ROWS = ("lora", "oft")


@pytest.fixture
def made(pair: Pair, shared_folder: Path) -> dict[str, Compiled]:
    return {recipe: artifact_of(recipe, "llama", pair, shared_folder) for recipe in ROWS}


@pytest.fixture
def model(made: dict[str, Compiled]) -> ServedModel:
    loaded = served("llama", made["lora"].base)
    for name, chosen in made.items():
        loaded.load_adapter(chosen.artifact, adapter_name=name)
    return loaded


def refused(act: Callable[[], object], text: str, *, code: str = "SC703") -> None:
    with pytest.raises(ScuteError, match=text) as error:
        act()
    assert error.value.diagnostics[0].code.name == code


def assert_released(model: ServedModel, before: torch.Tensor) -> None:
    """Check that no adapter is held, that the model runs the base, and that the next batch gives the same logits."""
    for name in model.pool.resident:
        model.pool.evict(name)
    assert not any(layer.active for layer in model.layers.values())
    assert "prepare_inputs_for_generation" not in vars(model.model)
    assert torch.equal(logits_of(model, ids_of(2, 6), ROWS), before)


class Streamer:
    """Calls `act` at the third token."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act, self.seen = act, 0

    def put(self, _: torch.Tensor) -> None:
        self.seen += 1
        if self.seen == 3:
            self.act()

    def end(self) -> None:
        """Do nothing."""


def generated(model: ServedModel, streamer: Streamer | None = None) -> torch.Tensor:
    return model.generate(
        ids_of(2, 6), adapter_names=ROWS, do_sample=False, max_new_tokens=6, pad_token_id=0, streamer=streamer
    )


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (torch.zeros(2, 0, dtype=torch.long), r"shape \[2, 0\]"),
        (torch.zeros(0, 3, dtype=torch.long), r"shape \[0, 3\]"),
        (torch.zeros(2, dtype=torch.long), r"shape \[2\]"),
        ([[3, 4], [5, 6]], "a list"),
        (None, "neither"),
    ],
)
def test_malformed_ids_are_refused(ids: Any, text: str, model: ServedModel) -> None:  # noqa: ANN401 - on purpose
    before = logits_of(model, ids_of(2, 6), ROWS)
    refused(lambda: model.forward(ids, adapter_names=ROWS), text)
    refused(lambda: model.generate(ids, adapter_names=ROWS, max_new_tokens=2), text)
    assert_released(model, before)


@pytest.mark.parametrize("names", ["lo", [["lora"], "oft"], [1, None]])
def test_malformed_names_are_refused(names: Any, model: ServedModel) -> None:  # noqa: ANN401 - on purpose
    refused(lambda: model.forward(ids_of(2, 6), adapter_names=names), "name")
    refused(lambda: model.step(names, [3, 3]).__enter__(), "name")


def test_pefts_name_of_the_base_is_the_base(model: ServedModel) -> None:
    ids = ids_of(2, 6)
    assert torch.equal(logits_of(model, ids, ["__base__", "oft"]), logits_of(model, ids, [None, "oft"]))
    tokens = [model.generate(ids, adapter_names=["oft", base], max_new_tokens=3) for base in ("__base__", None)]
    assert torch.equal(*tokens)
    with model.step(["__base__", "__base__"], [6, 6]):
        assert not any(layer.active for layer in model.layers.values())


def test_no_adapter_is_loaded_under_the_bases_name(model: ServedModel, made: dict[str, Compiled]) -> None:
    refused(lambda: model.load_adapter(made["lora"].artifact, adapter_name="__base__"), "stands for the base")
    assert model.adapters == ROWS


def test_a_call_that_raises_releases_its_adapters(model: ServedModel) -> None:
    before = logits_of(model, ids_of(2, 6), ROWS)

    def fault() -> None:
        raise KeyError("in the streamer")

    with pytest.raises(KeyError, match="in the streamer"):
        generated(model, Streamer(fault))
    assert_released(model, before)

    def breaks(*_: object) -> None:
        raise IndexError("in a layer")

    hook = model.model.get_submodule("lm_head").register_forward_pre_hook(breaks)
    with pytest.raises(IndexError, match="in a layer"):
        model.generate(ids_of(2, 6), adapter_names=ROWS, max_new_tokens=2)
    hook.remove()
    assert_released(model, before)
    with pytest.raises(ValueError, match="max_new_tokens"):
        model.generate(ids_of(2, 6), adapter_names=ROWS, max_new_tokens=0)
    assert_released(model, before)


def test_a_call_inside_another_is_refused_and_the_outer_one_goes_on(model: ServedModel) -> None:
    expected, alone = generated(model), logits_of(model, ids_of(1, 3), ["lora"])
    seen: list[str] = []

    def inside() -> None:
        for act in (lambda: generated(model), lambda: logits_of(model, ids_of(1, 3), ["oft"]), model.remove):
            with pytest.raises(ScuteError) as error:
                act()
            seen.append(error.value.diagnostics[0].code.name)

    assert torch.equal(generated(model, Streamer(inside)), expected)
    assert seen == ["SC703"] * 3
    with model.step(["lora"], [3]), torch.no_grad():
        refused(lambda: logits_of(model, ids_of(1, 3), ["oft"]), "inside another")
        assert torch.equal(model.model(input_ids=ids_of(1, 3)).logits, alone)


def test_adapters_are_loaded_and_replaced_while_a_call_runs_and_its_rows_stay(
    model: ServedModel, pair: Pair, shared_folder: Path
) -> None:
    expected = generated(model)
    large = artifact_of("rslora", "llama", pair, shared_folder)  # of a larger rank: the step's buffers grow
    assert torch.equal(
        generated(model, Streamer(lambda: model.load_adapter(large.artifact, adapter_name="more"))), expected
    )
    assert torch.equal(
        generated(model, Streamer(lambda: model.replace_adapter(large.artifact, adapter_name="lora"))), expected
    )
    assert not torch.equal(generated(model), expected)
    for name in ("lora", "more"):
        model.delete_adapter(name)
    assert model.adapters == ("oft",)


def test_a_removed_model_refuses_calls(model: ServedModel, made: dict[str, Compiled]) -> None:
    """Otherwise all rows would silently get the base's answers."""
    model.remove()
    refused(lambda: logits_of(model, ids_of(1, 3), ["lora"]), "after `remove`")
    refused(lambda: model.step(["lora"], [3]).__enter__(), "after `remove`")
    refused(lambda: model.load_adapter(made["lora"].artifact, adapter_name="later"), "after `remove`")
    refused(lambda: model.replace_adapter(made["lora"].artifact, adapter_name="lora"), "after `remove`")
    model.remove()


def test_two_models_of_one_process_are_independent(made: dict[str, Compiled]) -> None:
    base = made["lora"].base
    first, second = served("llama", base), served("llama", base)
    first.load_adapter(made["lora"].artifact, adapter_name="tenant")
    second.load_adapter(made["oft"].artifact, adapter_name="tenant")
    ids = ids_of(1, 6)
    of_first, of_second = logits_of(first, ids, ["tenant"]), logits_of(second, ids, ["tenant"])
    assert not torch.equal(of_first, of_second)
    with first.step(["tenant"], [6]), second.step(["tenant"], [6]), torch.no_grad():
        assert torch.equal(second.model(input_ids=ids).logits, of_second)
        assert torch.equal(first.model(input_ids=ids).logits, of_first)


def test_a_model_is_wrapped_once(made: dict[str, Compiled]) -> None:
    model = load_base("llama", made["lora"].base)
    first = ServedModel(model, max_adapters=2, pool_bytes="1MiB", shared_bytes="32KiB")
    refused(lambda: ServedModel(model, max_adapters=2, pool_bytes="1MiB", shared_bytes="32KiB"), "another ServedModel")
    first.remove()
    second = ServedModel(model, max_adapters=2, pool_bytes="1MiB", shared_bytes="32KiB")
    second.load_adapter(made["lora"].artifact, adapter_name="lora")
    first.remove()  # a second call changes nothing
    assert any(layer is module for layer in second.layers.values() for module in model.modules())


@pytest.mark.parametrize(
    "sizes",
    [
        {"max_adapters": 0},
        {"max_num_batched_tokens": 0},
        {"max_num_seqs": -1},
        {"max_adapters": None},
        {"max_adapters": True},
    ],
)
def test_sizes_that_serve_nothing_are_refused(sizes: dict[str, Any], made: dict[str, Compiled]) -> None:
    refused(lambda: served("llama", made["lora"].base, **sizes), "at least 1")


@pytest.mark.parametrize("sizes", [{"max_lora_rank": -1}, {"max_lora_rank": "16"}])
def test_a_negative_rank_is_refused(sizes: dict[str, Any], made: dict[str, Compiled]) -> None:
    refused(lambda: served("llama", made["lora"].base, **sizes), "at least 0")


@pytest.mark.parametrize(
    "size", [0, -1, 8.5, True, None, "", "8", "MiB", "8MB", "8mib", "-8MiB", "1e3KiB", "0MiB", "٨MiB"]
)
def test_malformed_pool_sizes_are_refused(size: Any, made: dict[str, Compiled]) -> None:  # noqa: ANN401 - on purpose
    refused(lambda: served("llama", made["lora"].base, pool_bytes=size), "at least 1: a number of bytes")
    if size not in (0, "0MiB"):
        refused(lambda: served("llama", made["lora"].base, shared_bytes=size), "at least 0: a number of bytes")


@pytest.mark.parametrize("size", [2 << 20, "2MiB", "2048 KiB", "0.001953125GiB", (2 << 20) - 1])
def test_a_pool_size_is_bytes_or_text(size: int | str, made: dict[str, Compiled]) -> None:
    model = served("llama", made["lora"].base, pool_bytes=size, shared_bytes=0)
    assert (len(model.pool.memory.pages), len(model.pool.memory.shared)) == (1024, 0)


@pytest.mark.parametrize(
    "sizes", [{"pool_bytes": 2 * 10**15}, {"shared_bytes": "90000000000GiB"}, {"pool_bytes": 2 * 10**20}]
)
def test_a_pool_that_no_memory_holds_is_refused(sizes: dict[str, Any], made: dict[str, Compiled]) -> None:
    refused(lambda: served("llama", made["lora"].base, **sizes), "a smaller pool", code="SC814")


@pytest.mark.parametrize("counts", [[2.0, 3], ["2", 3], [None, 3], [True, 3]])
def test_steps_with_invalid_token_counts_are_refused(counts: list[Any], model: ServedModel) -> None:
    refused(lambda: model.step(["lora", "oft"], counts).__enter__(), "at least one token")


@pytest.mark.parametrize("source", [None, 7, b"store"])
def test_a_source_that_is_no_artifact_is_refused(source: Any, model: ServedModel) -> None:  # noqa: ANN401 - on purpose
    refused(lambda: model.load_adapter(source, adapter_name="new"), "scute compile")
    assert "new" not in model.adapters


def test_guidance_with_adapters_is_refused(model: ServedModel) -> None:
    ids = ids_of(2, 4)
    refused(
        lambda: model.generate(ids, adapter_names=["lora", None], guidance_scale=2.0, max_new_tokens=2),
        "guidance_scale",
    )
    assert model.generate(ids, adapter_names=["lora", None], guidance_scale=1, max_new_tokens=2).shape == (2, 6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("recipe", ["lora", "dora", "ia3-inputs", "vera", "oft"])
def test_a_half_precision_model_serves_on_the_cpu(
    recipe: str, dtype: torch.dtype, pair: Pair, shared_folder: Path
) -> None:
    half = artifact_of(recipe, "llama", pair, shared_folder, dtype=str(dtype).removeprefix("torch."))
    exact = artifact_of(recipe, "llama", pair, shared_folder)
    model = ServedModel(
        load_base("llama", half.base).to(dtype), max_adapters=2, pool_bytes="1MiB", shared_bytes="128KiB"
    )
    model.load_adapter(half.artifact, adapter_name="x")
    wide = served("llama", half.base)
    wide.load_adapter(exact.artifact, adapter_name="x")
    ids = ids_of(1, 8)
    logprobs, rounded_base = (torch.log_softmax(logits_of(model, ids, [name]).float(), -1) for name in ("x", None))
    expected, base = (torch.log_softmax(logits_of(wide, ids, [name]), -1) for name in ("x", None))
    # the base's own rounding is the measure: the adapter's row may not be further from float32 than twice that
    assert (logprobs - expected).abs().mean() < 2 * (rounded_base - base).abs().mean()
    assert (expected - base).abs().mean() > 10 * (rounded_base - base).abs().mean()

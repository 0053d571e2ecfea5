"""Each row of a batch matches PEFT; adapters are loaded and removed between calls; refusals change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scute_compile.diagnostics import ScuteError
from scute_compile.runtime_min.model.served_model import ServedModel
from scute_compile.runtime_min.pool.directory import PAGE_BYTES
from tests.support.bases import load_base
from tests.support.served import (
    Compiled,
    Make,
    Pair,
    artifact_of,
    ids_of,
    logits_of,
    logprobs,
    peft_model,
    relative_error,
    served,
)

FLOAT32 = 5e-5
"""Two rounded matrix products against one, through two layers: about 100 units in the last place of the effect."""
NINE = ("lora", "rslora", "dora", "rsdora-patterns", "ia3", "vera", "oft", "oft-shared", "adalora")
"""Nine adapters, at least one of each method."""


def loaded(base: str, recipes: tuple[str, ...], make: Make, **options: object) -> tuple[ServedModel, list[Compiled]]:
    made = [make(recipe, base) for recipe in recipes]
    model = served(base, made[0].base, **options)
    for recipe, chosen in zip(recipes, made, strict=True):
        model.load_adapter(chosen.artifact, adapter_name=recipe)
    return model, made


@pytest.mark.parametrize(
    ("base", "recipes"),
    [
        ("llama", NINE),
        ("qwen2", ("lora-base-bias", "lora-bias-on-b", "dora", "ia3-inputs", "vera", "oft")),
        ("gpt2", ("lora", "dora", "ia3-inputs", "vera", "lora-base-bias")),
        ("phi3", ("lora", "dora", "ia3", "vera", "oft")),
    ],
)
def test_every_row_of_a_mixed_batch_matches_peft(base: str, recipes: tuple[str, ...], make: Make) -> None:
    model, made = loaded(base, recipes, make)
    ids = ids_of(len(recipes) + 1, 12)
    plain = logprobs(load_base(base, made[0].base), ids)
    computed = torch.log_softmax(logits_of(model, ids, [*recipes, None]), -1)
    assert torch.equal(computed[-1], plain[-1])
    for row, chosen in enumerate(made):
        expected = logprobs(peft_model(base, chosen), ids[row : row + 1])[0]
        assert relative_error(computed[row], expected, plain[row]) < FLOAT32, recipes[row]


def greedy(generate: Callable[..., torch.Tensor], ids: torch.Tensor, **options: object) -> torch.Tensor:
    return generate(ids, do_sample=False, max_new_tokens=8, min_new_tokens=8, pad_token_id=0, **options)[
        :, ids.shape[1] :
    ]


def test_generate_gives_each_row_the_tokens_that_peft_generates(make: Make) -> None:
    recipes = ("lora", "dora", "ia3", "vera", "oft", "adalora")
    model, made = loaded("llama", recipes, make)
    ids = ids_of(len(recipes) + 1, 6)
    computed = greedy(model.generate, ids, adapter_names=[*recipes, None])
    plain: Any = load_base("llama", made[0].base)
    assert torch.equal(computed[-1:], greedy(plain.generate, ids[-1:]))
    for row, chosen in enumerate(made):
        expected = greedy(peft_model("llama", chosen).base_model.model.generate, ids[row : row + 1])
        assert torch.equal(computed[row : row + 1], expected), recipes[row]
    assert len({tuple(row.tolist()) for row in computed}) > len(recipes) / 2


def test_padded_prompts_generate_what_they_generate_alone(make: Make) -> None:
    model, _ = loaded("llama", ("lora", "oft"), make)
    long, short = ids_of(1, 9), ids_of(1, 4, seed=1)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), short], 1)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :5] = 0
    both = greedy(model.generate, torch.cat([long, padded]), adapter_names=["lora", "oft"], attention_mask=mask)
    assert torch.equal(both[:1], greedy(model.generate, long, adapter_names=["lora"]))
    assert torch.equal(both[1:], greedy(model.generate, short, adapter_names=["oft"]))


def test_beams_use_the_adapter_of_their_row(make: Make) -> None:
    model, made = loaded("llama", ("lora", "dora"), make)
    ids = ids_of(2, 5)
    computed = greedy(model.generate, ids, adapter_names=["dora", "lora"], num_beams=3)
    for row, chosen in enumerate(reversed(made)):
        expected = greedy(peft_model("llama", chosen).base_model.model.generate, ids[row : row + 1], num_beams=3)
        assert torch.equal(computed[row : row + 1], expected)


def test_adapters_are_loaded_replaced_and_removed_between_calls(make: Make) -> None:
    model, made = loaded("llama", ("lora",), make)
    ids = ids_of(2, 6)
    first = logits_of(model, ids, ["lora", None])
    model.load_adapter(make("oft", "llama").artifact, adapter_name="oft")
    both = logits_of(model, ids, ["lora", "oft"])
    assert torch.equal(both[0], first[0])
    assert (both[1] - first[1]).abs().max() > 0.1
    model.delete_adapter("lora")
    assert model.adapters == ("oft",)
    assert torch.equal(logits_of(model, ids, [None, "oft"])[1], both[1])
    model.replace_adapter(made[0].artifact, adapter_name="oft")
    assert torch.equal(logits_of(model, ids, ["oft", None])[0], first[0])


def test_more_adapters_than_the_device_holds_are_swapped(make: Make) -> None:
    recipes = ("lora", "dora", "ia3", "vera", "oft")
    model, _ = loaded("llama", recipes, make, max_adapters=2)
    ids = ids_of(1, 5)
    once = [logits_of(model, ids, [recipe]) for recipe in recipes]
    for recipe, before in zip(recipes, once, strict=True):
        assert torch.equal(logits_of(model, ids, [recipe]), before)
    assert len(model.pool.resident) == 2


def test_layers_without_an_adapter_of_the_batch_run_the_base(make: Make) -> None:
    model, _ = loaded("llama", ("ia3", "lora-one-layer"), make)
    active = {}
    for recipe in ("ia3", "lora-one-layer", None):
        with model.step([recipe], [5]):
            active[recipe] = {name for name, chosen in model.layers.items() if chosen.active}
    assert active["ia3"] == {
        f"model.layers.{n}.{name}" for n in range(2) for name in ("self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj")
    }
    assert {name.split(".")[2] for name in active["lora-one-layer"]} == {"1"}
    assert active[None] == set()


def test_the_model_itself_stays_the_base(make: Make) -> None:
    model, made = loaded("llama", ("lora",), make)
    ids = ids_of(2, 5)
    logits_of(model, ids, ["lora", None])
    assert torch.equal(logprobs(model.model, ids), logprobs(load_base("llama", made[0].base), ids))


def test_a_step_gives_sequences_of_any_length_their_adapters(make: Make) -> None:
    model, _ = loaded("llama", ("lora", "oft"), make)
    short, long = ids_of(1, 3), ids_of(1, 5, seed=1)
    seen: list[torch.Tensor] = []
    name = "model.layers.0.self_attn.q_proj"
    model.layers[name].register_forward_hook(lambda _, __, y: seen.append(y[0]))
    logits_of(model, short, ["lora"])
    logits_of(model, long, ["oft"])
    with model.step(["lora", "oft"], [3, 5]), torch.no_grad():
        model.model(input_ids=torch.cat([short, long], 1))
    assert torch.allclose(seen[2], torch.cat(seen[:2]), atol=1e-5)


def test_remove_puts_the_layers_back_under_their_names(make: Make) -> None:
    chosen = make("lora", "gpt2")
    plain = load_base("gpt2", chosen.base)
    names = list(plain.state_dict())
    ids = ids_of(2, 5)
    before = logprobs(plain, ids)
    with served("gpt2", chosen.base) as model:
        assert list(model.model.state_dict()) == names
        model.load_adapter(chosen.artifact, adapter_name="lora")
        assert (torch.log_softmax(logits_of(model, ids, ["lora", None]), -1)[0] - before[0]).abs().max() > 0.1
        inside = model.model
    assert torch.equal(logprobs(inside, ids), before)
    assert not any("Served" in type(module).__name__ for module in inside.modules())


def test_the_weights_of_a_conv1d_are_not_copied(make: Make) -> None:
    chosen = make("lora", "gpt2")
    model = served("gpt2", chosen.base)
    layer = model.layers["transformer.h.0.attn.c_attn"]
    assert layer.weight_NK.data_ptr() == layer.weight.data_ptr()  # type: ignore[operator] # a module attribute
    assert tuple(layer.weight_NK.shape) == (192, 64)


def test_an_artifact_in_another_dtype_is_refused_or_rounded(make: Make, pair: Pair, shared_folder: Path) -> None:
    half = artifact_of("lora", "llama", pair, shared_folder, dtype="bfloat16")
    model, _ = loaded("llama", ("lora",), make)
    assert_harmless(model, "SC801", "bfloat16", lambda: model.load_adapter(half.artifact, adapter_name="half"))
    rounding, made = loaded("llama", ("lora",), make, convert=True)
    rounding.load_adapter(half.artifact, adapter_name="half")
    ids = ids_of(2, 8)
    rows = torch.log_softmax(logits_of(rounding, ids[:1].repeat(2, 1), ["lora", "half"]), -1)
    plain = logprobs(load_base("llama", made[0].base), ids[:1])[0]
    assert 1e-4 < relative_error(rows[1], rows[0], plain) < 2.5e-2


def test_a_half_precision_model_serves_half_precision_artifacts(make: Make, pair: Pair, shared_folder: Path) -> None:
    half = artifact_of("dora", "llama", pair, shared_folder, dtype="bfloat16")
    model = ServedModel(
        load_base("llama", half.base).bfloat16(), max_adapters=2, pool_bytes="1MiB", shared_bytes="32KiB"
    )
    model.load_adapter(half.artifact, adapter_name="dora")
    ids = ids_of(2, 8)
    computed = torch.log_softmax(logits_of(model, ids, ["dora", None]).float(), -1)
    exact = logprobs(peft_model("llama", make("dora", "llama")), ids[:1])[0]
    plain = logprobs(load_base("llama", half.base), ids)
    assert relative_error(computed[0], exact, plain[0]) < 0.1


def assert_harmless(model: ServedModel, code: str, text: str, act: Callable[[], object]) -> None:
    """Check that `act` is refused with a code, and that rows of `lora` and of the base stay bit-identical."""
    ids = ids_of(2, 6)
    before, names = logits_of(model, ids, ["lora", None]), model.adapters
    with pytest.raises(ScuteError, match=text) as refused:
        act()
    assert refused.value.diagnostics[0].code.name == code
    assert model.adapters == names
    assert torch.equal(logits_of(model, ids, ["lora", None]), before)


def test_an_artifact_for_another_base_is_refused(make: Make) -> None:
    model, made = loaded("llama", ("lora",), make)
    other = make("lora", "gpt2")
    assert_harmless(
        model, "SC402", "no single change", lambda: model.load_adapter(other.artifact, adapter_name="other")
    )
    wide = make("lora", "llama-wide")
    assert_harmless(model, "SC402", "96 outputs", lambda: model.load_adapter(wide.artifact, adapter_name="wide"))
    strict = served("llama", made[0].base, base_structure="0" * 64)
    with pytest.raises(ScuteError, match="SC608"):
        strict.load_adapter(made[0].artifact, adapter_name="lora")


def test_an_artifact_for_other_ranks_is_refused(make: Make, pair: Pair, shared_folder: Path) -> None:
    model, _ = loaded("llama", ("lora",), make)
    cut = artifact_of("lora", "llama", pair, shared_folder, tp=2)
    assert_harmless(model, "SC801", "tp 2", lambda: model.load_adapter(cut.artifact, adapter_name="cut"))


def test_names_that_are_not_loaded_are_refused(make: Make) -> None:
    model, _ = loaded("llama", ("lora",), make)
    ids = ids_of(2, 4)
    assert_harmless(model, "SC802", "unknown", lambda: logits_of(model, ids, ["lora", "unknown"]))
    assert_harmless(model, "SC802", "unknown", lambda: model.generate(ids, adapter_names=["unknown", None]))
    assert_harmless(model, "SC802", "unknown", lambda: model.delete_adapter("unknown"))
    assert_harmless(
        model, "SC802", "unknown", lambda: model.replace_adapter(make("oft", "llama").artifact, adapter_name="unknown")
    )


def test_more_distinct_adapters_than_fit_are_refused(make: Make) -> None:
    model, _ = loaded("llama", ("lora", "dora", "oft"), make, max_adapters=2)
    rows = ["lora", "dora", "oft"]
    assert_harmless(model, "SC804", "3 adapters", lambda: logits_of(model, ids_of(3, 4), rows))
    assert_harmless(model, "SC804", "3 adapters", lambda: model.generate(ids_of(3, 4), adapter_names=rows))


def test_more_tokens_than_the_buffers_hold_are_refused(make: Make) -> None:
    model, _ = loaded("llama", ("lora",), make, max_num_batched_tokens=64)
    assert_harmless(model, "SC804", "80 tokens", lambda: logits_of(model, ids_of(4, 20), ["lora"] * 4))


def test_a_pool_too_small_for_one_adapter_is_refused(make: Make) -> None:
    wide, _ = loaded("llama", ("lora",), make)
    logits_of(wide, ids_of(1, 2), ["lora"])
    model, _ = loaded(
        "llama", ("lora",), make, pool_bytes=wide.pool.stats().pages.in_use * PAGE_BYTES, shared_bytes="2KiB"
    )
    large = make("rslora", "llama").artifact  # rank 9, not 4
    assert_harmless(model, "SC805", "pool with at least", lambda: model.load_adapter(large, adapter_name="rslora"))
    assert_harmless(model, "SC805", "pool with at least", lambda: model.replace_adapter(large, adapter_name="lora"))
    assert_harmless(
        model,
        "SC805",
        "bytes for shared factors, ",
        lambda: model.load_adapter(make("vera", "llama").artifact, adapter_name="vera"),
    )


@pytest.mark.parametrize(
    "tokens",
    [
        torch.tensor([[3, 128]]),
        torch.tensor([[-1, 3]]),
        torch.tensor([[0.5, 2.0]]),
        torch.tensor([[3, 4]], dtype=torch.int8),
    ],
)
def test_tokens_that_the_model_does_not_have_are_refused(tokens: torch.Tensor, make: Make) -> None:
    model, _ = loaded("llama", ("lora",), make)
    assert model.model.get_parameter("model.embed_tokens.weight").shape[0] == 128
    logits_of(model, torch.tensor([[0, 127]]), ["lora"])
    assert_harmless(model, "SC703", "from 0 to 127", lambda: logits_of(model, tokens, ["lora"]))
    assert_harmless(model, "SC703", "from 0 to 127", lambda: model.generate(tokens, adapter_names=["lora"]))


@pytest.mark.parametrize("names", [{"lora"}, {"lora": 1}, None, "l"])
def test_adapter_names_without_an_order_are_refused(names: object, make: Make) -> None:
    model, _ = loaded("llama", ("lora",), make)
    assert_harmless(model, "SC703", "a list or tuple", lambda: model.forward(ids_of(1, 2), adapter_names=names))  # type: ignore[arg-type] # wrong on purpose


@pytest.mark.parametrize("name", [None, 7, ""])
def test_an_adapter_name_must_be_a_non_empty_string(name: object, make: Make) -> None:
    model, _ = loaded("llama", ("lora",), make)
    artifact = make("oft", "llama").artifact
    assert_harmless(model, "SC703", "a string", lambda: model.load_adapter(artifact, adapter_name=name))  # type: ignore[arg-type] # likewise


def test_one_adapter_name_per_row_is_required(make: Make) -> None:
    model, _ = loaded("llama", ("lora",), make)
    assert_harmless(model, "SC703", "3 adapter names for 4 rows", lambda: logits_of(model, ids_of(4, 4), ["lora"] * 3))
    assert_harmless(model, "SC703", "2 adapter names for 4", lambda: logits_of(model, ids_of(4, 4), ["lora"] * 2))
    assert_harmless(model, "SC703", "3 adapter names", lambda: model.generate(ids_of(4, 4), adapter_names=["lora"] * 3))
    assert_harmless(
        model, "SC806", "a new name", lambda: model.load_adapter(make("oft", "llama").artifact, adapter_name="lora")
    )

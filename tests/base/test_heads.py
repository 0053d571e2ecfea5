"""The heads and embeddings that are recognised by name are those of transformers' models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from scute_compile.base.heads import is_embedding, is_output_head, is_token_embedding, tied_embedding
from tests.support.bases import BASES

CLASSIFIERS = {
    "llama": (transformers.AutoModelForSequenceClassification, "score"),
    "gpt2": (transformers.AutoModelForSequenceClassification, "score"),
    "qwen2": (transformers.AutoModelForTokenClassification, "score"),
    "opt": (transformers.AutoModelForQuestionAnswering, "qa_outputs"),
}


def built(name: str, kind: Any = None) -> Any:  # noqa: ANN401 - transformers is not typed
    usual = transformers.AutoModelForImageTextToText if BASES[name].multimodal else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        return (kind or usual).from_config(BASES[name].config())


def path_of(model: Any, wanted: object) -> str:  # noqa: ANN401 - likewise
    return next(str(path) for path, module in model.named_modules() if module is wanted)


@pytest.mark.parametrize("name", BASES)
def test_the_models_own_head_and_token_embedding_are_recognised(name: str) -> None:
    model = built(name)
    assert is_output_head(path_of(model, model.get_output_embeddings()))
    assert is_token_embedding(path_of(model, model.get_input_embeddings()))


@pytest.mark.parametrize("name", BASES)
def test_every_embedding_and_nothing_inside_a_layer_is_recognised(name: str) -> None:
    for path, module in built(name).named_modules():
        if isinstance(module, torch.nn.Embedding):
            assert is_embedding(path), path
        elif isinstance(module, torch.nn.Linear) and any(part.isdigit() for part in path.split(".")):
            assert not is_output_head(path), path
            assert not is_embedding(path), path


@pytest.mark.parametrize("name", BASES)
def test_a_tied_head_is_tied_to_the_models_token_embedding(name: str) -> None:
    model = built(name)
    tables = [path for path, module in model.named_modules() if isinstance(module, torch.nn.Embedding)]
    assert tied_embedding(tables) == path_of(model, model.get_input_embeddings())


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_heads_of_classifiers_are_recognised(name: str) -> None:
    kind, head = CLASSIFIERS[name]
    assert head in dict(built(name, kind).named_modules())
    assert is_output_head(head)


@pytest.mark.parametrize(
    ("path", "head"),
    [
        ("output", True),
        ("language_model.output", True),
        ("transformer.output_layer", True),
        ("proj_out", True),
        ("lm_head.decoder", True),
        ("cls.predictions.decoder", True),
        ("model.decoder.layers.0.fc1", False),
        ("encoder.layer.0.output", False),
        ("blocks.0.attn.proj_out", False),
        ("lm_head.dense", False),
    ],
)
def test_common_words_denote_a_head_only_below_a_whole_model(path: str, head: bool) -> None:
    assert is_output_head(path) is head


def test_of_several_token_embeddings_the_shared_one_is_chosen_or_none() -> None:
    assert tied_embedding(["encoder.embed_tokens", "decoder.embed_tokens", "shared"]) == "shared"
    assert tied_embedding(["encoder.embed_tokens", "decoder.embed_tokens"]) is None
    assert tied_embedding(["transformer.wpe"]) is None

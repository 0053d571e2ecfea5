"""Output heads and embeddings under the names that architectures give them: recognised, never served as layers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.commands import Ran, scute

HIDDEN, VOCABULARY, POSITIONS, RANK = 8, 24, 12, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A base with one linear layer, its tables of embeddings, and its output heads."""

    model_type: str
    layer: str
    embedding: str
    """The table of token embeddings."""
    tables: tuple[str, ...] = ()
    """Other embeddings: positions, token types."""
    heads: tuple[str, ...] = ()
    """Heads with a weight in the checkpoint."""
    tied_head: str = ""
    """The head that is tied to the token embedding, and therefore not in the checkpoint."""
    config: Mapping[str, object] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Write the base's configuration and weights."""
        rows = {self.layer: HIDDEN, self.embedding: VOCABULARY}
        rows |= dict.fromkeys(self.tables, POSITIONS) | dict.fromkeys(self.heads, VOCABULARY)
        generator = torch.Generator().manual_seed(3)
        tensors = {f"{path}.weight": torch.randn(count, HIDDEN, generator=generator) for path, count in rows.items()}
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps({"model_type": self.model_type, **self.config}))
        return folder


GPT2 = Model(
    model_type="gpt2",
    layer="transformer.h.0.attn.c_proj",
    embedding="transformer.wte",
    tables=("transformer.wpe",),
    tied_head="lm_head",
)
OPT = Model(
    model_type="opt",
    layer="model.decoder.layers.0.self_attn.q_proj",
    embedding="model.decoder.embed_tokens",
    tables=("model.decoder.embed_positions",),
    tied_head="lm_head",
)
BERT = Model(
    model_type="bert",
    layer="bert.encoder.layer.0.attention.self.query",
    embedding="bert.embeddings.word_embeddings",
    tables=("bert.embeddings.position_embeddings", "bert.embeddings.token_type_embeddings"),
    tied_head="cls.predictions.decoder",
)
VISION = Model(
    model_type="mistral3",
    layer="model.language_model.layers.0.self_attn.q_proj",
    embedding="model.language_model.embed_tokens",
    tables=("model.vision_tower.embeddings.position_embedding",),
    tied_head="lm_head",
    config={"text_config": {"model_type": "mistral"}},
)
WHISPER = Model(
    model_type="whisper",
    layer="model.decoder.layers.0.self_attn.q_proj",
    embedding="model.decoder.embed_tokens",
    tables=("model.decoder.embed_positions", "model.encoder.embed_positions"),
    tied_head="proj_out",
)
BART = Model(
    model_type="bart",
    layer="model.encoder.layers.0.self_attn.q_proj",
    embedding="model.shared",
    tables=("model.encoder.embed_positions",),
    tied_head="lm_head",
)
NEOX = Model(
    model_type="gpt_neox",
    layer="gpt_neox.layers.0.attention.dense",
    embedding="gpt_neox.embed_in",
    heads=("embed_out",),
)
INTERNLM2 = Model(
    model_type="internlm2",
    layer="model.layers.0.attention.wo",
    embedding="model.tok_embeddings",
    heads=("output",),
)
CHATGLM = Model(
    model_type="chatglm",
    layer="transformer.encoder.layers.0.self_attention.dense",
    embedding="transformer.embedding.word_embeddings",
    heads=("transformer.output_layer",),
)
ROBERTA = Model(
    model_type="roberta",
    layer="roberta.encoder.layer.0.attention.self.query",
    embedding="roberta.embeddings.word_embeddings",
    tables=("roberta.embeddings.position_embeddings",),
    heads=("lm_head.decoder",),
)
CLASSIFIER = Model(
    model_type="llama",
    layer="model.layers.0.self_attn.q_proj",
    embedding="model.embed_tokens",
    heads=("score",),
)
TIED = {model.model_type: model for model in (GPT2, OPT, BERT, VISION, WHISPER, BART)}
UNTIED = {model.model_type: model for model in (NEOX, INTERNLM2, CHATGLM, ROBERTA, CLASSIFIER)}


def write_adapter(
    folder: Path, *modules: str, targets: object, extra: Mapping[str, torch.Tensor] | None = None, rows: int = HIDDEN
) -> Path:
    """Write a LoRA adapter with factors on `modules`; `extra` are further tensors by their keys after PEFT's prefix."""
    generator = torch.Generator().manual_seed(4)
    tensors = {
        f"{module}.lora_{factor}.weight": torch.randn(shape, generator=generator)
        for module in modules
        for factor, shape in (("A", (RANK, HIDDEN)), ("B", (rows, RANK)))
    }
    folder.mkdir()
    keyed = {f"base_model.model.{key}": tensor for key, tensor in {**tensors, **(extra or {})}.items()}
    save_file(keyed, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 4, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def checked(adapter: Path, base: Path) -> Ran:
    return scute("check", adapter, "--base", base, "--json")


def codes(ran: Ran) -> set[object]:
    return {finding["code"] for finding in ran.adapter["findings"]}


def short(path: str) -> str:
    return path.rpartition(".")[2]


@pytest.mark.parametrize("name", TIED)
def test_an_equal_copy_of_a_tied_head_is_dropped(name: str, tmp_path: Path) -> None:
    """The copy is compared with the token embedding, even where the base has other tables of embeddings."""
    model = TIED[name]
    base = model.write(tmp_path / "base")
    copy = load_file(base / "model.safetensors")[f"{model.embedding}.weight"]
    extra = {f"{model.tied_head}.weight": copy}
    ran = checked(write_adapter(tmp_path / "adapter", model.layer, targets=[short(model.layer)], extra=extra), base)
    assert codes(ran) == {"SC313"}
    assert ran.code == 0


@pytest.mark.parametrize("name", TIED)
def test_a_trained_copy_of_a_tied_head_is_refused_as_such(name: str, tmp_path: Path) -> None:
    model = TIED[name]
    base = model.write(tmp_path / "base")
    extra = {f"{model.tied_head}.weight": torch.ones(VOCABULARY, HIDDEN)}
    ran = checked(write_adapter(tmp_path / "adapter", model.layer, targets=[short(model.layer)], extra=extra), base)
    assert codes(ran) == {"SC312"}


@pytest.mark.parametrize("name", TIED)
def test_the_bias_of_a_tied_head_is_not_compared_with_the_embedding(name: str, tmp_path: Path) -> None:
    model = TIED[name]
    base = model.write(tmp_path / "base")
    extra = {f"{model.tied_head}.bias": torch.ones(VOCABULARY)}
    ran = checked(write_adapter(tmp_path / "adapter", model.layer, targets=[short(model.layer)], extra=extra), base)
    assert codes(ran) == {"SC301"}


@pytest.mark.parametrize("name", [*TIED, *UNTIED])
def test_all_linear_means_the_layers_without_heads_and_embeddings(name: str, tmp_path: Path) -> None:
    model = (TIED | UNTIED)[name]
    base = model.write(tmp_path / "base")
    ran = checked(write_adapter(tmp_path / "adapter", model.layer, targets="all-linear"), base)
    assert codes(ran) == set()
    assert ran.adapter["sites"] == 1


@pytest.mark.parametrize("with_base", [True, False])
@pytest.mark.parametrize("name", UNTIED)
def test_factors_on_a_head_are_refused_with_and_without_the_base(name: str, with_base: bool, tmp_path: Path) -> None:
    model = UNTIED[name]
    base = model.write(tmp_path / "base")
    head = model.heads[0]
    adapter = write_adapter(tmp_path / "adapter", head, targets=[short(head)], rows=VOCABULARY)
    ran = scute("inspect", adapter, *(("--base", base) if with_base else ()))
    assert ran.code == 1
    assert "SC317" in ran.err


@pytest.mark.parametrize("name", [*TIED, *UNTIED])
def test_a_targeted_head_without_tensors_is_an_error(name: str, tmp_path: Path) -> None:
    """PEFT would have trained it: the checkpoint is not complete."""
    model = (TIED | UNTIED)[name]
    base = model.write(tmp_path / "base")
    head = short(model.tied_head or model.heads[0])
    ran = checked(write_adapter(tmp_path / "adapter", model.layer, targets=[short(model.layer), head]), base)
    assert codes(ran) == {"SC319"}


@pytest.mark.parametrize(
    ("name", "target"),
    [("llama", "lm_head"), ("bert", "lm_head"), ("whisper", "lm_head"), ("gpt2", "embed_out"), ("opt", "score")],
)
def test_a_head_that_the_model_does_not_have_is_a_target_without_effect(name: str, target: str, tmp_path: Path) -> None:
    model = (TIED | UNTIED)[name]
    base = model.write(tmp_path / "base")
    ran = checked(write_adapter(tmp_path / "adapter", model.layer, targets=[short(model.layer), target]), base)
    assert codes(ran) == {"SC208"}
    assert ran.code == 0

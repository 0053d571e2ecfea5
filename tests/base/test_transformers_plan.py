"""The shipped data equals what the generator reads from the installed transformers, and reading it needs none."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
import transformers

from scute_compile.base.generate_plans import read_transformers, text_of
from scute_compile.base.transformers_plan import DATA, config_default, tied_heads, tp_plan
from tests.support.commands import python

PLANNED = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "phi3",
    "gpt_neox",
    "mixtral",
    "gemma3_text",
    "qwen2_vl_text",
)
TABLES = ("plans", "defaults", "tied_heads")


def entries(content: Mapping[str, object]) -> dict[tuple[str, ...], object]:
    """Return every entry of the data by table and architecture; in plans and defaults also by pattern or field."""
    found: dict[tuple[str, ...], object] = {}
    for table in TABLES:
        rows = content[table]
        assert isinstance(rows, dict)
        for model_type, row in rows.items():
            items = row.items() if isinstance(row, dict) else [("", row)]
            found |= {(table, model_type, key): value for key, value in items}
    return found


def shipped() -> dict[str, object]:
    content: dict[str, object] = json.loads(DATA.read_text(encoding="utf-8"))
    return content


def test_the_data_is_what_the_generator_writes_for_the_installed_transformers() -> None:
    """With another release than the data's, new architectures are accepted, and changes of known ones are not."""
    installed = read_transformers()
    if transformers.__version__ == shipped()["transformers"]:
        assert DATA.read_text(encoding="utf-8") == text_of(installed)
        return
    then, now = entries(shipped()), entries(installed)
    changed = {key: (value, now.get(key)) for key, value in then.items() if now.get(key) != value}
    added = sorted(now.keys() - then.keys())
    assert not changed, f"transformers {transformers.__version__} changed {changed}; it also added {added}"


@pytest.mark.parametrize("model_type", PLANNED)
def test_plans_and_defaults_are_those_of_the_configuration_classes(model_type: str) -> None:
    config = transformers.CONFIG_MAPPING[model_type]() if model_type in transformers.CONFIG_MAPPING else None
    if config is None:
        config = transformers.Qwen2VLConfig().text_config
    assert config.model_type == model_type
    assert tp_plan(model_type) == config.base_model_tp_plan
    assert config_default(model_type, "num_attention_heads") == config.num_attention_heads


@pytest.mark.parametrize("model_type", ["gpt2", "not_a_model", "../llama", ""])
def test_an_architecture_without_a_plan_has_none(model_type: str) -> None:
    assert tp_plan(model_type) is None


def test_defaults_are_whole_numbers_of_known_architectures() -> None:
    assert config_default("gemma3_text", "num_attention_heads") == 8
    assert config_default("llama", "num_attention_heads") == 32
    assert config_default("gpt2", "n_head") == 12
    assert config_default("llama", "head_dim") is None
    assert config_default("swin", "num_heads") is None  # a list
    assert config_default("not_a_model", "num_attention_heads") is None


def test_tied_heads_are_recorded_unless_they_are_all_called_lm_head() -> None:
    assert tied_heads("whisper") == ("proj_out",)
    assert tied_heads("bert") == ("cls.predictions.decoder",)
    assert tied_heads("llama") == ()
    assert tied_heads("not_a_model") == ()


def test_the_data_is_read_without_transformers() -> None:
    program = """
import sys
sys.modules["transformers"] = None  # an import of it fails, as that of an absent package does
from scute_compile.base.structure import build_structure
from scute_compile.ir.expressions import Ref, Source
key = "model.layers.0.mlp.up_proj.weight"
structure = build_structure({"model_type": "llama"}, {key: Ref(Source.BASE, key, (160, 4096), "F32")})
print(structure.tp_source, sorted({"torch", "peft"} & sys.modules.keys()))
"""
    assert python(program).strip() == "transformers plan []"

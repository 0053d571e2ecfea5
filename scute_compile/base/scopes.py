"""Finds the part of a nested configuration that describes a module: a multimodal configuration has one for each model.

A text model's plan and heads must not be applied to a vision tower whose layers have the same names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from scute_compile.base.transformers_plan import CONFIG_FIELDS, config_default

Config = Mapping[str, object]

_TEXT = ("text_config", "language_config", "llm_config")
_NONE: Config = MappingProxyType({})
_TOWERS = (
    (re.compile(r"vi(sion|sual|t)(_\w+)?|image_\w+|img_\w+"), "vision_config"),
    (re.compile(r"(audio|speech)(_\w+)?"), "audio_config"),
    # The connector of a tower and the text model has no heads, and no plan that engines follow.
    (re.compile(r"multi_?modal_\w+|mm_\w+|\w*projector|aligner|connector\w*|adapter|embed_(vision|audio)"), ""),
)
_SPELLINGS = {
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads"),
    "hidden_size": ("hidden_size", "n_embd"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer"),
    "intermediate_size": ("intermediate_size", "n_inner"),
}
_IDENTITY = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "head_dim",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The configuration that holds for a module."""

    model_type: str
    config: Config

    def number(self, field: str) -> int | None:
        """Return a field that is a positive whole number, or its default in transformers, or None."""
        names = _SPELLINGS.get(field, (field,))
        given = [self.config[name] for name in names if self.config.get(name) is not None]
        # For a null field the model derives the value from other fields; the class's default doesn't apply.
        if not given and not any(name in self.config for name in names):
            given = [config_default(self.model_type, name) for name in names if name in CONFIG_FIELDS]
        return next((n for n in given if isinstance(n, int) and not isinstance(n, bool) and n > 0), None)

    @property
    def clamps(self) -> bool:
        """Whether a field limits the MLP's activations (`swiglu_limit` and the like)."""
        return any("limit" in k and ("glu" in k or "act" in k) and v is not None for k, v in self.config.items())


def model_type_of(config: Config) -> str:
    """Return the configuration's model type, or an empty string."""
    found = config.get("model_type")
    return found if isinstance(found, str) else ""


def text_scope(config: Config) -> Scope:
    """Return the scope of the text model: the nested text configuration, or the whole one if none is nested."""
    for key in _TEXT:
        if isinstance(inner := config.get(key), Mapping):
            return Scope(model_type=model_type_of(inner) or f"{model_type_of(config)}_text", config=inner)
    return Scope(model_type=model_type_of(config), config=config)


def scope_of(config: Config, path: str) -> Scope:
    """Return the scope of the module at `path`."""
    segments = path.split(".")
    # Models of models: `thinker.model.layers.0` is described by `thinker_config`.
    while isinstance(inner := config.get(f"{segments[0]}_config"), Mapping) and len(segments) > 1:
        if f"{segments[0]}_config" in _TEXT:
            break
        config, segments = inner, segments[1:]
    for segment in segments[:-1]:
        for pattern, key in _TOWERS:
            if pattern.fullmatch(segment):
                inner = config.get(key)
                inner = inner if isinstance(inner, Mapping) else _NONE
                return Scope(model_type=model_type_of(inner), config=inner)
    return text_scope(config)


def identity(config: Config) -> Config:
    """Return the fields that identify a base: sizes of its text model, and its model type."""
    text = text_scope(config).config
    found: dict[str, object] = {"model_type": model_type_of(config)}
    for field in _IDENTITY:
        for name in _SPELLINGS.get(field, (field,)):
            if text.get(name) is not None:
                found[name] = text[name]
    return MappingProxyType(found)

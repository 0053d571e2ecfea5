"""Data about architectures, taken from transformers: tensor-parallel plans, configuration defaults, tied heads.

`python -m scute_compile.base.generate_plans` writes `transformers_plans.json` from an installed transformers. Planning
therefore needs no transformers, and doesn't depend on the installed release.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import cast

DATA = Path(__file__).with_name("transformers_plans.json")

CONFIG_FIELDS = ("head_dim", "hidden_size", "n_embd", "n_head", "num_attention_heads", "num_heads")
"""The fields of configurations whose defaults are recorded: those that `scute_compile.base.scopes` asks for."""


def release() -> str:
    """Return the release of transformers that the data was taken from."""
    return cast("str", _data()["transformers"])


def tp_plan(model_type: str) -> Mapping[str, str] | None:
    """Return `base_model_tp_plan` of the architecture: module pattern, relative to the base model -> kind of split.

    None when the architecture is unknown or has no plan.
    """
    plans = cast("Mapping[str, Mapping[str, str]]", _data()["plans"])
    return plans.get(model_type)


def config_default(model_type: str, field: str) -> int | None:
    """Return the default of a field that a config.json leaves out.

    Args:
        model_type: The architecture.
        field: One of `CONFIG_FIELDS`.

    Returns:
        The value in the architecture's configuration class; None when the architecture is unknown, or the value is no
        whole number.
    """
    defaults = cast("Mapping[str, Mapping[str, int]]", _data()["defaults"])
    return defaults.get(model_type, {}).get(field)


def tied_heads(model_type: str) -> tuple[str, ...]:
    """Return the output heads that models of the architecture tie to an embedding; empty when none is recorded.

    Architectures whose only such head is `lm_head` are not recorded.
    """
    heads = cast("Mapping[str, list[str]]", _data()["tied_heads"])
    return tuple(heads.get(model_type, ()))


@cache
def _data() -> Mapping[str, object]:
    return cast("Mapping[str, object]", json.loads(DATA.read_text(encoding="utf-8")))

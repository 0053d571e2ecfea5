"""Reads `adapter_config.json`: every field is known, unset, or refused by name.

A method declares the fields that it reads as a pydantic model, the fields that never change what an adapter computes
(`INERT`), and the fields that may hold only certain values (`Rule`). Any other field that is set is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from scute_compile.diagnostics import Code, Findings

INERT = frozenset(
    {
        "peft_type",
        "auto_mapping",
        "base_model_name_or_path",
        "revision",
        "task_type",
        "inference_mode",
        "peft_version",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "runtime_config",
        "fan_in_fan_out",
    }
)
"""Fields of every method that describe the training run, or that are compared with the tensors elsewhere."""

Bias = Annotated[str, Field(pattern=r"^(none|all|[a-z0-9]+_only)$")]
"""Which biases were trained: none, all of the model, or those of the adapted layers."""


class Settings(BaseModel):
    """The fields that a front end reads. `read_settings` handles all others."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A field that may hold only values with which the adapter stays in the normal form."""

    name: str
    code: Code
    why: str
    """The field's effect when it is set."""
    next: str = "train or convert the adapter without it"
    allowed: tuple[object, ...] = ()
    """Accepted values, in addition to unset ones."""


REPLACED = (
    Rule(
        name="modules_to_save",
        code=Code.SC211,
        why="replaces whole modules of the base; a dense module per tenant does not fit the formula",
        next="train without modules_to_save, or serve this adapter as a separate model",
    ),
    Rule(
        name="trainable_token_indices",
        code=Code.SC211,
        why="trainable tokens replace rows of the embedding",
        next="train without trainable tokens, or serve this adapter as a separate model",
    ),
    Rule(
        name="target_parameters",
        code=Code.SC212,
        why="adapts stacked parameters (experts) that are no linear layer",
        next=Code.SC212.next,
    ),
)

Fields = TypeVar("Fields", bound=Settings)


def is_unset(value: object) -> bool:
    """Return whether a field's value is what an unused feature looks like: null, false, or an empty container."""
    return value is None or value is False or value in ({}, [], "")


def read_settings(
    config: Mapping[str, object],
    model: type[Fields],
    *,
    inert: frozenset[str],
    rules: tuple[Rule, ...],
    findings: Findings,
) -> Fields | None:
    """Validate the fields that `model` declares, and refuse other fields that are set.

    Args:
        config: The content of `adapter_config.json`.
        model: The fields that the method reads.
        inert: Fields that never change what the method computes.
        rules: Fields that may hold only certain values.
        findings: Receives SC203, SC205 and the rules' codes.

    Returns:
        The fields, or None when one is malformed (recorded in `findings`).
    """
    by_name = {rule.name: rule for rule in (*REPLACED, *rules)}
    for name, value in config.items():
        if name in model.model_fields or name in INERT or name in inert or is_unset(value):
            continue
        rule = by_name.get(name)
        if rule is None:
            findings.error(
                Code.SC203,
                where=name,
                found=f"{name} = {short(value)}",
                expected="fields that this version knows, or unset ones",
            )
        elif value not in rule.allowed:
            findings.error(
                rule.code,
                where=name,
                found=f"{name} = {short(value)}: {rule.why}",
                expected="the field unset",
                next=rule.next,
            )
    try:
        return model.model_validate({k: v for k, v in config.items() if v is not None or k not in model.model_fields})
    except ValidationError as error:
        for fault in error.errors():
            findings.error(
                Code.SC205,
                where=".".join(str(step) for step in fault["loc"]),
                found=short(fault["input"]),
                expected=fault["msg"].lower(),
            )
        return None


def short(value: object) -> str:
    """Return a value of the configuration for a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def written_before(config: Mapping[str, object], version: tuple[int, int]) -> bool:
    """Return whether the PEFT that saved the configuration is older than `version`.

    The field `peft_version` exists since 0.18; without it the file is older than that.
    """
    text = config.get("peft_version")
    if not isinstance(text, str):
        return version > (0, 17)
    parts = text.split(".")
    try:
        return (int(parts[0]), int(parts[1])) < version
    except (ValueError, IndexError):
        return False

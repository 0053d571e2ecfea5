"""Derives the tensors of a base from its config.json alone.

The model is built on the meta device, without weights. This is the only module of planning that imports torch and
transformers, and it does so only for a base folder without weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from scute_compile.diagnostics import Code, Diagnostic, ScuteError, fail
from scute_compile.ir.dtypes import FORMATS, DType
from scute_compile.ir.expressions import Ref, Source

if TYPE_CHECKING:
    import torch

LIMITS = (
    (re.compile(r"\w*layers|(\w+_)?(n_layer|num_layer|n_blocks|num_blocks|depth)"), 1000),
    (re.compile(r"\w*experts"), 10_000),
)
"""Names of fields -> the largest number that a base may have there when it is built from its configuration."""

_WEIGHTS_HELP = "name a folder with the base's safetensors files: their headers give names and shapes"


def structure_tensors(config_path: Path) -> Mapping[str, Ref]:
    """Return the tensors of the base's checkpoint by key: names, shapes, and the configuration's dtype.

    Tied weights appear once, under the name that `save_pretrained` writes.

    Raises:
        ScuteError: SC701 when torch or transformers is not installed, SC405 when transformers can't build the model.
    """
    state = _state(config_path)
    codes = {f"torch.{row.name}": row.code for row in FORMATS.values()}
    tensors: dict[str, Ref] = {}
    for key, tensor in state.items():
        code = codes.get(str(tensor.dtype), DType.FLOAT32.code)
        tensors[key] = Ref(Source.BASE, key, tuple(tensor.shape), code)
    return MappingProxyType(tensors)


def check_counts(config: object, where: str) -> None:
    """Refuse numbers of layers and experts beyond any real model's, since each of them would be built.

    Args:
        config: The content of a config.json.
        where: Its place, for the message.

    Raises:
        ScuteError: SC112.
    """
    pending: list[object] = [config]
    while pending:
        value = pending.pop()
        if isinstance(value, list | tuple):
            pending.extend(value)
        if not isinstance(value, Mapping):
            continue
        pending.extend(value.values())
        for field, count in value.items():
            limit = next((limit for pattern, limit in LIMITS if pattern.fullmatch(str(field))), None)
            if limit is not None and isinstance(count, int | float) and count > limit:
                fail(Code.SC112, where=where, found=f"{field} = {str(count)[:40]}", expected=f"at most {limit}")


def _state(config_path: Path) -> Mapping[str, torch.Tensor]:
    try:
        import torch
        import transformers
    except ImportError as missing:
        fail(
            Code.SC701,
            where=str(config_path),
            found=f"a base without weights, and no package `{missing.name}`",
            expected="torch and transformers, to derive the base's structure from its configuration alone",
            next=f"`pip install 'scute-compile[compile]'`, or {_WEIGHTS_HELP}",
        )
    try:
        # Code that is part of a model's repository is never run.
        config = transformers.AutoConfig.from_pretrained(
            config_path.parent, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:
        raise _unbuildable(config_path, error) from error
    # A multimodal model is also registered as a language model, sometimes as its text part alone.
    whole_first = any(str(name).endswith("ForConditionalGeneration") for name in config.architectures or ())
    kinds = [transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText]
    reason: Exception | None = None
    for kind in [*(reversed(kinds) if whole_first else kinds), transformers.AutoModel]:
        try:
            with torch.device("meta"):
                return _saved_state(kind.from_config(config, trust_remote_code=False))
        except Exception as error:  # noqa: BLE001 - one of hundreds of model classes reads a user's configuration
            reason = error
    raise _unbuildable(config_path, reason)


def _unbuildable(config_path: Path, error: Exception | None) -> ScuteError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ScuteError(
        [
            Diagnostic(
                code=Code.SC405,
                where=str(config_path),
                found=f"no weights, and transformers can't build the model: {reason[:200]}",
                expected="an architecture that the installed transformers knows",
                next=f"{_WEIGHTS_HELP}; or upgrade transformers",
            )
        ]
    )


def _saved_state(model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    """Return a model's tensors as `save_pretrained` names them: tied ones once, renamed to the checkpoint's layout."""
    seen: set[int] = set()
    state: dict[str, torch.Tensor] = {}
    for key, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            state[key] = tensor.detach()
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # releases without conversions save tensors under the model's names
        return state
    reverted: dict[str, torch.Tensor] = revert_weight_conversion(model, state)
    return reverted

"""PEFT as the oracle: the adapter as the installed PEFT computes it in float32, loaded without a key to spare.

PEFT itself loads leniently: what it doesn't know it drops, what is missing keeps its initial value. Here both are
reasons not to compare. Where an adapter was re-rooted, its keys and the configuration's module names follow.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file

from scute_compile.diagnostics import Code, fail
from scute_compile.formats.manifest import Manifest
from scute_compile.formats.peft_folder import AdapterFolder

PREFIX = "base_model.model."
_SHARED = ("vera_A", "vera_B")
_OF_THE_BASE = (".weight", ".bias", ".base_layer.weight", ".base_layer.bias")
"""What follows a module's path in keys of the base's own tensors: they don't make the module an adapted one."""
_DROPPED_KEYS = (Code.SC313.name, Code.SC321.name)
"""Findings about keys that the artifact leaves out because they change nothing."""

Config = Any  # PEFT's configuration classes are not annotated


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """A checkpoint's tensors under the names of the loaded model."""

    tensors: Mapping[str, torch.Tensor]
    modules: Mapping[str, str]
    """Adapted module, as the adapter knows it and without PEFT's prefix -> the loaded model's path."""

    @property
    def moved(self) -> bool:
        """Whether any module has another path than the adapter's own."""
        return any(trained != path for trained, path in self.modules.items())


def locate(adapter: AdapterFolder, manifest: Manifest, to_model: Mapping[str, str]) -> Located:
    """Read the adapter's tensors and give every key the loaded model's module path.

    Args:
        adapter: The adapter's folder.
        manifest: Of the artifact: what was renamed, and which keys were left out.
        to_model: Module path in the base's files -> path in the loaded model, for all of its linear layers.
    """
    dropped = {str(one.get("where")) for one in manifest.findings if one.get("code") in _DROPPED_KEYS}
    tensors, modules = {}, {}
    for key, tensor in load_file(adapter.weights).items():
        if key in dropped:
            continue
        raw = next((raw for raw in _prefixes(key) if _base_path(raw, manifest) in to_model), None)
        last = key.rsplit(".", 1)[1] if "." in key else key
        if raw is not None:
            path = to_model[_base_path(raw, manifest)]
            if key[len(raw) :] not in _OF_THE_BASE:
                modules[raw.removeprefix(PREFIX)] = path
            tensors[f"{PREFIX}{path}{key[len(raw) :]}"] = tensor
        else:
            tensors[f"base_model.{last}" if last in _SHARED else key] = tensor
    return Located(tensors=tensors, modules=modules)


def _prefixes(key: str) -> Iterator[str]:
    """Yield the paths that lead to a key, longest first."""
    while "." in key:
        key = key.rsplit(".", 1)[0]
        yield key


def _base_path(raw: str, manifest: Manifest) -> str:
    return manifest.renamed.get(raw, raw.removeprefix(PREFIX))


def why_not_comparable(adapter: AdapterFolder, located: Located) -> str:
    """Return how the installed PEFT differs by intent from the one that wrote the adapter; empty when it doesn't."""
    config = adapter.config
    if config.get("peft_type") == "OFT":
        if any(".oft_r" in key or ".oft_s" in key for key in located.tensors):
            return "keys `oft_r`, written by PEFT 0.15 or older; the installed PEFT loads them as the identity"
        if config.get("peft_version") is None and config.get("use_cayley_neumann") is not False:
            return "no peft_version: PEFT 0.16 or 0.17 wrote it, whose series has another last coefficient"
    old = [f"{PREFIX}{path}.bias" for path in located.modules.values() if f"{PREFIX}{path}.bias" in located.tensors]
    if old and config.get("bias", "none") != "none":
        return f"the key `{old[0]}`, spelled as PEFT 0.6 and older did; the installed PEFT ignores it"
    return ""


def wrap(model: torch.nn.Module, adapter: AdapterFolder, located: Located, base_dtype: torch.dtype) -> torch.nn.Module:
    """Put the adapter on a float32 model in place, as PEFT does it.

    Args:
        model: The base, loaded in float32.
        adapter: The adapter's folder.
        located: What `locate` returned.
        base_dtype: The dtype that the base is stored in; projections that aren't saved pass through it.

    Raises:
        ScuteError: SC702 when PEFT refuses the adapter, or would not read it whole.
    """
    from peft import get_peft_model, set_peft_model_state_dict

    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        try:
            config = _config(adapter, located)
            wrapped: torch.nn.Module = get_peft_model(model, config)
            result = set_peft_model_state_dict(wrapped, _read_by_peft(located, config))
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            _refuse(adapter, f"the installed PEFT can't load it: {' '.join(str(error).split())[:300]}")
    prefix: str = wrapped.base_model.prefix  # type: ignore[union-attr,assignment] # PEFT's own attributes
    missing = [key for key in result.missing_keys if prefix in key]
    if missing:
        _refuse(adapter, f"{len(missing)} tensors that PEFT expects are missing, such as `{missing[0]}`")
    if result.unexpected_keys:
        unread = list(result.unexpected_keys)
        _refuse(adapter, f"{len(unread)} keys that PEFT leaves unread, such as `{unread[0]}`")
    if config.peft_type == "VERA" and not config.save_projection:
        _round_projections(wrapped, base_dtype)
    return wrapped.eval()


def _read_by_peft(located: Located, config: Config) -> dict[str, torch.Tensor]:
    """Return the tensors without projections that PEFT draws anew from the key although they were saved."""
    drawn = config.peft_type == "VERA" and not config.save_projection
    return {key: tensor for key, tensor in located.tensors.items() if not (drawn and key.endswith(_SHARED))}


def _refuse(adapter: AdapterFolder, found: str) -> None:
    fail(
        Code.SC702,
        where=adapter.name,
        found=found,
        expected="an adapter that the installed PEFT reads whole",
        next="verify with the PEFT version that wrote the adapter",
    )


def _round_projections(wrapped: torch.nn.Module, dtype: torch.dtype) -> None:
    """Round regenerated projections as PEFT does on a base that is stored in half precision."""
    for name in _SHARED:
        drawn = getattr(wrapped.base_model, name)["default"]
        drawn.copy_(drawn.to(dtype))


def _config(adapter: AdapterFolder, located: Located) -> Config:
    """Return the adapter's configuration, ready to be put on the loaded model."""
    from peft import PeftConfig

    config: Config = PeftConfig.from_pretrained(str(adapter.path))
    config.inference_mode = True
    config.task_type = None  # a task adds heads of its own; heads are refused when compiling
    if config.peft_type == "LORA":
        config.init_lora_weights = True  # the saved factors replace the initial ones; changed bases are refused
    if config.peft_type == "OFT" and not adapter.config.get("oft_block_size") and not adapter.config.get("r"):
        config.r, config.oft_block_size = 0, _oft_block_size(located)
    if located.moved:
        _move_names(config, located)
    return config


def _oft_block_size(located: Located) -> int:
    """Return the block size that the tensors have: n = size (size - 1) / 2 numbers per block."""
    numbers: int = next(tensor.shape[1] for key, tensor in located.tensors.items() if "oft_R" in key)
    return (1 + math.isqrt(1 + 8 * numbers)) // 2


def _move_names(config: Config, located: Located) -> None:
    """Let the configuration name the loaded model's modules: exactly those that have tensors."""
    from peft.utils.other import get_pattern_key

    config.target_modules = set(located.modules.values())
    config.exclude_modules = None
    if config.peft_type == "IA3":
        config.feedforward_modules = {
            path
            for path in located.modules.values()
            if located.tensors[f"{PREFIX}{path}.ia3_l"].shape[0] == 1  # (1, in) scales inputs, (out, 1) outputs
        }
    if config.peft_type == "ADALORA" and config.rank_pattern:
        config.rank_pattern = {_moved(name, located): mask for name, mask in config.rank_pattern.items()}
    for field in ("rank_pattern", "alpha_pattern"):
        pattern = getattr(config, field, None)
        if pattern and config.peft_type == "LORA":
            keys = {trained: get_pattern_key(pattern.keys(), trained) for trained in located.modules}
            moved = {located.modules[trained]: pattern[key] for trained, key in keys.items() if key in pattern}
            setattr(config, field, moved)


def _moved(name: str, located: Located) -> str:
    path, _, parameter = name.rpartition(".")
    trained = path.removeprefix(PREFIX)
    return f"{located.modules[trained]}.{parameter}" if trained in located.modules else name

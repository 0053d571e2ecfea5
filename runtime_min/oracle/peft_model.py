"""PEFT as the oracle: the adapter on a float32 base as the installed PEFT computes it, with every key consumed.

PEFT drops unknown keys and keeps the initial values of missing keys; in both cases the comparison is refused. For an
adapter that was re-rooted, the keys and the module names in its configuration are renamed to those of the loaded model.
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
"""Ends of keys that hold tensors of the base; a module with only such keys is not adapted."""
_DROPPED_KEYS = (Code.SC313.name, Code.SC321.name)
"""Findings about keys that have no effect, which the artifact leaves out."""

Config = Any  # PEFT's configuration classes have no annotations


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """A checkpoint's tensors under the names of the loaded model."""

    tensors: Mapping[str, torch.Tensor]
    modules: Mapping[str, str]
    """Path in the loaded model by the path of the adapted module in the adapter's keys, without PEFT's prefix."""

    @property
    def moved(self) -> bool:
        """Whether any module has another path in the loaded model."""
        return any(trained != path for trained, path in self.modules.items())


def locate(adapter: AdapterFolder, manifest: Manifest, to_model: Mapping[str, str]) -> Located:
    """Read the adapter's tensors and rename every key to the loaded model's module path.

    Args:
        adapter: The adapter's folder.
        manifest: The artifact's manifest, which lists renamed keys and keys that were left out.
        to_model: Path in the loaded model of every linear layer, by its path in the base's files.
    """
    dropped = {str(finding.get("where")) for finding in manifest.findings if finding.get("code") in _DROPPED_KEYS}
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
    """Yield the module paths that a key starts with, longest first."""
    while "." in key:
        key = key.rsplit(".", 1)[0]
        yield key


def _base_path(raw: str, manifest: Manifest) -> str:
    return manifest.renamed.get(raw, raw.removeprefix(PREFIX))


def why_not_comparable(adapter: AdapterFolder, located: Located) -> str:
    """Return why the installed PEFT and the PEFT that wrote the adapter differ on it; empty if they agree."""
    config = adapter.config
    if config.get("peft_type") == "OFT":
        if any(".oft_r" in key or ".oft_s" in key for key in located.tensors):
            return "keys `oft_r`, written by PEFT 0.15 or older; the installed PEFT loads them as the identity"
        if config.get("peft_version") is None and config.get("use_cayley_neumann") is not False:
            return "no peft_version: PEFT 0.16 or 0.17 wrote it, whose Neumann series has another last coefficient"
    biases = [f"{PREFIX}{path}.bias" for path in located.modules.values() if f"{PREFIX}{path}.bias" in located.tensors]
    if biases and config.get("bias", "none") != "none":
        return f"the key `{biases[0]}`, spelled as PEFT 0.6 and older did; the installed PEFT ignores it"
    return ""


def wrap(model: torch.nn.Module, adapter: AdapterFolder, located: Located, base_dtype: torch.dtype) -> torch.nn.Module:
    """Wrap a float32 model with the adapter in PEFT; changes the model in place.

    Args:
        model: The base, loaded in float32.
        adapter: The adapter's folder.
        located: What `locate` returned.
        base_dtype: The dtype that the base is stored in, to which PEFT rounds projections that it regenerates.

    Raises:
        ScuteError: SC702 when PEFT refuses the adapter, misses a key or leaves one unread.
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
    """Return the tensors without saved projections that PEFT regenerates from the seed instead."""
    regenerated = config.peft_type == "VERA" and not config.save_projection
    return {key: tensor for key, tensor in located.tensors.items() if not (regenerated and key.endswith(_SHARED))}


def _refuse(adapter: AdapterFolder, found: str) -> None:
    fail(
        Code.SC702,
        where=adapter.name,
        found=found,
        expected="an adapter whose every key the installed PEFT reads",
        next="verify with the PEFT version that wrote the adapter",
    )


def _round_projections(wrapped: torch.nn.Module, dtype: torch.dtype) -> None:
    """Round regenerated projections to the dtype of the base, as PEFT does on a base in half precision."""
    for name in _SHARED:
        projection = getattr(wrapped.base_model, name)["default"]
        projection.copy_(projection.to(dtype))


def _config(adapter: AdapterFolder, located: Located) -> Config:
    """Return the adapter's configuration for the loaded model."""
    from peft import PeftConfig

    config: Config = PeftConfig.from_pretrained(str(adapter.path))
    config.inference_mode = True
    config.task_type = None  # a task would add a head; adapters with heads are refused at compile time
    if config.peft_type == "LORA":
        config.init_lora_weights = True  # saved factors replace initial ones; methods that change the base are refused
    if config.peft_type == "OFT" and not adapter.config.get("oft_block_size") and not adapter.config.get("r"):
        config.r, config.oft_block_size = 0, _oft_block_size(located)
    if located.moved:
        _rename_modules(config, located)
    return config


def _oft_block_size(located: Located) -> int:
    """Return the block size from the tensors, which have n = size (size - 1) / 2 numbers per block."""
    numbers: int = next(tensor.shape[1] for key, tensor in located.tensors.items() if "oft_R" in key)
    return (1 + math.isqrt(1 + 8 * numbers)) // 2


def _rename_modules(config: Config, located: Located) -> None:
    """Rename the modules in the configuration to the loaded model's, exactly those that have tensors."""
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
        config.rank_pattern = {_renamed(name, located): mask for name, mask in config.rank_pattern.items()}
    for field in ("rank_pattern", "alpha_pattern"):
        pattern = getattr(config, field, None)
        if pattern and config.peft_type == "LORA":
            keys = {trained: get_pattern_key(pattern.keys(), trained) for trained in located.modules}
            renamed = {located.modules[trained]: pattern[key] for trained, key in keys.items() if key in pattern}
            setattr(config, field, renamed)


def _renamed(name: str, located: Located) -> str:
    path, _, parameter = name.rpartition(".")
    trained = path.removeprefix(PREFIX)
    return f"{located.modules[trained]}.{parameter}" if trained in located.modules else name

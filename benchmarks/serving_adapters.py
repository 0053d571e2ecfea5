"""PEFT folders and artifacts for a model's shape, without the model's weights: input of `vllm_steps.py`.

LoRA, IA3, VeRA and OFT are compiled from PEFT folders against a configuration alone. DoRA's norms need weights, so its
artifact is that of LoRA with a random `ds` at every site: as many bytes as a real one, and equal work for the kernels.
This module has no command.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Mapping
from functools import cache
from itertools import count as count_up
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save, save_file

import scute_compile as scute
from scute_compile.base.shapes import ModelShape
from scute_compile.formats.manifest import manifest_digest, rank_file_name
from scute_compile.ir.dtypes import DType
from scute_compile.ir.target import Target
from tests.support.drawn_adapters import sites_of
from tests.support.sparse_base import llama_config

SHARED_RANK, BLOCK = 256, 32
PREFIX = "base_model.model."
NOISE, STRIDE = 1 << 22, 1_000_003
"""Number of random values, at least as many as the largest tensor has; offset between the windows of two tensors."""
_windows = count_up()


def write_config(folder: Path, shape: ModelShape, *, heads: int, vocabulary: int = 32000) -> Path:
    """Write a Llama configuration without weights, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = llama_config(
        shape,
        head_dim=shape.projection("q_proj").inputs // heads,
        vocabulary=vocabulary,
        max_position_embeddings=4096,
        hidden_act="silu",
        torch_dtype="bfloat16",
        rope_theta=10000.0,
        bos_token_id=1,
        eos_token_id=2,
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_adapters(folder: Path, shape: ModelShape) -> Mapping[str, Path]:
    """Write a PEFT folder per method and one of LoRA of rank 64; return the folders by name."""
    made = {
        "lora": _lora(shape, 16),
        "lora-64": _lora(shape, 64),
        "ia3": _ia3(shape),
        "vera": _vera(shape),
        "oft": _oft(shape),
    }
    for name, (config, tensors) in made.items():
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        (target / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, target / "adapter_model.safetensors")
    return {name: folder / name for name in made}


def compile_all(adapters: Mapping[str, Path], base: Path, store: Path, *, tp: int = 1) -> Mapping[str, Path]:
    """Compile the folders in bf16, derive DoRA's artifact from LoRA's, and return the artifacts by name."""
    target = Target(tp=tp, dtype=DType.BFLOAT16)
    outcomes = scute.compile(adapters.values(), base=base, target=target, store=store).adapters
    artifacts = {}
    for name, outcome in zip(adapters, outcomes, strict=True):
        if not outcome.artifact:
            raise SystemExit(f"{name}: {[item.found for item in outcome.findings]}")
        artifacts[name] = Path(outcome.artifact)
    return {**artifacts, "dora": with_scale(artifacts["lora"], "dora")}


def with_scale(artifact: Path, name: str) -> Path:
    """Copy an artifact within its store as DoRA's, with a random `ds` at every site."""
    copy = artifact.with_name(name)
    if copy.exists():
        shutil.rmtree(copy)
    shutil.copytree(artifact, copy)
    manifest: dict[str, Any] = json.loads((copy / "manifest.json").read_text())
    for number, rank in enumerate(manifest["ranks"]):
        tensors = load_file(copy / rank["file"])
        for site in manifest["sites"]:
            width = sum(stop - start for start, stop in site["outputs"][number])
            tensors[f"{site['name']}.ds"] = (torch.randn(width) * 2e-3).to(torch.bfloat16)
        (copy / rank["file"]).unlink()
        raw = save(tensors)
        digest = hashlib.sha256(raw).hexdigest()
        rank |= {"file": rank_file_name(number, manifest["tp"], digest), "sha256": digest, "bytes": len(raw)}
        (copy / rank["file"]).write_bytes(raw)
    manifest |= {"name": name, "method": "dora", "sites": [{**site, "scale": True} for site in manifest["sites"]]}
    manifest["bytes"]["ranks"] = sum(rank["bytes"] for rank in manifest["ranks"])
    manifest["digest"] = manifest_digest({key: value for key, value in manifest.items() if key != "digest"})
    (copy / "manifest.json").write_text(json.dumps(manifest, sort_keys=True, indent=1))
    return copy


Folder = tuple[dict[str, Any], dict[str, torch.Tensor]]


def _config(method: str, targets: list[str], **fields: object) -> dict[str, Any]:
    return {
        "peft_type": method,
        "task_type": "CAUSAL_LM",
        "target_modules": targets,
        "base_model_name_or_path": "",
        "peft_version": "0.21.2",
        **fields,
    }


def _targets(shape: ModelShape) -> list[str]:
    return sorted({site.name.rsplit(".", 1)[1] for site in sites_of(shape)})


@cache
def _noise() -> torch.Tensor:
    """Return `NOISE` random values, twice; each tensor is a window of them, since drawing every tensor is slow."""
    return torch.randn(NOISE).to(torch.bfloat16).repeat(2)


def _drawn(*shape: int, scale: float) -> torch.Tensor:
    count = math.prod(shape)
    first = next(_windows) * STRIDE % NOISE
    return _noise()[first : first + count].view(shape) * scale


def _lora(shape: ModelShape, rank: int) -> Folder:
    tensors = {}
    for site in sites_of(shape):
        tensors[f"{PREFIX}{site.name}.lora_A.weight"] = _drawn(rank, site.in_features, scale=site.in_features**-0.5)
        tensors[f"{PREFIX}{site.name}.lora_B.weight"] = _drawn(site.out_features, rank, scale=0.01)
    return _config("LORA", _targets(shape), r=rank, lora_alpha=rank), tensors


def _ia3(shape: ModelShape) -> Folder:
    chosen = {"k_proj": True, "v_proj": True, "down_proj": False}
    tensors = {}
    for site in sites_of(shape):
        outputs = chosen.get(site.name.rsplit(".", 1)[1])
        if outputs is not None:
            size = (site.out_features, 1) if outputs else (1, site.in_features)
            tensors[f"{PREFIX}{site.name}.ia3_l"] = 1 + _drawn(*size, scale=0.05)
    return _config("IA3", list(chosen), feedforward_modules=["down_proj"]), tensors


def _vera(shape: ModelShape) -> Folder:
    sites = sites_of(shape)
    tensors = {
        "base_model.vera_A": _drawn(SHARED_RANK, max(site.in_features for site in sites), scale=0.01),
        "base_model.vera_B": _drawn(max(site.out_features for site in sites), SHARED_RANK, scale=0.06),
    }
    for site in sites:
        tensors[f"{PREFIX}{site.name}.vera_lambda_d"] = _drawn(SHARED_RANK, scale=0.1)
        tensors[f"{PREFIX}{site.name}.vera_lambda_b"] = _drawn(site.out_features, scale=0.1)
    return _config("VERA", _targets(shape), r=SHARED_RANK, save_projection=True, projection_prng_key=0), tensors


def _oft(shape: ModelShape) -> Folder:
    tensors = {
        f"{PREFIX}{site.name}.oft_R.weight": _drawn(site.in_features // BLOCK, BLOCK * (BLOCK - 1) // 2, scale=0.01)
        for site in sites_of(shape)
    }
    fields = {"oft_block_size": BLOCK, "r": 0, "use_cayley_neumann": True, "num_cayley_neumann_terms": 5}
    return _config("OFT", _targets(shape), **fields), tensors

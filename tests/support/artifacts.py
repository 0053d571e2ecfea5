"""Artifacts written by hand after docs/format.md, so that readers are tested without the compiler."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from scute_compile.formats.manifest import manifest_digest
from scute_compile.ir.dtypes import torch_dtype
from tests.support.artifact_files import save_rank

Tensors = Mapping[str, torch.Tensor]
Ranges = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """One site with its slots whole, before any cut."""

    name: str
    in_features: int
    out_features: int
    slots: Tensors
    """By slot: `dR`, `ds`, `b`, `A0`, `B0`, `d0`, `e0`, `A1`, ..."""
    split: str = "column"
    inputs: Sequence[Ranges] | None = None
    """Per rank; None: whole, or in equal parts on a row site."""
    outputs: Sequence[Ranges] | None = None
    shared: frozenset[str] = frozenset()
    """Factors that lie in the store's `factors`: `A0`, `B0`, ...; they may be wider than the site."""
    rows: Ranges | None = None
    """Fully sharded, on a column site: per rank, its interval of every term's rank."""
    columns: Ranges | None = None
    """Fully sharded, on a row site: per rank, its interval of the outputs."""

    def terms(self) -> int:
        """Return the number of low-rank terms."""
        return sum(slot.startswith("A") for slot in self.slots)


def even(features: int, tp: int) -> list[Ranges]:
    """Return the ranges of ranks that hold equal parts."""
    step = features // tp
    return [[[rank * step, (rank + 1) * step]] for rank in range(tp)]


def _cut(tensor: torch.Tensor, axis: int, ranges: Ranges) -> torch.Tensor:
    return torch.cat([tensor.narrow(axis, start, stop - start) for start, stop in ranges], axis).contiguous()


def write_factor(store: Path, factor: torch.Tensor, dtype: str) -> str:
    """Put a shared factor into the store and return its hash."""
    stored = factor.to(torch_dtype(dtype)).contiguous()
    rank, features = stored.shape
    raw = stored.view(torch.uint8).numpy().tobytes()
    digest = hashlib.sha256(f"{dtype}:{rank}x{features}:".encode() + raw).hexdigest()
    (store / "factors").mkdir(parents=True, exist_ok=True)
    save_file({"factor": stored}, store / "factors" / f"{digest}.safetensors")
    return digest


def write_artifact(
    store: Path,
    sites: Sequence[Written],
    *,
    name: str = "tenant",
    method: str = "lora",
    tp: int = 1,
    dtype: str = "float32",
    change: Callable[[dict[str, object]], None] | None = None,
) -> Path:
    """Write an artifact into a store and return its folder; `change` edits the manifest before its digest is taken."""
    folder = store / name
    folder.mkdir(parents=True)
    files: list[dict[str, torch.Tensor]] = [{} for _ in range(tp)]
    factors: dict[str, dict[str, object]] = {}
    records = [_site(store, site, tp=tp, dtype=dtype, files=files, factors=factors) for site in sites]
    full = any(site.rows or site.columns for site in sites)
    ranks = [save_rank(folder, rank, tp, tensors) for rank, tensors in enumerate(files)]
    manifest: dict[str, object] = {
        "format": "scute.artifact",
        "schema_version": "2.0",
        "lora_sharding": "full" if full else "default",
        "tool": "scute 0.1.0",
        "name": name,
        "method": method,
        "dtype": dtype,
        "tp": tp,
        "base": {"name": None, "model_type": "llama", "structure": "0" * 64, "content": None},
        "sources": {},
        "settings": {},
        "renamed": {},
        "workload": {"tenants": 16, "tokens": 16, "bandwidth": 3.6e12, "launch": 5e-07, "activation_bytes": 2},
        "sites": records,
        "factors": list(factors.values()),
        "ranks": ranks,
        "bytes": {"ranks": sum(int(str(rank["bytes"])) for rank in ranks), "shared": 0},
        "notes": [],
        "findings": [],
    }
    if change is not None:
        change(manifest)
    rewrite_manifest(folder, manifest)
    return folder


def rewrite_manifest(folder: Path, manifest: dict[str, object]) -> None:
    """Write a manifest with its right digest."""
    digest = manifest_digest(manifest)  # type: ignore[arg-type] # built from plain JSON values
    (folder / "manifest.json").write_text(json.dumps({**manifest, "digest": digest}))


def _site(
    store: Path,
    site: Written,
    *,
    tp: int,
    dtype: str,
    files: list[dict[str, torch.Tensor]],
    factors: dict[str, dict[str, object]],
) -> dict[str, object]:
    whole_in, whole_out = [[[0, site.in_features]]] * tp, [[[0, site.out_features]]] * tp
    inputs = site.inputs or (even(site.in_features, tp) if site.split == "row" else whole_in)
    outputs = site.outputs or (even(site.out_features, tp) if site.split == "column" else whole_out)
    windows: dict[str, dict[str, object]] = {}
    for slot in sorted(site.shared):
        digest = write_factor(store, site.slots[slot], dtype)
        rank, features = site.slots[slot].shape
        factors[digest] = {
            "hash": digest,
            "rank": rank,
            "features": features,
            "dtype": dtype,
            "bytes": rank * features * torch_dtype(dtype).itemsize,
        }
        windows[slot] = {"factor": digest, "features": site.in_features if slot[0] == "A" else site.out_features}
    for rank in range(tp):
        for slot, tensor in site.slots.items():
            if slot not in site.shared:
                key = f"{site.name}.{slot}" if slot in ("dR", "ds", "b") else f"{site.name}.terms.{slot[1:]}.{slot[0]}"
                stored = torch.float32 if slot == "b" else torch_dtype(dtype)
                files[rank][key] = _on_rank(site, slot, tensor, inputs[rank], outputs[rank], rank).to(stored)
    rotation = site.slots.get("dR")
    return {
        "name": site.name,
        "in_features": site.in_features,
        "out_features": site.out_features,
        "gemm": site.name,
        "split": site.split,
        "inputs": inputs,
        "outputs": outputs,
        "rotation": None if rotation is None else _rotation(rotation),
        "scale": "ds" in site.slots,
        "shift": "b" in site.slots,
        "shift_rank": 0 if site.split == "row" else -1,
        "terms": [
            {
                "rank": site.slots[f"A{number}"].shape[0],
                "a": windows.get(f"A{number}"),
                "b": windows.get(f"B{number}"),
                "d": f"d{number}" in site.slots,
                "e": f"e{number}" in site.slots,
                "rows": site.rows,
                "columns": site.columns,
            }
            for number in range(site.terms())
        ],
        "live": [{"slot": "s", "route": "in the expand", "candidates": [["in the expand", 10]]}],
    }


def _rotation(delta: torch.Tensor) -> dict[str, object]:
    if delta.ndim == 1:
        return {"kind": "diagonal", "block": 1, "blocks": delta.shape[0]}
    return {"kind": "blocks", "block": delta.shape[1], "blocks": delta.shape[0]}


def _on_rank(
    site: Written, slot: str, tensor: torch.Tensor, inputs: Ranges, outputs: Ranges, rank: int
) -> torch.Tensor:
    if site.rows and slot[0] in "Ad" and slot[1:].isdigit():
        return _cut(tensor, 0, [site.rows[rank]])
    if site.columns and slot[0] in "Be" and slot[1:].isdigit():
        return _cut(tensor, tensor.ndim - 1, [site.columns[rank]])
    if slot == "dR" and tensor.ndim == 3:
        size = tensor.shape[1]
        blocks = [[start // size, stop // size] for start, stop in inputs]
        return tensor if tensor.shape[0] == 1 else _cut(tensor, 0, blocks)
    if slot == "dR":
        return _cut(tensor, 0, inputs)
    if slot[0] in "AB":
        return _cut(tensor, 1, inputs if slot[0] == "A" else outputs)
    return tensor if slot[0] == "d" and slot != "ds" else _cut(tensor, 0, outputs)

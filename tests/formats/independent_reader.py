"""Reads artifacts and fingerprints of bases with numpy, as docs/format.md describes them.

Shares no code with the compiler and the runtimes, so that a test that uses it compares them with the page.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

WORDS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
SAMPLE = 4096
INDEX = "model.safetensors.index.json"
MAX_MANIFEST = 100_000_000
PARAMETERS = (
    "hidden_size",
    "n_embd",
    "num_hidden_layers",
    "n_layer",
    "num_attention_heads",
    "n_head",
    "num_heads",
    "num_key_value_heads",
    "intermediate_size",
    "n_inner",
    "vocab_size",
    "head_dim",
)
FIELDS = {
    "manifest": "format schema_version tool name method dtype tp lora_sharding base sources digest settings renamed "
    "workload sites factors ranks bytes notes findings",
    "base": "name model_type structure content",
    "workload": "tenants tokens bandwidth launch activation_bytes",
    "bytes": "ranks shared",
    "ranks": "file sha256 bytes",
    "factors": "hash rank features dtype bytes",
    "sites": "name in_features out_features gemm split inputs outputs rotation scale shift shift_rank terms live",
    "rotation": "kind block blocks",
    "terms": "rank a b d e rows columns",
    "window": "factor features",
    "live": "slot route candidates",
}


class RefusedError(Exception):
    """What the reader refuses, under the code that the page gives."""

    def __init__(self, code: str, found: str) -> None:
        super().__init__(f"{code}: {found}")
        self.code = code


def _refuse(code: str, found: str) -> NoReturn:
    raise RefusedError(code, found)


def _require(truth: bool, code: str, found: str) -> None:
    if not truth:
        _refuse(code, found)


def canonical(value: object) -> bytes:
    """Return a value's canonical JSON."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")


def sha256(data: bytes) -> str:
    """Return a sha256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file: its dtype's word, its shape and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def values(self) -> Array:
        """Return the values in float64."""
        if self.dtype == "BF16":
            wide = np.frombuffer(self.data, "<u2").astype("<u4") << np.uint32(16)
            flat = wide.view("<f4")
        else:
            flat = np.frombuffer(self.data, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[self.dtype])
        return flat.astype(np.float64).reshape(self.shape)


def read_tensors(data: bytes) -> dict[str, StoredTensor]:
    """Parse a safetensors file: eight bytes of header length, the header, the tensors' bytes."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    tensors, end = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = entry["data_offsets"]
        _require(first == end, "SC105", f"`{name}` begins at {first}, not at {end}")
        tensors[name] = StoredTensor(entry["dtype"], tuple(entry["shape"]), data[start + first : start + last])
        end = last
    _require(start + end == len(data), "SC105", f"{len(data)} bytes, not {start + end}")
    return tensors


def _samples(data: bytes) -> str:
    last = len(data) - SAMPLE
    if last <= 0:
        return sha256(data)
    offsets = dict.fromkeys((0, last // 2, last))
    return sha256(b"".join(data[offset : offset + SAMPLE] for offset in offsets))


@dataclass(frozen=True, slots=True)
class Base:
    """A base model's configuration and stored tensors."""

    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @property
    def structure(self) -> str:
        """The hash `base.structure`."""
        model_type = self.config.get("model_type", "")
        nested = (self.config.get(key) for key in ("text_config", "language_config", "llm_config"))
        text = next((value for value in nested if isinstance(value, dict)), self.config)
        fields = {key: text[key] for key in PARAMETERS if text.get(key) is not None}
        shapes = {name: list(tensor.shape) for name, tensor in self.tensors.items()}
        parameters = {**fields, "model_type": model_type}
        return sha256(canonical({"model_type": model_type, "parameters": parameters, "tensors": shapes}))

    @property
    def content(self) -> str:
        """The hash `base.content`."""
        entries = [
            [name, tensor.dtype, list(tensor.shape), _samples(tensor.data)]
            for name, tensor in sorted(self.tensors.items())
        ]
        return sha256(canonical(entries))


def _weight_files(names: set[str], index: Mapping[str, str]) -> Iterable[str]:
    if "model.safetensors" in names:
        return ("model.safetensors",)
    if index:
        return sorted(set(index.values()))
    return sorted(name for name in names if re.fullmatch(r"model-\d+-of-\d+\.safetensors", name))


def open_base(folder: Path) -> Base:
    """Read a base folder: the configuration and the tensors of its weight files."""
    names = {path.name for path in folder.iterdir()}
    index: dict[str, str] = {}
    if INDEX in names and "model.safetensors" not in names:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    tensors = {}
    for file in _weight_files(names, index):
        stored = read_tensors((folder / file).read_bytes())
        tensors.update({name: tensor for name, tensor in stored.items() if index.get(name, file) == file})
    return Base(json.loads((folder / "config.json").read_text(encoding="utf-8")), tensors)


@dataclass(frozen=True, slots=True)
class Artifact:
    """A checked artifact: the manifest, the tensors of each rank, the shared factors by hash."""

    manifest: Mapping[str, Any]
    ranks: tuple[Mapping[str, Array], ...]
    factors: Mapping[str, Array]

    def mapped(self, change: Callable[[Array], Array]) -> Artifact:
        """Return the artifact with every tensor changed."""
        ranks = tuple({name: change(value) for name, value in rank.items()} for rank in self.ranks)
        return replace(self, ranks=ranks, factors={name: change(value) for name, value in self.factors.items()})

    def without(self, *names: str, ranks: range | None = None) -> Artifact:
        """Return the artifact with tensors missing from some ranks, or from all of them."""
        left = ranks if ranks is not None else range(len(self.ranks))
        kept = tuple(
            {name: value for name, value in tensors.items() if rank not in left or name not in names}
            for rank, tensors in enumerate(self.ranks)
        )
        return replace(self, ranks=kept)

    @property
    def sites(self) -> Mapping[str, Mapping[str, Any]]:
        """The sites by name."""
        return {site["name"]: site for site in self.manifest["sites"]}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    _require(len(value) == len(pairs), "SC601", "duplicate keys")
    return value


def _no_constant(text: str) -> NoReturn:
    _refuse("SC601", text)


def _number(text: str) -> float:
    value = float(text)
    _require(math.isfinite(value), "SC601", text)
    return value


def _fields(value: Mapping[str, Any], kind: str) -> None:
    found, expected = set(value), set(FIELDS[kind].split())
    _require(found == expected, "SC601", f"fields {sorted(found ^ expected)} of {kind}")


def _regular(path: Path, code: str) -> bytes:
    _require(path.exists() or path.is_symlink(), code, f"{path} is missing")
    _require(stat.S_ISREG(path.lstat().st_mode), "SC604", f"{path} isn't a regular file")
    return path.read_bytes()


def _parse_manifest(data: bytes) -> dict[str, Any]:
    _require(len(data) <= MAX_MANIFEST, "SC601", f"{len(data)} bytes")
    manifest: dict[str, Any] = json.loads(
        data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_number
    )
    json.dumps(manifest, ensure_ascii=False).encode("utf-8")  # fails on lone surrogates
    _require(manifest.get("format") == "scute.artifact", "SC601", f"format {manifest.get('format')}")
    _require(manifest["schema_version"] == "2.0", "SC602", f"version {manifest['schema_version']}")
    _check_fields(manifest)
    found = sha256(canonical({key: value for key, value in manifest.items() if key != "digest"}))
    _require(found == manifest["digest"], "SC603", f"digest {found}")
    _require(len(manifest["ranks"]) == manifest["tp"], "SC601", f"{len(manifest['ranks'])} ranks")
    _check_sites(manifest)
    return manifest


def _check_fields(manifest: Mapping[str, Any]) -> None:
    _fields(manifest, "manifest")
    for kind in ("base", "workload", "bytes"):
        _fields(manifest[kind], kind)
    for kind in ("ranks", "factors", "sites"):
        for entry in manifest[kind]:
            _fields(entry, kind)
    for site in manifest["sites"]:
        if site["rotation"] is not None:
            _fields(site["rotation"], "rotation")
        for entry in site["live"]:
            _fields(entry, "live")
        for term in site["terms"]:
            _fields(term, "terms")
            for window in filter(None, (term["a"], term["b"])):
                _fields(window, "window")


def indices(ranges: list[list[int]]) -> Indices:
    """Return the entries of ranges in their order."""
    return np.concatenate([np.arange(start, stop) for start, stop in ranges])


def _check_axis(site: Mapping[str, Any], key: str, *, cut: bool, once: bool) -> None:
    features = site["in_features" if key == "inputs" else "out_features"]
    counts = np.zeros(features, dtype=int)
    for ranges in site[key]:
        fits = all(0 <= start < stop <= features for start, stop in ranges)
        _require(bool(ranges) and fits, "SC601", f"{key} {ranges} of {site['name']}")
        held = np.bincount(indices(ranges), minlength=features)
        _require(int(held.max()) == 1, "SC601", f"{key} {ranges} of {site['name']} overlap")
        _require(cut or ranges == [[0, features]], "SC601", f"{key} {ranges} of {site['name']} are cut")
        counts += held
    _require(int(counts.min()) >= 1, "SC601", f"{key} of {site['name']} don't cover the layer")
    _require(not once or int(counts.max()) == 1, "SC601", f"{key} of {site['name']} are held twice")


def _check_rotation(site: Mapping[str, Any]) -> None:
    rotation, features = site["rotation"], site["in_features"]
    block, blocks = rotation["block"], rotation["blocks"]
    if rotation["kind"] == "diagonal":
        _require((block, blocks) == (1, features), "SC601", f"rotation {rotation}")
        return
    whole = features % block == 0 and blocks in {1, features // block}
    _require(rotation["kind"] == "blocks" and whole, "SC601", f"rotation {rotation}")
    edges = [edge for ranges in site["inputs"] for interval in ranges for edge in interval]
    _require(all(edge % block == 0 for edge in edges), "SC601", f"blocks of {block} are cut at {edges}")


def _check_intervals(intervals: list[list[int]] | None, length: int, *, expected: bool) -> None:
    _require((intervals is not None) == expected, "SC601", f"intervals {intervals}")
    if intervals is None:
        return
    edges = [0] + [stop for _, stop in intervals]
    chained = [start for start, _ in intervals] == edges[:-1] and edges == sorted(edges) and edges[-1] == length
    _require(chained, "SC601", f"intervals {intervals} of {length}")


def _check_sites(manifest: Mapping[str, Any]) -> None:
    tp, factors = manifest["tp"], {factor["hash"]: factor for factor in manifest["factors"]}
    names = [site["name"] for site in manifest["sites"]]
    _require(len(set(names)) == len(names), "SC601", "a site's name is repeated")
    _require(len(factors) == len(manifest["factors"]), "SC601", "a factor is repeated")
    full = manifest["lora_sharding"] == "full" and tp > 1
    for site in manifest["sites"]:
        split = site["split"]
        known = split in {"column", "row", "replicated"} or (split == "unknown" and tp == 1)
        _require(known, "SC601", f"split {split}")
        _require(len(site["inputs"]) == len(site["outputs"]) == tp, "SC601", f"ranks of {site['name']}")
        _check_axis(site, "inputs", cut=split == "row", once=split == "row")
        _check_axis(site, "outputs", cut=split == "column", once=False)
        if site["rotation"] is not None:
            _check_rotation(site)
        shift_ranks = range(tp) if split == "row" else range(-1, 0)
        _require(site["shift_rank"] in shift_ranks, "SC601", f"shift_rank {site['shift_rank']}")
        for term in site["terms"]:
            _check_intervals(term["rows"], term["rank"], expected=full and split == "column")
            _check_intervals(term["columns"], site["out_features"], expected=full and split == "row")
            for key, width in (("a", site["in_features"]), ("b", site["out_features"])):
                window = term[key]
                if window is not None:
                    factor = factors.get(window["factor"], {"rank": -1, "features": -1})
                    fits = factor["rank"] == term["rank"] and factor["features"] >= window["features"] == width
                    _require(fits, "SC601", f"window {window} of {site['name']}")


def _described(site: Mapping[str, Any], rank: int, word: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the tensors of a site in a rank's file: dtype and shape by name."""
    name, rotation = site["name"], site["rotation"]
    width_in, width_out = (len(indices(site[key][rank])) for key in ("inputs", "outputs"))
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    if rotation is not None and rotation["kind"] == "diagonal":
        tensors[f"{name}.dR"] = word, (width_in,)
    elif rotation is not None:
        size = rotation["block"]
        tensors[f"{name}.dR"] = word, (1 if rotation["blocks"] == 1 else width_in // size, size, size)
    if site["scale"]:
        tensors[f"{name}.ds"] = word, (width_out,)
    if site["shift"]:
        tensors[f"{name}.b"] = "F32", (width_out,)
    for number, term in enumerate(site["terms"]):
        prefix = f"{name}.terms.{number}"
        rows, columns = term_part(term, rank, width_out)
        shapes = {"A": (rows, width_in), "B": (term["rank"], columns), "d": (rows,), "e": (columns,)}
        present = {"A": term["a"] is None, "B": term["b"] is None, "d": term["d"], "e": term["e"]}
        tensors.update({f"{prefix}.{key}": (word, shape) for key, shape in shapes.items() if present[key]})
    return tensors


def term_part(term: Mapping[str, Any], rank: int, width_out: int) -> tuple[int, int]:
    """Return how many rows of A and columns of B a rank holds."""
    rows = term["rank"] if term["rows"] is None else term["rows"][rank][1] - term["rows"][rank][0]
    columns = width_out if term["columns"] is None else term["columns"][rank][1] - term["columns"][rank][0]
    return rows, columns


def _finite(name: str, values: Array) -> Array:
    _require(bool(np.isfinite(values).all()), "SC309", f"{name} isn't finite")
    return values


def _read_rank(folder: Path, manifest: Mapping[str, Any], rank: int) -> dict[str, Array]:
    entry = manifest["ranks"][rank]
    expected = f"rank-{rank:05d}-of-{manifest['tp']:05d}.{entry['sha256'][:16]}.safetensors"
    _require(entry["file"] == expected, "SC604", f"{entry['file']} isn't {expected}")
    data = _regular(folder / expected, "SC603")
    _require((len(data), sha256(data)) == (entry["bytes"], entry["sha256"]), "SC603", f"{expected} differs")
    stored = read_tensors(data)
    described: dict[str, tuple[str, tuple[int, ...]]] = {}
    for site in manifest["sites"]:
        described.update(_described(site, rank, WORDS[manifest["dtype"]]))
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in stored.items()}
    _require(found == described, "SC605", f"tensors {sorted(found.items() ^ described.items())}")
    return {name: _finite(name, tensor.values()) for name, tensor in stored.items()}


def _read_factor(store: Path, entry: Mapping[str, Any]) -> Array:
    folder = store / "factors"
    _require(not folder.is_symlink(), "SC604", f"{folder} is a symbolic link")
    stored = read_tensors(_regular(folder / f"{entry['hash']}.safetensors", "SC606"))
    _require(set(stored) == {"factor"}, "SC606", f"tensors {sorted(stored)}")
    tensor = stored["factor"]
    described = (WORDS[entry["dtype"]], (entry["rank"], entry["features"]))
    _require((tensor.dtype, tensor.shape) == described, "SC606", f"factor {entry['hash']}")
    head = f"{entry['dtype']}:{entry['rank']}x{entry['features']}:".encode("ascii")
    _require(sha256(head + tensor.data) == entry["hash"], "SC606", f"hash of factor {entry['hash']}")
    return _finite(entry["hash"], tensor.values())


def open_artifact(folder: Path) -> Artifact:
    """Read an artifact of all ranks, with the checks that the page requires.

    Raises:
        RefusedError: A check fails.
    """
    data = _regular(folder / "manifest.json", "SC601")
    try:
        manifest = _parse_manifest(data)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        _refuse("SC601", repr(error))
    ranks = tuple(_read_rank(folder, manifest, rank) for rank in range(manifest["tp"]))
    factors = {entry["hash"]: _read_factor(folder.parent, entry) for entry in manifest["factors"]}
    return Artifact(manifest, ranks, factors)

"""Base checkpoints: a `config.json` with safetensors weights in one file, in shards, or without weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import cast

import numpy as np
import numpy.typing as npt

from scute_compile.diagnostics import Code, Findings, ScuteError, fail
from scute_compile.formats.hub import find_repository, looks_like_id
from scute_compile.formats.reading import CONFIG_LIMIT, Identity, identity_of, names_in, read_object, refuse_changed
from scute_compile.formats.safetensors import Floats, TensorEntry, read_header, read_rows, read_tensor
from scute_compile.formats.samples import Samples

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")
_PICKLE = re.compile(r"(pytorch_model|consolidated)[\w.-]*\.(bin|pt|pth)")

Headers = Mapping[str, Mapping[str, TensorEntry]]
"""File name -> the entries of its header."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of the base and the file that holds it."""

    file: Path | None
    """None when only the header was downloaded."""
    entry: TensorEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseCheckpoint:
    """A base model's configuration and headers; tensors are read on demand."""

    source: str
    path: Path | None
    """The folder, or that of a downloaded repository."""
    config: Mapping[str, object]
    tensors: Mapping[str, StoredTensor]
    """By key, sorted; empty when the folder holds only the configuration."""
    has_weights: bool
    """Whether tensor values can be read; otherwise names and shapes only."""
    identities: Mapping[Path, Identity] = field(default_factory=dict)
    """The files of a folder, before their headers were read."""
    samples: Mapping[str, str] = field(default_factory=dict)
    """Hashes of the tensors' samples, which tensors that are read later must have; empty: nothing is compared."""

    @property
    def quantized(self) -> str | None:
        """The base's quantization method, or None."""
        section = self.config.get("quantization_config")
        if section is None:
            return None
        method = section.get("quant_method") if isinstance(section, Mapping) else None
        return method if isinstance(method, str) and method else "an unnamed method"

    def read_tensor(self, key: str) -> Floats:
        """Return a whole tensor as float32 (float64 for F64), in its stored shape.

        Raises:
            ScuteError: SC403 without weights; SC104 (truncated), SC109 (unreadable), SC110 (dtype), SC111 (changed).
        """

        def check(raw: npt.NDArray[np.uint8]) -> None:
            samples = Samples(stored.entry)
            samples.add(raw)
            self.check_samples(key, samples)

        stored = self.tensors[key]
        return read_tensor(self._file(key), stored.entry, check)

    def check_samples(self, key: str, samples: Samples) -> None:
        """Compare the samples of a tensor that was read with those of the fingerprint, where it was taken.

        Raises:
            ScuteError: SC111.
        """
        expected = self.samples.get(key)
        if expected is not None and samples.hexdigest() != expected:
            refuse_changed(f"{self.source}: {key}", "other bytes", "those that the base's fingerprint was taken from")

    def read_rows(self, key: str, start: int, stop: int) -> Floats:
        """Return rows `start` to `stop` of a tensor as float32 (float64 for F64).

        Raises:
            ScuteError: as for `read_tensor`.
        """
        stored = self.tensors[key]
        return read_rows(self._file(key), stored.entry, start, stop)

    def _file(self, key: str) -> Path:
        file = self.tensors[key].file
        if file is None:
            fail(
                Code.SC403,
                where=f"{self.source}: {key}",
                found="only the header was downloaded",
                expected="the weights",
                next="download the base and pass its folder",
            )
        return file


def open_base(source: str, *, weights: bool) -> BaseCheckpoint:
    """Open a base folder or, when no such path exists, a Hub repository.

    Args:
        source: A folder, `owner/name`, or an older Hub id without an owner.
        weights: Whether to download a repository's weights, or only its configuration, index and headers. Of a
            folder, only these are read in either case.

    Raises:
        ScuteError: SC401 (not found), SC407 (pickles only), SC103 to SC105 (damaged shards), SC107 (a missing shard),
            SC108 (unreadable JSON), SC109 (unreadable file), SC306 and SC310 (shards contradict each other or their
            index).
    """
    path = Path(source)
    try:
        if path.is_dir():
            return _open_folder(source, path)
        found = "a file" if path.exists() else "no folder of that name, and not the name of a repository"
        absent = not path.exists()
    except OSError:
        found, absent = "a path that can't be examined", False
    if not (absent and looks_like_id(source)):
        fail(
            Code.SC401,
            where=source,
            found=found,
            expected=f"a folder with a {CONFIG}, or a repository as owner/name",
            next="check the path",
        )
    return _open_repository(source, weights=weights)


def _open_folder(source: str, path: Path) -> BaseCheckpoint:
    names = names_in(path)
    index = _read_index(path / INDEX) if _indexed(names) else None
    chosen = _weight_files(source, names, index)
    config = MappingProxyType(read_object(path / CONFIG, limit=CONFIG_LIMIT))
    findings, headers = Findings(), dict[str, Mapping[str, TensorEntry]]()
    identities = {path / name: identity_of(path / name) for name in chosen}
    for name in chosen:
        try:
            headers[name] = read_header(path / name)
        except ScuteError as error:
            findings.diagnostics.extend(error.diagnostics)
    findings.raise_if_errors()
    tensors = _merge(source, headers, index or {}, path)
    return BaseCheckpoint(
        source=source,
        path=path,
        config=config,
        tensors=tensors,
        has_weights=bool(headers),
        identities=identities,
    )


def _open_repository(source: str, *, weights: bool) -> BaseCheckpoint:
    repository = find_repository(source, Code.SC401, (CONFIG, INDEX, "model*.safetensors"))
    small = [name for name in (CONFIG, INDEX) if name in repository.files]
    names = repository.files
    path = repository.download(small) if CONFIG in names else Path()
    index = _read_index(path / INDEX) if _indexed(names) else None
    chosen = _weight_files(source, names, index)
    if weights or repository.cached is not None:
        return _open_folder(source, repository.download([*small, *chosen]))
    config = MappingProxyType(read_object(path / CONFIG, limit=CONFIG_LIMIT))
    tensors = _merge(source, repository.read_headers(chosen), index or {}, None)
    return BaseCheckpoint(source=source, path=path, config=config, tensors=tensors, has_weights=False)


def _indexed(names: tuple[str, ...]) -> bool:
    # transformers prefers the single file when both exist.
    return INDEX in names and SINGLE not in names


def _read_index(path: Path) -> Mapping[str, str]:
    """Return the index's mapping from tensor to file name."""
    weight_map = read_object(path).get("weight_map")
    if isinstance(weight_map, dict) and weight_map:
        wrong = [
            f for f in weight_map.values() if not isinstance(f, str) or f in {"", "..", "."} or set(f) & set("/\\\0")
        ]
        found = f"the file name {wrong[0]!r:.80} in weight_map" if wrong else ""
    else:
        found = "no weight_map" if weight_map is None else "a weight_map that names no tensors"
    if found:
        fail(
            Code.SC108,
            where=str(path),
            found=found,
            expected="a weight_map from tensor names to names of files in the same folder",
            next="download the base again",
        )
    return cast("dict[str, str]", weight_map)


def _weight_files(source: str, names: tuple[str, ...], index: Mapping[str, str] | None) -> tuple[str, ...]:
    """Return the names of the weight files; none when the folder holds only the configuration."""
    if CONFIG not in names:
        held = ", ".join(names[:8]) or "nothing"
        fail(
            Code.SC401,
            where=source,
            found=f"no {CONFIG} (there is {held}{' and more' if len(names) > 8 else ''})",
            expected=f"{CONFIG}, with or without safetensors weights",
            next="pass the folder of the base model, not of an adapter",
        )
    if SINGLE in names:
        return (SINGLE,)
    shards = tuple(sorted(set(index.values()))) if index is not None else _unindexed_shards(names)
    missing = [name for name in shards if name not in names]
    if missing:
        fail(
            Code.SC107,
            where=source,
            found=f"{len(shards) - len(missing)} of {len(shards)} shards; missing: {', '.join(missing[:8])}",
            expected="every shard" + (f" that {INDEX} names" if index is not None else " that the file names count"),
            next="download the base again",
        )
    pickles = [name for name in names if _PICKLE.fullmatch(name)]
    if not shards and pickles:
        fail(
            Code.SC407,
            where=source,
            found=f"{', '.join(pickles[:4])}, which can run code while loading; not opened",
            expected="safetensors weights",
        )
    return shards


def _unindexed_shards(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of a complete set of numbered shards, derived from those present."""
    for name in names:
        if match := _SHARD.fullmatch(name):
            number, total = match.groups()
            count = min(int(total), 99_999)
            return tuple(f"model-{i:0{len(number)}d}-of-{total}.safetensors" for i in range(1, count + 1))
    return ()


def _merge(source: str, headers: Headers, index: Mapping[str, str], folder: Path | None) -> Mapping[str, StoredTensor]:
    """Merge the shards' headers. The index, if there is one, decides which file holds a tensor."""
    findings = Findings()
    for file, header in headers.items():
        missing = [key for key, named in index.items() if named == file and key not in header]
        if missing:
            findings.error(
                Code.SC310,
                where=f"{source}/{file}",
                found=f"{len(missing)} tensors that the index assigns to it are missing, such as {missing[0]}",
                expected=f"the tensors that {INDEX} lists",
                next="download the base again",
            )
    tensors: dict[str, StoredTensor] = {}
    for file, header in headers.items():
        for key, entry in header.items():
            if index.get(key, file) != file:
                continue
            if key in tensors:
                findings.error(
                    Code.SC306,
                    where=f"{source}: {key}",
                    found="the tensor in two shards",
                    expected="the tensor in one shard, or an index that selects one",
                    next="download the base again",
                )
            tensors[key] = StoredTensor(file=None if folder is None else folder / file, entry=entry)
    findings.raise_if_errors()
    return MappingProxyType(dict(sorted(tensors.items())))

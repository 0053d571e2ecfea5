"""Opens artifacts, with every check that needs no tensor values.

The checks, in order: version, schema, digest, file names, sizes and hashes, headers, shared factors. None needs torch;
`scute_compile.formats.artifact_tensors` loads the tensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, cast

from pydantic import JsonValue, ValidationError

from scute_compile.diagnostics import Code, Findings, ScuteError, fail
from scute_compile.formats.layout import file_layout
from scute_compile.formats.manifest import (
    FORMAT,
    MAJOR,
    MINOR,
    SCHEMA_VERSION,
    FactorFile,
    Manifest,
    RankFile,
    SiteRecord,
    manifest_digest,
    rank_file_name,
)
from scute_compile.formats.reading import JSON_LIMIT, exists, opened, parse_object, read_object, sha256_of
from scute_compile.formats.safetensors import TensorEntry, read_header

MANIFEST = "manifest.json"
FACTORS = "factors"
FACTOR_TENSOR = "factor"

Identity = tuple[int, int] | None
"""Inode and change time (ns) of a manifest; None without a manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A compiled adapter on disk whose manifest and files were checked."""

    path: Path
    """The artifact's folder, absolute."""
    manifest: Manifest
    identity: Identity
    """The manifest file's identity when the artifact was opened."""

    def replaced(self) -> bool:
        """Return whether the manifest was replaced since the artifact was opened."""
        return _identity(self.path) != self.identity

    @property
    def store(self) -> Path:
        """The folder that holds the artifact and its shared factors."""
        return self.path.parent

    @property
    def sites(self) -> Mapping[str, SiteRecord]:
        """The adapted layers by their module path in the base."""
        return {site.name: site for site in self.manifest.sites}

    def rank_path(self, rank: int) -> Path:
        """Return the file of a rank."""
        return self.path / self.manifest.ranks[rank].file

    def factor_path(self, digest: str) -> Path:
        """Return the file of a shared factor."""
        return factor_path(self.store, digest)


def factor_path(store: Path, digest: str) -> Path:
    """Return the path of a shared factor in a store."""
    return store / FACTORS / f"{digest}.safetensors"


def is_artifact(path: Path | str) -> bool:
    """Return whether a folder holds a `manifest.json`, which `open_artifact` checks."""
    try:
        return (Path(path) / MANIFEST).is_file()
    except (OSError, ValueError):  # a name too long, or with a zero byte
        return False


def open_artifact(path: Path | str, *, verify_hashes: bool = True) -> Artifact:
    """Open an artifact and check it against its manifest.

    If a writer replaces the artifact while it is being opened, it is opened again.

    Args:
        path: The artifact's folder, inside its store.
        verify_hashes: Whether to hash the files. Names, sizes, shapes and the manifest's digest are checked in any
            case, and loading a tensor hashes the file that it is read from.

    Raises:
        ScuteError: SC601 (no manifest, or not this schema), SC602 (version), SC603 (digest, sizes, hashes), SC604
            (names that leave the folder, links), SC605 (tensors), SC606 (shared factors). Faults of several files are
            reported together.
    """
    while True:
        folder = Path(path).resolve() if is_artifact(path) else Path(path)
        before = _identity(folder)
        try:
            artifact = _open(path, folder, before, verify_hashes=verify_hashes)
        except ScuteError:
            if _identity(folder) == before:
                raise
        else:
            if not artifact.replaced():
                return artifact


def _open(path: Path | str, folder: Path, identity: Identity, *, verify_hashes: bool) -> Artifact:
    if not is_artifact(folder):
        fail(
            Code.SC601,
            where=str(path),
            found=f"no {MANIFEST}" if exists(folder) else "no folder of that name",
            expected="the folder of an artifact, as `scute compile` writes it",
            next="pass the artifact's folder and not its store, or compile the adapter first",
        )
    manifest = _read_manifest(folder / MANIFEST)
    artifact = Artifact(path=folder, manifest=manifest, identity=identity)
    findings = Findings()
    for rank, record in enumerate(manifest.ranks):
        _check_rank(artifact, rank, record, findings, verify_hashes=verify_hashes)
    for factor in manifest.factors:
        check_factor(artifact.store, factor, manifest.name, findings, verify_hashes=verify_hashes)
    findings.raise_if_errors()
    return artifact


def _identity(folder: Path) -> Identity:
    """Return the manifest's inode and change time. Systems reuse inodes, so the inode alone doesn't suffice."""
    try:
        manifest = (folder / MANIFEST).stat()
    except (OSError, ValueError):
        return None
    return manifest.st_ino, manifest.st_ctime_ns


def _read_manifest(path: Path) -> Manifest:
    if path.is_symlink():
        fail(
            Code.SC604,
            where=str(path),
            found="a symbolic link",
            expected="a regular file",
            next="copy the artifact without links",
        )
    try:
        fields = read_object(path)
    except ScuteError as error:
        _refuse_manifest(path, error.diagnostics[0].found)
    return _check_manifest(path, fields)


def parse_manifest(raw: bytes, path: Path) -> Manifest:
    """Return the manifest that `raw` holds, checked as `open_artifact` checks the file at `path`.

    Raises:
        ScuteError: SC601, SC602 or SC603.
    """
    if len(raw) > JSON_LIMIT:
        _refuse_manifest(path, f"a manifest of {len(raw)} bytes, more than {JSON_LIMIT}")
    try:
        fields = parse_object(raw)
    except ValueError as error:
        _refuse_manifest(path, str(error))
    return _check_manifest(path, fields)


def _check_manifest(path: Path, fields: Mapping[str, object]) -> Manifest:
    if fields.get("format") != FORMAT:
        _refuse_manifest(path, f"the format {fields.get('format')!r:.40}")
    version = _check_version(path, fields)
    try:
        manifest = Manifest.model_validate_json(json.dumps(fields))
    except ValidationError as error:
        if version > (MAJOR, MINOR):
            newer = ".".join(map(str, version))
            _refuse_version(path, f"version {newer}, a newer minor version whose fields this reader doesn't know")
        _refuse_manifest(path, _first_fault(error))
    digest = manifest_digest(cast("Mapping[str, JsonValue]", fields))
    if digest != manifest.digest:
        fail(
            Code.SC603,
            where=str(path),
            found=f"a manifest of digest {digest}",
            expected=f"{manifest.digest}, the value of its field `digest`",
            next="the manifest was changed after it was written: compile the adapter again",
        )
    return manifest


def _check_version(path: Path, fields: Mapping[str, object]) -> tuple[int, int]:
    """Return (major, minor); refuse any other major version."""
    text = fields.get("schema_version")
    numbers = text.split(".") if isinstance(text, str) else []
    if len(numbers) != 2 or not all(number.isascii() and number.isdigit() and len(number) < 7 for number in numbers):
        _refuse_manifest(path, f"the schema_version {text!r:.40}")
    version = int(numbers[0]), int(numbers[1])
    if version[0] != MAJOR:
        _refuse_version(path, f"version {text}")
    return version


def _refuse_version(path: Path, found: str) -> NoReturn:
    fail(
        Code.SC602,
        where=str(path),
        found=found,
        expected=f"version {SCHEMA_VERSION}, or a newer minor version without new fields",
    )


def _refuse_manifest(path: Path, found: str) -> NoReturn:
    fail(
        Code.SC601,
        where=str(path),
        found=found,
        expected=f"a manifest of schema {SCHEMA_VERSION}",
        next="compile the adapter again; docs/format.md describes the schema",
    )


def _first_fault(error: ValidationError) -> str:
    fault = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(str(part) for part in fault["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    text = fault["msg"].removeprefix("Value error, ")
    return f"{place + ': ' if place else ''}{text[:1].lower()}{text[1:]}{more}"


def _check_rank(artifact: Artifact, rank: int, record: RankFile, findings: Findings, *, verify_hashes: bool) -> None:
    where = f"{artifact.manifest.name}: {record.file}"
    name = rank_file_name(rank, artifact.manifest.tp, record.sha256)
    if record.file != name:
        findings.error(
            Code.SC604,
            where=where,
            found=f"the file name {record.file!r:.80}",
            expected=name,
            next="compile the adapter again; don't load artifacts of unknown origin",
        )
        return
    if not _check_file(artifact.path / record.file, record.bytes, Code.SC603, where, findings):
        return
    if verify_hashes and (found := sha256_of(artifact.path / record.file)) != record.sha256:
        findings.error(
            Code.SC603,
            where=where,
            found=f"sha256 {found}",
            expected=f"sha256 {record.sha256}",
        )
        return
    layout = file_layout(artifact.manifest.sites, rank, artifact.manifest.dtype)
    expected = {name: (dtype.code, shape) for name, (dtype, shape) in layout.items()}
    _check_header(artifact.path / record.file, expected, Code.SC605, where, findings)


def check_factor(store: Path, factor: FactorFile, name: str, findings: Findings, *, verify_hashes: bool = True) -> None:
    """Check that a store holds a shared factor, and report its faults: SC604, SC606, or SC103 to SC109 for its header.

    Args:
        store: The store's folder.
        factor: The factor's record in a manifest.
        name: The artifact that needs it, for messages.
        findings: Receives the faults.
        verify_hashes: Whether to hash the factor's bytes.
    """
    path = factor_path(store, factor.hash)
    where = f"{name}: {FACTORS}/{path.name}"
    if path.parent.is_symlink():
        findings.error(
            Code.SC604,
            where=where,
            found=f"`{FACTORS}` is a symbolic link",
            expected="a folder of the store",
        )
        return
    if not _check_file(path, None, Code.SC606, where, findings):
        return
    expected = {FACTOR_TENSOR: (factor.dtype.code, (factor.rank, factor.features))}
    entries = _check_header(path, expected, Code.SC606, where, findings)
    if entries is None or not verify_hashes:
        return
    if (found := factor_hash(path, entries[FACTOR_TENSOR], factor)) != factor.hash:
        findings.error(
            Code.SC606,
            where=where,
            found=f"a factor of hash {found}",
            expected=f"the hash {factor.hash}, which is the file's name",
            next="the file was changed or damaged: copy the store again, or compile the adapter again",
        )


def _check_file(path: Path, size: int | None, code: Code, where: str, findings: Findings) -> bool:
    """Return whether `path` is a regular file of this size."""
    if path.is_symlink():
        findings.error(
            Code.SC604,
            where=where,
            found="a symbolic link",
            expected="a regular file",
        )
    elif not path.is_file():
        findings.error(
            code,
            where=where,
            found="no such file",
            expected=f"the file {path.name}",
            next="copy the whole store: the artifact's folder and `factors` beside it",
        )
    elif size is not None and path.stat().st_size != size:
        findings.error(
            code,
            where=where,
            found=f"{path.stat().st_size} bytes",
            expected=f"{size} bytes",
            next="the copy is incomplete, or the file was changed: copy the artifact again",
        )
    else:
        return True
    return False


def _check_header(
    path: Path, expected: Mapping[str, tuple[str, tuple[int, ...]]], code: Code, where: str, findings: Findings
) -> Mapping[str, TensorEntry] | None:
    """Return the file's entries when they are exactly the expected ones, else None."""
    try:
        entries = read_header(path)
    except ScuteError as error:
        findings.diagnostics.extend(error.diagnostics)
        return None
    faults = [f"no `{name}`" for name in expected if name not in entries]
    faults += [f"an unknown `{name}`" for name in entries if name not in expected]
    faults += [
        f"`{name}` as {entry.dtype} {list(entry.shape)}, not {expected[name][0]} {list(expected[name][1])}"
        for name, entry in entries.items()
        if name in expected and (entry.dtype, entry.shape) != expected[name]
    ]
    if not faults:
        return entries
    findings.error(
        code,
        where=where,
        found="; ".join(faults[:3]) + (f"; and {len(faults) - 3} more" if len(faults) > 3 else ""),
        expected=f"the {len(expected)} tensors that the manifest describes",
        next="compile the adapter again",
    )
    return None


def factor_hash(path: Path, entry: TensorEntry, factor: FactorFile) -> str:
    """Return the hash that names a shared factor, over its dtype, shape and bytes."""
    digest = hashlib.sha256(factor_hash_prefix(factor.dtype.value, factor.rank, factor.features))
    with opened(path) as file:
        file.seek(entry.begin)
        left = entry.end - entry.begin
        while left and (block := file.read(min(left, 1 << 20))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def factor_hash_prefix(dtype: str, rank: int, features: int) -> bytes:
    """Return the bytes that are hashed before a shared factor's bytes.

    >>> factor_hash_prefix("bfloat16", 256, 4096)
    b'bfloat16:256x4096:'
    """
    return f"{dtype}:{rank}x{features}:".encode()

"""Writes artifacts into a store; a reader finds either the older artifact or the newer one, never a mixture.

Every file is written under a temporary name, synced and renamed. Rank files are named by their content and are written
first; the rename of the manifest commits the artifact. A writer holds the store's lock, so any temporary file that it
finds was left by a writer that was killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import JsonValue

from scute_compile.diagnostics import Code, Findings, ScuteError, fail
from scute_compile.formats.artifact import FACTORS, MANIFEST, check_factor, factor_path
from scute_compile.formats.lock import locked
from scute_compile.formats.manifest import (
    FactorFile,
    RankFile,
    claims_format,
    is_rank_file_name,
    manifest_digest,
    rank_file_name,
)
from scute_compile.formats.reading import JSON_LIMIT, file_size, names_in, opened, sha256_of

_PREFIX, _SUFFIX = ".scute-", ".tmp"
"""Prefix and suffix of temporary names. No artifact's name starts with a dot."""

LONGEST_NAME = 255
"""Bytes of a file name that file systems take."""


class ArtifactWriter:
    """Writes the files of one artifact. `artifact_writer` creates it."""

    def __init__(self, store: Path, folder: Path) -> None:
        self._store, self._folder = store, folder
        self._named: set[str] = set()
        self._new: list[Path] = []

    def add_factor(self, factor: FactorFile, raw: bytes) -> None:
        """Put a shared factor into the store, unless the store has an undamaged copy.

        Args:
            factor: Its record in the manifest.
            raw: The whole safetensors file.

        Raises:
            ScuteError: SC604 when `factors` is a symbolic link.
        """
        folder = self._store / FACTORS
        if folder.is_symlink():
            fail(
                Code.SC604,
                where=str(folder),
                found="a symbolic link",
                expected="a folder of the store",
                next="replace the link with a copy of the folder that it names, or choose another -o",
            )
        folder.mkdir(exist_ok=True)
        _remove(folder, _is_temporary)
        faults = Findings()
        check_factor(self._store, factor, self._folder.name, faults)
        if faults.errors:
            _put(factor_path(self._store, factor.hash), raw)
            _sync(folder)

    def add_rank(self, rank: int, tp: int, raw: bytes) -> RankFile:
        """Put the file of a rank into the artifact's folder, unless the folder has an undamaged copy.

        Args:
            rank: The rank.
            tp: Number of ranks.
            raw: The whole safetensors file.

        Returns:
            Its record in the manifest.
        """
        digest = hashlib.sha256(raw).hexdigest()
        path = self._folder / rank_file_name(rank, tp, digest)
        self._named.add(path.name)
        if not os.path.lexists(path):
            self._new.append(path)
        if not _holds(path, len(raw), digest):
            _put(path, raw)
        return RankFile(file=path.name, sha256=digest, bytes=len(raw))

    def commit(self, fields: Mapping[str, JsonValue]) -> None:
        """Write the manifest, then remove what older artifacts and killed writers left in the folder.

        Args:
            fields: The manifest without its digest, which is added. `format` should be the first field, so that a
                truncated file still has it.
        """
        text = json.dumps({**fields, "digest": manifest_digest(fields)}, indent=1) + "\n"
        _sync(self._folder)
        _put(self._folder / MANIFEST, text.encode())
        self._new.clear()
        _sync(self._folder)
        _sync(self._store)
        _remove(self._folder, lambda name: _is_written_here(name) and name not in self._named)

    def abandon(self) -> None:
        """Remove the rank files that were added without a commit."""
        for path in self._new:
            with suppress(OSError):
                path.unlink()


@contextmanager
def artifact_writer(store: Path, name: str) -> Iterator[ArtifactWriter]:
    """Hold a store's lock and yield the writer of one artifact, which must be committed.

    An older artifact of that name is replaced. Files that no artifact writer wrote are kept.

    Args:
        store: The store's folder, created if it is missing.
        name: The artifact's name, a plain file name.

    Raises:
        ScuteError: SC607 (a reserved name), SC601 (the name is taken by something other than an artifact), SC109 (a
            file can't be written).
    """
    _check_name(name)
    made: tuple[Path, ...] = ()
    try:
        made = _make_folders(store)
        with locked(store):
            folder = store / name
            _check_replaceable(folder)
            made = (*(() if folder.exists() else (folder,)), *made)
            folder.mkdir(exist_ok=True)
            writer = ArtifactWriter(store, folder)
            try:
                yield writer
            finally:
                writer.abandon()
    except OSError as error:
        fail(
            Code.SC109,
            where=str(store),
            found=str(error.strerror or error),
            expected="a folder that can be written",
            next="check the path given with -o, its permissions and the free space",
        )
    finally:
        for new in made:  # folders that are not empty stay
            with suppress(OSError):
                new.rmdir()


def _check_name(name: str) -> None:
    if not name or name != Path(name).name or name.startswith(".") or name == FACTORS or "\\" in name or "\0" in name:
        fail(
            Code.SC607,
            where=name,
            found=f"the artifact's name {name!r:.80}",
            expected=f"a plain file name that doesn't start with a dot and isn't `{FACTORS}`",
            next="choose a name with --name",
        )
    if (length := len(os.fsencode(name))) > LONGEST_NAME:
        fail(
            Code.SC607,
            where=name,
            found=f"an artifact's name of {length} bytes",
            expected=f"at most {LONGEST_NAME} bytes",
            next="choose a name with --name",
        )


def _make_folders(store: Path) -> tuple[Path, ...]:
    """Create a store with the folders above it and return those that were missing, the innermost first."""
    missing = tuple(folder for folder in (store, *store.parents) if not folder.exists())
    store.mkdir(parents=True, exist_ok=True)
    return missing


def _check_replaceable(folder: Path) -> None:
    """Refuse a folder that holds something other than an artifact. The files of a killed writer are accepted."""
    if not os.path.lexists(folder):
        return
    if folder.is_symlink():
        found = "a symbolic link"
    elif not folder.is_dir():
        found = "a file"
    elif os.path.lexists(folder / MANIFEST):
        if _is_manifest(folder / MANIFEST):
            return
        found = f"a folder whose {MANIFEST} belongs to another program"
    else:
        others = [name for name in names_in(folder) if not _is_written_here(name)]
        if not others:
            return
        found = f"a folder that is not an artifact; it holds {', '.join(others[:4])}{' and more' if others[4:] else ''}"
    fail(
        Code.SC601,
        where=str(folder),
        found=found,
        expected="an artifact to replace, or nothing of that name",
        next="choose another --name or -o; nothing was overwritten",
    )


def _is_manifest(path: Path) -> bool:
    """Return whether a file is the manifest of an artifact, possibly a damaged one."""
    if path.is_symlink() or not path.is_file():
        return False
    with opened(path) as file:
        return file_size(file) <= JSON_LIMIT and claims_format(file.readall())


def _is_temporary(name: str) -> bool:
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)


def _is_written_here(name: str) -> bool:
    """Return whether a file in an artifact's folder is, by its name, a rank file or a temporary file."""
    return is_rank_file_name(name) or _is_temporary(name)


def _holds(path: Path, size: int, digest: str) -> bool:
    try:
        return not path.is_symlink() and path.stat().st_size == size and sha256_of(path) == digest
    except (OSError, ScuteError):
        return False


def _put(path: Path, raw: bytes) -> None:
    """Write a file whole under a temporary name, sync it and rename it to `path`."""
    handle, name = tempfile.mkstemp(prefix=_PREFIX, suffix=_SUFFIX, dir=path.parent)
    try:
        with open(handle, "wb") as file:  # noqa: PTH123 - a descriptor, not a path
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        temporary = Path(name)
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _remove(folder: Path, unwanted: Callable[[str], bool]) -> None:
    for name in names_in(folder):
        if unwanted(name):
            with suppress(OSError):
                (folder / name).unlink()


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

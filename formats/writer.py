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
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import JsonValue

from scute_compile.diagnostics import Code, Findings, ScuteError, fail
from scute_compile.formats.artifact import FACTORS, MANIFEST, check_factor, factor_path, parse_manifest
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
MAX_RACES = 8
"""Attempts to make a store that other writers remove at the same time."""


class ArtifactWriter:
    """Writes the files of one artifact. `artifact_writer` creates it."""

    def __init__(self, store: Path, folder: Path) -> None:
        self._store, self._folder = store, folder
        self._named: set[str] = set()
        self._new: list[Path] = []
        """Files that were missing before."""
        self._made: list[Path] = []
        """Folders that were missing before, the outermost first."""
        self._manifest: bytes | None = None
        self._make(folder)

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
        self._make(folder)
        _remove(folder, _is_temporary)
        faults = Findings()
        check_factor(self._store, factor, self._folder.name, faults)
        if faults.errors:
            self._put(factor_path(self._store, factor.hash), raw)
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
        if not _holds(path, len(raw), digest):
            self._put(path, raw)
        return RankFile(file=path.name, sha256=digest, bytes=len(raw))

    def commit(self, fields: Mapping[str, JsonValue]) -> None:
        """Write the manifest, then remove what older artifacts and killed writers left in the folder.

        Args:
            fields: The manifest without its digest, which is added. `format` should be the first field, so that a
                truncated file still has it.

        Raises:
            ScuteError: SC601 to SC603 when readers would refuse the manifest; nothing is replaced then.
        """
        raw = (json.dumps({**fields, "digest": manifest_digest(fields)}, indent=1) + "\n").encode()
        parse_manifest(raw, self._folder / MANIFEST)
        _sync(self._folder)
        self._manifest = raw
        _put(self._folder / MANIFEST, raw)
        _sync(self._folder)
        _sync(self._store)
        _remove(self._folder, lambda name: _is_written_here(name) and name not in self._named)

    def close(self) -> None:
        """Remove the files and folders that were added, unless they were committed.

        The manifest on disk decides: an interrupt may arrive between its rename and the next statement.
        """
        raw = self._manifest
        if raw is not None and _holds(self._folder / MANIFEST, len(raw), hashlib.sha256(raw).hexdigest()):
            return
        for path in self._new:
            with suppress(OSError):
                path.unlink()
        _remove_empty(reversed(self._made))

    def _make(self, folder: Path) -> None:
        if not folder.exists():
            self._made.append(folder)
        folder.mkdir(exist_ok=True)

    def _put(self, path: Path, raw: bytes) -> None:
        if not os.path.lexists(path):
            self._new.append(path)
        _put(path, raw)


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
    try:
        with _locked_store(store):
            _check_replaceable(store / name)
            writer = ArtifactWriter(store, store / name)
            try:
                yield writer
            finally:
                writer.close()
    except OSError as error:
        fail(
            Code.SC109,
            where=str(store),
            found=str(error.strerror or error),
            expected="a folder that can be written",
            next="check the path given with -o, its permissions and the free space",
        )


@contextmanager
def _locked_store(store: Path) -> Iterator[None]:
    """Make a store where it is missing and hold its lock. A store that was made and stays empty is removed again."""
    held, races = False, 0
    while not held:  # until it is the lock of the folder at that path: other writers may remove a store that they made
        made = tuple(folder for folder in (store, *store.parents) if not folder.exists())
        try:
            store.mkdir(parents=True, exist_ok=True)
            with locked(store) as held:
                if held:
                    try:
                        yield
                    finally:
                        _remove_empty(made)
        except OSError as error:
            _remove_empty(made)
            races += 1
            removed_meanwhile = isinstance(error, FileExistsError | FileNotFoundError)
            if held or not removed_meanwhile or races == MAX_RACES:
                raise


def _check_name(name: str) -> None:
    plain = name == Path(name).name and not name.startswith(".") and not any(c in "\\\0" for c in name)
    if not (name and plain and _is_unicode(name) and name.lower() != FACTORS):  # systems may fold case
        fail(
            Code.SC607,
            where=name,
            found=f"the artifact's name {name!r:.80}",
            expected=f"a plain file name in UTF-8 that doesn't start with a dot and isn't `{FACTORS}`",
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


def _is_unicode(name: str) -> bool:
    """Return whether a name can be encoded; the names of files that aren't UTF-8 hold lone surrogates."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_replaceable(folder: Path) -> None:
    """Refuse a folder that holds something other than an artifact. The files of a killed writer are accepted."""
    if not os.path.lexists(folder):
        return
    if folder.is_symlink():
        found = "a symbolic link"
    elif not folder.is_dir():
        found = "a file"
    elif not _is_spelled_so(folder):
        found = "a folder whose name differs in case"
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


def _is_spelled_so(folder: Path) -> bool:
    """Return whether a folder has exactly this name; systems that fold case find it by others too."""
    return unicodedata.normalize("NFC", folder.name) in {
        unicodedata.normalize("NFC", name) for name in names_in(folder.parent)
    }


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


def _remove_empty(folders: Iterable[Path]) -> None:
    """Remove those of the folders that are empty, which should be ordered from the innermost."""
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()


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

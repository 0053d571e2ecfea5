"""Writing artifacts into a store: all of an artifact appears at once under its name, or nothing does.

Files are written into a hidden folder beside the artifact, synced, and the folder is renamed as the last step.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import JsonValue

from scute_compile.codes import Code
from scute_compile.diagnostics import fail
from scute_compile.formats.artifact import MANIFEST, factor_path
from scute_compile.formats.manifest import manifest_digest
from scute_compile.formats.safetensors_writer import Raw, SafetensorsWriter

FACTOR_TENSOR = "factor"


@contextmanager
def new_artifact(store: Path, name: str) -> Iterator[Path]:
    """Give a hidden folder to write in; it takes the artifact's name when the block ends without an error."""
    made = _make_folders(store)
    try:
        hidden = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".partial", dir=store))
        hidden.chmod(0o755)
        try:
            yield hidden
            _sync(hidden)
            _put_in_place(hidden, store / name)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
        _sync(store)
    except OSError as error:
        fail(
            Code.SC109, where=str(store), found=str(error.strerror or error), expected="a folder that can be written",
            next="check the path given with -o, its permissions and the free space",
        )  # fmt: skip
    finally:
        for folder in made:  # only those that this call made, and only while nothing is in them
            _remove_if_empty(folder)


def _make_folders(store: Path) -> tuple[Path, ...]:
    missing = [folder for folder in (store, *store.parents) if not folder.exists()]
    try:
        store.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(
            Code.SC109, where=str(store), found=str(error.strerror or error), expected="a folder that can be made",
            next="check the path given with -o",
        )  # fmt: skip
    return tuple(missing)


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return


def _put_in_place(hidden: Path, target: Path) -> None:
    """Rename `hidden` to `target`, moving an older artifact away first; another writer may do the same meanwhile."""
    moved = []
    try:
        while not _renamed(hidden, target):
            moved.append(Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".replaced", dir=target.parent)))
            _move_away(target, moved[-1] / target.name)
    finally:  # only now, so that a reader misses the artifact for no longer than between two renames
        for old in moved:
            shutil.rmtree(old, ignore_errors=True)


def _renamed(hidden: Path, target: Path) -> bool:
    """Rename `hidden` unless something has the name already."""
    try:
        if not target.exists():
            hidden.rename(target)
            return True
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another writer was faster
            raise
    return False


def _move_away(target: Path, to: Path) -> None:
    """Move an artifact out of the way; nothing but an artifact is ever moved."""
    if target.exists() and not (target / MANIFEST).is_file() and target.exists():
        fail(
            Code.SC601, where=str(target), found="a folder that is no artifact", expected="an artifact to replace",
            next="choose another --name or -o; nothing was overwritten",
        )  # fmt: skip
    with suppress(FileNotFoundError):  # another writer was faster
        target.rename(to)


def write_manifest(folder: Path, fields: Mapping[str, JsonValue]) -> None:
    """Write `manifest.json` with its digest, synced."""
    with_digest = {**fields, "digest": manifest_digest(fields)}
    text = json.dumps(with_digest, sort_keys=True, indent=1) + "\n"
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_factor(store: Path, digest: str, dtype: str, shape: tuple[int, int], raw: Raw) -> int:
    """Put a shared factor into the store unless it is there. Returns the file's size."""
    path = factor_path(store, digest)
    if not path.is_file():
        path.parent.mkdir(exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{digest}.", suffix=".partial", dir=path.parent)
        os.close(handle)
        hidden = Path(name)
        try:
            with SafetensorsWriter(hidden, {FACTOR_TENSOR: (dtype, shape)}, {"format": "scute"}) as writer:
                writer.write(FACTOR_TENSOR, raw)
            hidden.chmod(0o644)
            hidden.rename(path)
        finally:
            hidden.unlink(missing_ok=True)
        _sync(path.parent)
    return path.stat().st_size


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

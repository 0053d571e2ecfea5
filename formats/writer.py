"""Writing artifacts into a store: all of an artifact appears at once under its name, or nothing does.

Files are written into a hidden folder beside the artifact, synced, and the folder is renamed as the last step. Where
the system can, an older artifact of that name is exchanged in the same step, so that readers find one or the other.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from pydantic import JsonValue

from scute_compile.diagnostics import Code, fail
from scute_compile.formats.artifact import MANIFEST, factor_path
from scute_compile.formats.lock import exchange, locked
from scute_compile.formats.manifest import manifest_digest
from scute_compile.formats.safetensors_writer import Raw, SafetensorsWriter

FACTOR_TENSOR = "factor"
PARTIAL = ".partial"


@contextmanager
def new_artifact(store: Path, name: str) -> Iterator[Path]:
    """Give a hidden folder to write in; it takes the artifact's name when the block ends without an error.

    Several processes may write into one store, also under one name: the last one to end stays.
    """
    made = _make_folders(store)
    try:
        with ExitStack() as stack:
            hidden = _hidden_folder(store, name, stack)
            yield hidden
            _sync(hidden)
            with locked(store):
                _put_in_place(hidden, store / name)
            _sync(store)
    except OSError as error:
        fail(
            Code.SC109,
            where=str(store),
            found=str(error.strerror or error),
            expected="a folder that can be written",
            next="check the path given with -o, its permissions and the free space",
        )
    finally:
        for folder in made:  # only those that this call made, and only while nothing is in them
            _remove_if_empty(folder)


def _make_folders(store: Path) -> tuple[Path, ...]:
    missing = [folder for folder in (store, *store.parents) if not folder.exists()]
    try:
        store.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(
            Code.SC109,
            where=str(store),
            found=str(error.strerror or error),
            expected="a folder that can be made",
            next="check the path given with -o",
        )
    return tuple(missing)


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return


def _hidden_folder(store: Path, name: str, stack: ExitStack) -> Path:
    """Make a folder that is locked while it is written, and remove those whose writers were killed."""
    with locked(store):
        for left in store.glob(f".*{PARTIAL}"):
            _remove_unlocked(left)
        hidden = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=PARTIAL, dir=store))
        stack.callback(shutil.rmtree, hidden, ignore_errors=True)
        stack.enter_context(locked(hidden))
    hidden.chmod(0o755)
    return hidden


def _remove_unlocked(folder: Path) -> None:
    with suppress(OSError), locked(folder, wait=False):  # its writer holds the lock as long as it lives
        shutil.rmtree(folder, ignore_errors=True)


def _put_in_place(hidden: Path, target: Path) -> None:
    """Rename `hidden` to `target`; an older artifact goes where `hidden` was, and with it.

    The caller holds the store's lock. Nothing but an artifact is ever replaced.
    """
    if not os.path.lexists(target):
        hidden.rename(target)
        return
    if target.is_symlink() or not (target / MANIFEST).is_file():
        fail(
            Code.SC601,
            where=str(target),
            found="a folder that is no artifact",
            expected="an artifact to replace",
            next="choose another --name or -o; nothing was overwritten",
        )
    if not exchange(hidden, target):
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=PARTIAL, dir=target.parent))
        target.rename(old / target.name)
        hidden.rename(target)
        shutil.rmtree(old, ignore_errors=True)


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

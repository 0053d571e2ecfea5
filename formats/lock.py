"""The lock on a folder, which only one writer of a store holds at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ModuleNotFoundError:  # Windows: writers of one store must not run at the same time
    fcntl = None  # type: ignore[assignment] # the absence of the module is tested below


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Wait for a folder's lock, hold it until the block ends, and yield whether the folder is still at its path.

    The operating system releases the lock of a killed process. On a file system without locks, nothing is locked.

    Raises:
        OSError: the folder can't be opened.
    """
    try:
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        yield False
        return
    try:
        if fcntl is not None:
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield _is_at(folder, handle)
    finally:
        os.close(handle)


def _is_at(folder: Path, handle: int) -> bool:
    try:
        return os.path.samestat(folder.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False

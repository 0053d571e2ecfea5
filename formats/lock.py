"""Locks on folders, and the exchange of two folders in one step."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ModuleNotFoundError:  # a system without such locks: writers of one name must not run at the same time there
    fcntl = None  # type: ignore[assignment]  # the only sign of it

AT_FDCWD = -100
RENAME_EXCHANGE = 2
"""Both from linux/fcntl.h and linux/fs.h."""


@contextmanager
def locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a folder's lock, which ends with the process that holds it; file systems without locks go unlocked.

    Raises:
        BlockingIOError: Another process holds it, and `wait` is false.
        OSError: The folder can't be opened.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        if fcntl is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise
            except OSError:
                if not wait:  # nothing is known about the other's life: leave it alone
                    raise
        yield
    finally:
        os.close(handle)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two folders of one file system in one step (renameat2 of Linux); return whether that was possible."""
    with suppress(OSError, AttributeError):
        rename = ctypes.CDLL(None, use_errno=True).renameat2
        failed = rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE)
        return int(failed) == 0
    return False

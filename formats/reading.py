"""Opens, hashes and lists files, and reads JSON strictly; failures are reported as diagnostics."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from scute_compile.diagnostics import Code, fail

if TYPE_CHECKING:
    from hashlib import _Hash

JSON_LIMIT = 100_000_000
"""Largest JSON file that is read, in bytes; safetensors sets the same limit for its header."""
CONFIG_LIMIT = 16_000_000
"""Largest configuration that is read, in bytes: three times one with patterns for 45,000 layers."""


@contextmanager
def opened(path: Path) -> Iterator[FileIO]:
    """Open a regular file for unbuffered reading.

    Raises:
        ScuteError: SC109 when the file can't be opened, when reading it inside the block fails, or when it is a pipe
            or a device, which might never end.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            _refuse(path, "not a regular file")
        with FileIO(path, "rb") as file:
            yield file
    except OSError as error:
        _refuse(path, error.strerror or str(error))


Identity: TypeAlias = tuple[int, ...]
"""A file's device, inode, size, and times of modification and change in nanoseconds."""


def identity_of(path: Path) -> Identity:
    """Return what changes when a file is replaced or written to.

    Raises:
        ScuteError: SC109 when the file can't be examined.
    """
    try:
        status = path.stat()
    except OSError as error:
        _refuse(path, error.strerror or str(error))
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def check_unchanged(identities: Mapping[Path, Identity]) -> None:
    """Compare files with their identities of an earlier time.

    Raises:
        ScuteError: SC111 for the first that differs, SC109 for one that is gone.
    """
    for path, identity in identities.items():
        if identity_of(path) != identity:
            refuse_changed(str(path), "a file that was written to or replaced", "the file as it was when it was opened")


def refuse_changed(where: str, found: str, expected: str) -> NoReturn:
    """Refuse a file that has other bytes than at an earlier reading (SC111)."""
    fail(Code.SC111, where=where, found=found, expected=expected)


def file_size(file: FileIO) -> int:
    """Return the size in bytes of an open file."""
    return os.fstat(file.fileno()).st_size


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal.

    Raises:
        ScuteError: SC109 when the file can't be read.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(1 << 20))
    with opened(path) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def exists(path: Path) -> bool:
    """Return whether there is a file or a folder at `path`; False when the system refuses to say."""
    try:
        return path.exists()
    except (OSError, ValueError):  # no permission for a folder above it; a name too long, or with a zero byte
        return False


def names_in(folder: Path) -> tuple[str, ...]:
    """Return the names in a folder, sorted.

    Raises:
        ScuteError: SC109 when the folder can't be listed.
    """
    try:
        return tuple(sorted(entry.name for entry in folder.iterdir()))
    except OSError as error:
        _refuse(folder, error.strerror or str(error))


def parse_object(raw: bytes) -> dict[str, object]:
    """Return the JSON object that `raw` holds.

    Stricter than `json.loads`: refuses duplicate keys, NaN, infinity, numbers that overflow to it, lone surrogates
    and text other than UTF-8.

    Raises:
        ValueError: the text is not such an object; the message is the fault in a few words.

    >>> parse_object(b'{"r": 8, "r": 16}')
    Traceback (most recent call last):
    ValueError: the key 'r' appears twice
    """
    try:
        value = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
        # The decoder accepts escaped lone surrogates, which can't be encoded again.
        if b"\\u" in raw:
            _no_surrogates(value)
    except UnicodeDecodeError as error:
        msg = f"not UTF-8 at byte {error.start}"
        raise ValueError(msg) from None
    except RecursionError:
        msg = "nested too deeply"
        raise ValueError(msg) from None
    if not isinstance(value, dict):
        msg = f"a JSON {_json_name(value)}, not an object"
        raise ValueError(msg)  # noqa: TRY004 - every fault of the text is a ValueError
    return value


def read_object(path: Path, digest: _Hash | None = None, limit: int = JSON_LIMIT) -> dict[str, object]:
    """Return the JSON object in a file; a byte order mark is allowed.

    Args:
        path: The file.
        digest: Updated with the bytes that were read.
        limit: The most bytes that the file may have.

    Raises:
        ScuteError: SC108 when the text isn't a JSON object, SC109 when the file can't be read, SC112 when it is larger.
    """
    with opened(path) as file:
        size = file_size(file)
        raw = file.readall() if size <= limit else b""
    if size > limit:
        fail(Code.SC112, where=str(path), found=f"a file of {size} bytes", expected=f"at most {limit} bytes of JSON")
    if digest is not None:
        digest.update(raw)
    try:
        return parse_object(raw.removeprefix(b"\xef\xbb\xbf"))
    except ValueError as error:
        _no_json(path, str(error) if raw else "an empty file", "one JSON object, in UTF-8")


def _no_json(path: Path, found: str, expected: str) -> NoReturn:
    fail(
        Code.SC108,
        where=str(path),
        found=found,
        expected=expected,
        next="restore the file from its source, or correct it by hand",
    )


def _refuse(path: Path, reason: str) -> NoReturn:
    fail(
        Code.SC109,
        where=str(path),
        found=reason[:1].lower() + reason[1:],
        expected="a file or folder that can be read",
        next="check the path, its permissions and the disk",
    )


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value] # None is false
        msg = f"the key {twice!r} appears twice"
        raise ValueError(msg)
    return result


def _no_constant(text: str) -> NoReturn:
    msg = f"{text} is not a JSON number"
    raise ValueError(msg)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        msg = f"the number {text[:20]} is out of range"
        raise ValueError(msg)
    return value


def _no_surrogates(value: object) -> None:
    if isinstance(value, str):
        if any("\ud800" <= c <= "\udfff" for c in value):
            msg = f"the text {value[:60]!r} is not valid Unicode"
            raise ValueError(msg)
    elif isinstance(value, dict):
        for key, item in value.items():
            _no_surrogates(key)
            _no_surrogates(item)
    elif isinstance(value, list):
        for item in value:
            _no_surrogates(item)


def _json_name(value: object) -> str:
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return names[type(value)]

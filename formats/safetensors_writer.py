"""A streaming writer of safetensors files: the layout is planned first, then tensors arrive in any order.

The header goes out last. Until then the file begins with a header length of zero, which every reader refuses, so that
a killed run leaves nothing that could be taken for a result.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import NoReturn, Self

import numpy as np
import numpy.typing as npt

from scute_compile.diagnostics import Code, fail
from scute_compile.formats.reading import opened
from scute_compile.formats.safetensors import BITS, TensorEntry
from scute_compile.ir.expressions import Shape

Raw = bytes | bytearray | memoryview | npt.NDArray[np.generic]
"""Anything with contiguous bytes; arrays are written as they lie in memory, little-endian."""


class SafetensorsWriter:
    """Writes one safetensors file with equal bytes for equal input.

    Use it as a context manager: leaving it checks that every byte was written once, writes the header and syncs;
    leaving it by an exception removes the file.

    Args:
        path: The file to make; an existing one is replaced.
        layout: Name -> (safetensors dtype, shape). Wider dtypes lie first, then names in order, so that every tensor
            is aligned to its own entries; the header's keys are sorted by name.
        metadata: Text that the header carries.

    Raises:
        ScuteError: SC109 when the operating system refuses.
        ValueError: a name or size that isn't in the layout; bytes missing, or written twice.
    """

    def __init__(
        self, path: Path, layout: Mapping[str, tuple[str, Shape]], metadata: Mapping[str, str] | None = None
    ) -> None:
        self.path = path
        self._header, self.entries = plan_layout(layout, metadata or {})
        self._written: dict[str, list[tuple[int, int]]] = {name: [] for name in self.entries}
        self._file = -1

    def __enter__(self) -> Self:
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
            os.ftruncate(self._file, max((e.end for e in self.entries.values()), default=len(self._header)))
        except OSError as error:
            self._abandon()
            _refused(self.path, error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self._abandon()
            return
        try:
            self._check_complete()
            self._put(self._header, 0)
            os.fsync(self._file)
        except OSError as refusal:
            self._abandon()
            _refused(self.path, refusal)
        except BaseException:
            self._abandon()
            raise
        os.close(self._file)
        self._file = -1

    def write(self, name: str, raw: Raw) -> None:
        """Put all bytes of a tensor at their place."""
        view = _as_bytes(raw)
        if len(view) != self.entries[name].nbytes:
            msg = f"{name}: {len(view)} bytes for a tensor of {self.entries[name].nbytes}"
            raise ValueError(msg)
        self.write_at(name, 0, view)

    def write_at(self, name: str, byte_offset: int, raw: Raw) -> None:
        """Put some bytes of a tensor at `byte_offset` inside it."""
        view, entry = _as_bytes(raw), self.entries[name]
        if byte_offset < 0 or byte_offset + len(view) > entry.nbytes:
            msg = f"{name}: bytes {byte_offset} to {byte_offset + len(view)} of a tensor of {entry.nbytes}"
            raise ValueError(msg)
        try:
            self._put(view, entry.begin + byte_offset)
        except OSError as error:
            _refused(self.path, error)
        if len(view):
            _join(self._written[name], (byte_offset, byte_offset + len(view)))

    def _put(self, view: bytes | memoryview, position: int) -> None:
        while len(view):
            count = os.pwrite(self._file, view, position)
            view, position = view[count:], position + count

    def _check_complete(self) -> None:
        for name, entry in self.entries.items():
            spans = sorted(self._written[name])
            position = 0
            for start, stop in spans:
                if start != position:
                    break
                position = stop
            if position != entry.nbytes or sum(stop - start for start, stop in spans) != entry.nbytes:
                msg = f"{name}: written {spans}, of {entry.nbytes} bytes, each once"
                raise ValueError(msg)

    def _abandon(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self.path.unlink(missing_ok=True)


def plan_layout(
    layout: Mapping[str, tuple[str, Shape]], metadata: Mapping[str, str]
) -> tuple[bytes, Mapping[str, TensorEntry]]:
    """Return the file's first bytes (length and header, padded to a multiple of 8) and every tensor's place.

    >>> first, entries = plan_layout({"b": ("BF16", (3,)), "a": ("F32", (2,))}, {})
    >>> len(first) % 8, [(name, e.begin - len(first), e.nbytes) for name, e in entries.items()]
    (0, [('a', 0, 8), ('b', 8, 6)])
    """
    listed: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    spans: dict[str, tuple[int, int]] = {}
    position = 0
    for name in sorted(layout, key=lambda name: (-BITS[layout[name][0]], name)):
        dtype, shape = layout[name]
        spans[name] = (position, position + math.prod(shape) * BITS[dtype] // 8)
        position = spans[name][1]
    for name in sorted(layout):
        listed[name] = {"dtype": layout[name][0], "shape": list(layout[name][1]), "data_offsets": list(spans[name])}
    header = json.dumps(listed, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    header += b" " * (-len(header) % 8)
    start = 8 + len(header)
    entries = {
        name: TensorEntry(dtype=layout[name][0], shape=tuple(layout[name][1]), begin=start + begin, end=start + end)
        for name, (begin, end) in spans.items()
    }
    return len(header).to_bytes(8, "little") + header, MappingProxyType(entries)


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


def _join(spans: list[tuple[int, int]], span: tuple[int, int]) -> None:
    # Tiles mostly arrive in order: joining them keeps the list at one entry.
    if spans and spans[-1][1] == span[0]:
        spans[-1] = (spans[-1][0], span[1])
    else:
        spans.append(span)


def _as_bytes(raw: Raw) -> memoryview:
    view = raw.data if isinstance(raw, np.ndarray) else memoryview(raw)
    # A view without entries can't be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")


def _refused(path: Path, error: OSError) -> NoReturn:
    reason = error.strerror or str(error)
    fail(
        Code.SC109,
        where=str(path),
        found=reason[:1].lower() + reason[1:],
        expected="a place where a file can be written",
        next="check the folder, its permissions and the free space",
    )

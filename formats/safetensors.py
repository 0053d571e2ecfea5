"""Reads safetensors files strictly and without torch; damage is reported as a diagnostic.

The format: eight bytes with the header's length, a JSON header, then the tensors' bytes without holes (safetensors,
README, section "Format").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from scute_compile.diagnostics import Code, fail
from scute_compile.formats.reading import file_size, opened, parse_object
from scute_compile.ir.dtypes import BITS, FORMATS
from scute_compile.ir.expressions import Shape

if TYPE_CHECKING:
    from hashlib import _Hash

Floats: TypeAlias = npt.NDArray[np.floating]
"""Decoded values: float32, or float64 where the file has float64."""
Check: TypeAlias = Callable[[npt.NDArray[np.uint8]], None]

HEADER_LIMIT = 100_000_000
"""Largest header in bytes, as the format defines."""
LONGEST_HEADER = 50_000_000
MOST_TENSORS = 250_000
LONGEST_NAME = 1000
"""Limits of what is read: bytes of a header, its tensors, and the characters of a tensor's name."""
BLOCK_BYTES = 8 << 20

_LFS = b"version https://git-lfs"
_LARGEST = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """A tensor's dtype, shape and byte range in its file."""

    dtype: str
    """The safetensors name: `F32`, `BF16`, ..."""
    shape: Shape
    begin: int
    """First byte, counted from the start of the file."""
    end: int
    """One past the last byte."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.end - self.begin

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)


def read_header(path: Path, digest: _Hash | None = None) -> Mapping[str, TensorEntry]:
    """Return the entries of a file by name, in byte order.

    Args:
        path: The file.
        digest: Updated with the bytes before the first tensor.

    Raises:
        ScuteError: SC103 (Git LFS pointer), SC104 (truncated), SC105 (damaged header), SC109 (unreadable).
    """
    with opened(path) as file:
        size = file_size(file)
        length = header_length(file.read(64), size, str(path))
        file.seek(8)
        raw = read_exactly(file, np.empty(length, np.uint8), path).tobytes()
    if digest is not None:
        digest.update(length.to_bytes(8, "little") + raw)
    return parse_header(raw, size, str(path))


def header_length(start: bytes, size: int, where: str) -> int:
    """Return the header's length, from the first bytes of a file of `size` bytes.

    Raises:
        ScuteError: SC103, SC104 or SC105.
    """
    if start.startswith(_LFS):
        fail(
            Code.SC103,
            where=where,
            found=f"a Git LFS pointer of {size} bytes instead of the file",
            expected="the safetensors file",
        )
    if size <= 8 or len(start) < 8:
        _truncated(where, size, "more than 8 bytes: the header's length and the header")
    length = int.from_bytes(start[:8], "little")
    if length > min(HEADER_LIMIT, size - 8):
        _damaged(
            where,
            f"a header length of {length} bytes in a file of {size} bytes, which begins with {start[:16]!r}",
            f"a header of at most {min(HEADER_LIMIT, size - 8)} bytes",
        )
    return length


def parse_header(raw: bytes, size: int, where: str) -> Mapping[str, TensorEntry]:
    """Return the entries of a header; `size` is the size of the file in bytes.

    Raises:
        ScuteError: SC104 when the file ends too early, SC105 when the header is damaged, SC112 when it lists more
            tensors, or longer names, than any real file.
    """
    _check_limits(raw, where)
    if raw[:1] != b"{":
        _damaged(where, f"a header that begins with {raw[:16]!r}", "a JSON object, which begins with '{'")
    try:
        listed = parse_object(raw)
    except ValueError as error:
        _damaged(where, f"a header that is not strict JSON: {error}", "a JSON object that lists every tensor once")
    _check_metadata(listed.pop("__metadata__", None), where)
    start = 8 + len(raw)
    entries = {name: _entry(name, value, start, where) for name, value in listed.items()}
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end, item[0])))
    position = start
    for name, entry in ordered.items():
        if entry.begin != position:
            kind = "hole" if entry.begin > position else "overlap"
            _damaged(
                f"{where}: {name}",
                f"a tensor that begins at byte {entry.begin - start} (a {kind})",
                f"byte {position - start}, the end of the tensor before it",
            )
        position = entry.end
    if position > size:
        _truncated(where, size, f"{position} bytes, by the header")
    if position < size:
        _damaged(where, f"a file of {size} bytes", f"{position} bytes, by the header")
    return MappingProxyType(ordered)


def _check_limits(raw: bytes, where: str) -> None:
    """Refuse headers larger than any real one before they are parsed: 90,000 tensors take 15 MB."""
    count = raw.count(b'"data_offsets"')
    if len(raw) > LONGEST_HEADER or count > MOST_TENSORS:
        fail(
            Code.SC112,
            where=where,
            found=f"a header of {len(raw)} bytes and {count} tensors",
            expected=f"at most {LONGEST_HEADER} bytes and {MOST_TENSORS} tensors",
        )


def _check_metadata(value: object, where: str) -> None:
    if value is None or (isinstance(value, dict) and all(isinstance(item, str) for item in value.values())):
        return
    _damaged(where, "a __metadata__ with values other than text", "a JSON object whose values are strings")


def _entry(name: str, value: object, start: int, where: str) -> TensorEntry:
    here = f"{where}: {name}"
    if len(name) > LONGEST_NAME:
        fail(Code.SC112, where=here, found=f"a name of {len(name)} characters", expected=f"at most {LONGEST_NAME}")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        _damaged(here, f"an entry {_brief(value)}", "an object with exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        _damaged(here, f"the dtype {_brief(dtype)}", f"one of {', '.join(BITS)}")
    if not _whole_numbers(shape):
        _damaged(here, f"the shape {_brief(shape)}", "a list of whole numbers from 0")
    if not _whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _damaged(here, f"the data_offsets {_brief(offsets)}", "two whole numbers from 0, the first at most the second")
    bits = BITS[dtype]
    for dim in shape:
        bits *= dim or 1  # an empty tensor's other dimensions are limited as well
        if bits > _LARGEST:
            _damaged(here, f"the shape {_brief(shape)}", "a tensor smaller than 2^63 bits")
    bits = 0 if 0 in shape else bits
    if bits != 8 * (offsets[1] - offsets[0]):
        _damaged(
            here,
            f"{offsets[1] - offsets[0]} bytes",
            f"{bits / 8:.10g} bytes for shape {_brief(shape)} in {dtype}",
        )
    return TensorEntry(dtype=dtype, shape=tuple(shape), begin=start + offsets[0], end=start + offsets[1])


def _whole_numbers(value: object) -> bool:
    # `type(...) is int`: a JSON `true` is a bool, which is an int too.
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= _LARGEST for item in value)


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def decode(raw: bytes | bytearray | memoryview | npt.NDArray[np.uint8], dtype: str, where: str = "") -> Floats:
    """Return the values in `raw` as a flat array: float32, or float64 for `F64`. `F32` and `F64` are not copied.

    Raises:
        ScuteError: SC110 for dtypes other than F32, BF16, F16 and F64.
    """
    if dtype not in FORMATS:
        fail(
            Code.SC110,
            where=where,
            found=f"the dtype {dtype}",
            expected=" or ".join(FORMATS),
            next="save the weights again in one of these dtypes",
        )
    stored = np.frombuffer(raw, FORMATS[dtype].stored)
    if dtype == "BF16":
        # bfloat16 is the upper half of a float32.
        wide = stored.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return stored.astype(np.float32) if dtype == "F16" else stored


def read_tensor(path: Path, entry: TensorEntry, check: Check | None = None) -> Floats:
    """Return a whole tensor, decoded, in its shape.

    Args:
        path: The file.
        entry: The tensor.
        check: Called with the stored bytes before they are decoded.

    Raises:
        ScuteError: SC104, SC109, SC110, and what `check` raises.
    """
    raw = _read(path, entry, 0, entry.nbytes)
    if check is not None:
        check(raw)
    return decode(raw, entry.dtype, str(path)).reshape(entry.shape)


def read_rows(path: Path, entry: TensorEntry, start: int, stop: int) -> Floats:
    """Return rows `start` to `stop` of a tensor of at least one dimension, decoded: shape `(stop - start, ...)`.

    Raises:
        ScuteError: SC104, SC109 or SC110.
    """
    if not 0 <= start <= stop <= entry.shape[0]:
        msg = f"rows {start} to {stop} of a tensor of shape {entry.shape}"
        raise IndexError(msg)
    shape = (stop - start, *entry.shape[1:])
    row = entry.nbytes // entry.shape[0] if entry.shape[0] else 0
    return decode(_read(path, entry, start * row, (stop - start) * row), entry.dtype, str(path)).reshape(shape)


def read_blocks(path: Path, entry: TensorEntry, block_bytes: int = BLOCK_BYTES) -> Iterator[Floats]:
    """Yield a tensor's values in flat decoded blocks of at most `block_bytes` stored bytes.

    The file is read and not mapped, so memory stays at one block.

    Raises:
        ScuteError: SC104, SC109 or SC110.
    """
    step = max(8, block_bytes // 8 * 8)  # a multiple of the size of every dtype that can be decoded
    with opened(path) as file:
        file.seek(entry.begin)
        for offset in range(0, entry.nbytes, step):
            block = np.empty(min(step, entry.nbytes - offset), np.uint8)
            yield decode(read_exactly(file, block, path), entry.dtype, str(path))


def read_bytes(path: Path, entry: TensorEntry, offset: int, length: int) -> bytes:
    """Return `length` stored bytes of a tensor from `offset` on.

    Raises:
        ScuteError: SC104 or SC109.
    """
    return _read(path, entry, offset, length).tobytes()


def read_spans(path: Path, spans: Iterable[tuple[int, int]]) -> Iterator[bytes]:
    """Yield the bytes of each `(begin, length)`, counted from the start of the file.

    Raises:
        ScuteError: SC104 or SC109.
    """
    with opened(path) as file:
        for begin, length in spans:
            file.seek(begin)
            yield read_exactly(file, np.empty(length, np.uint8), path).tobytes()


def read_exactly(file: FileIO, block: npt.NDArray[np.uint8], path: Path) -> npt.NDArray[np.uint8]:
    """Fill `block` from the file's position on and return it.

    Raises:
        ScuteError: SC104 when the file ends first.
    """
    view, filled = block.data, 0
    while filled < len(view):
        count = file.readinto(view[filled:])
        if not count:
            _truncated(str(path), file.tell(), f"{len(view) - filled} bytes more")
        filled += count
    return block


def _read(path: Path, entry: TensorEntry, offset: int, length: int) -> npt.NDArray[np.uint8]:
    if offset < 0 or length < 0 or offset + length > entry.nbytes:
        msg = f"bytes {offset} to {offset + length} of a tensor of {entry.nbytes} bytes"
        raise IndexError(msg)
    with opened(path) as file:
        file.seek(entry.begin + offset)
        return read_exactly(file, np.empty(length, np.uint8), path)


def _truncated(where: str, size: int, expected: str) -> NoReturn:
    fail(
        Code.SC104,
        where=where,
        found=f"a truncated file of {size} bytes",
        expected=expected,
    )


def _damaged(where: str, found: str, expected: str) -> NoReturn:
    fail(
        Code.SC105,
        where=where,
        found=found,
        expected=expected,
    )

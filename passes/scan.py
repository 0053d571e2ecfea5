"""Scan: one buffered pass over the adapter's bytes that leaves a few facts per tensor.

Later passes and findings ask these facts (is it finite, zero, the identity?) instead of reading the tensor again.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from scute_compile.formats.peft_folder import CONFIG, WEIGHTS, AdapterFolder
from scute_compile.formats.reading import opened, sha256_of
from scute_compile.formats.safetensors import TensorEntry, decode, read_exactly

Words: TypeAlias = npt.NDArray[np.unsignedinteger]

BLOCK_BYTES = 1 << 20
"""Small enough that a block and its scratch copy stay in the processor's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """What one pass over a tensor's entries found.

    An integer tensor has `finite` and `size` alone; its other facts are those of an empty one.
    """

    finite: bool
    """No entry is NaN or infinite."""
    zero: bool
    """Every entry is 0; also true of a tensor without entries."""
    largest: float
    """The largest |x|; infinity when the tensor isn't finite."""
    smallest: float
    """The smallest |x| that is not 0; 0.0 when there is none."""
    not_one: int
    """Entries that differ from 1."""
    ones: bool
    """Every entry is 1, and there is one at least."""
    size: int
    """Number of entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """The facts of an adapter's tensors by key, and its files' hashes by name."""

    facts: Mapping[str, TensorFacts]
    sha256: Mapping[str, str]
    """Empty unless hashes were asked for."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a dtype's bits lie in an unsigned word: for positive floats, larger numbers are larger words."""

    word: str
    one: int
    infinity: int

    @property
    def magnitude(self) -> int:
        """Every bit but the sign."""
        return int(np.iinfo(self.word).max) >> 1


_LAYOUTS = {
    "F32": _Layout("<u4", 0x3F800000, 0x7F800000),
    "BF16": _Layout("<u2", 0x3F80, 0x7F80),
    "F16": _Layout("<u2", 0x3C00, 0x7C00),
    "F64": _Layout("<u8", 0x3FF0000000000000, 0x7FF0000000000000),
}


def scan(adapter: AdapterFolder, *, hash_files: bool = False) -> Scan:
    """Read the adapter's weights once, in blocks, and return what they are like.

    Args:
        adapter: The opened folder.
        hash_files: Whether to hash the two files as well, in the same pass.

    Raises:
        ScuteError: SC104 or SC109 when the file can't be read to its end.
    """
    buffer = np.empty(BLOCK_BYTES, np.uint8)
    scratch = np.empty(BLOCK_BYTES, np.uint8)
    digest = hashlib.sha256()
    facts: dict[str, TensorFacts] = {}
    with opened(adapter.weights) as file:
        # Entries lie end to end in this order, so that header and entries together are the whole file.
        start = min((entry.begin for entry in adapter.tensors.values()), default=0)
        for block in _blocks(file, start, buffer, adapter):
            digest.update(block.data)
        for key, entry in adapter.tensors.items():
            gathered = _Gathered(entry)
            for block in _blocks(file, entry.nbytes, buffer, adapter):
                gathered.add(block, scratch)
                if hash_files:
                    digest.update(block.data)
            facts[key] = gathered.facts()
    hashes = {WEIGHTS: digest.hexdigest(), CONFIG: sha256_of(adapter.path / CONFIG)} if hash_files else {}
    return Scan(facts=MappingProxyType(facts), sha256=MappingProxyType(hashes))


def _blocks(
    file: FileIO, length: int, buffer: npt.NDArray[np.uint8], adapter: AdapterFolder
) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the next `length` bytes; each block is overwritten by the next."""
    for offset in range(0, length, BLOCK_BYTES):
        yield read_exactly(file, buffer[: min(BLOCK_BYTES, length - offset)], adapter.weights)


class _Gathered:
    """The running figures of one tensor, all of them integers: reductions over words need no decoding."""

    def __init__(self, entry: TensorEntry) -> None:
        self._entry = entry
        self._layout = _LAYOUTS.get(entry.dtype)
        self._most = 0
        self._least = -1
        self._ones = 0

    def add(self, block: npt.NDArray[np.uint8], scratch: npt.NDArray[np.uint8]) -> None:
        if self._layout is None:
            return
        words: Words = block.view(self._layout.word)
        size: Words = scratch[: block.size].view(self._layout.word)
        self._ones += int(np.count_nonzero(words == words.dtype.type(self._layout.one)))
        np.bitwise_and(words, words.dtype.type(self._layout.magnitude), out=size)
        self._most = max(self._most, int(size.max()))
        # Less one, zero becomes the largest word of all: the minimum then passes over zeros without a mask.
        np.subtract(size, words.dtype.type(1), out=size)
        least = int(size.min()) + 1
        if least <= self._layout.magnitude:
            self._least = least if self._least < 0 else min(self._least, least)

    def facts(self) -> TensorFacts:
        entry, layout = self._entry, self._layout
        if layout is None:
            return TensorFacts(
                finite=True, zero=False, largest=0.0, smallest=0.0, not_one=0, ones=False, size=entry.size
            )
        finite = self._most < layout.infinity
        return TensorFacts(
            finite=finite,
            zero=self._most == 0,
            largest=self._number(self._most) if finite else math.inf,
            smallest=self._number(self._least) if 0 < self._least < layout.infinity else 0.0,
            not_one=entry.size - self._ones,
            ones=self._ones == entry.size > 0,
            size=entry.size,
        )

    def _number(self, word: int) -> float:
        width = np.dtype(self._layout.word).itemsize if self._layout else 0
        return float(decode(word.to_bytes(width, "little"), self._entry.dtype)[0])

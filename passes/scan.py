"""The scan: reads the adapter's bytes once, and returns a few facts about each tensor.

Later passes and findings use these facts (whether a tensor is finite, zero, the identity) and don't read tensors again.
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
from scute_compile.formats.reading import opened, refuse_changed
from scute_compile.formats.safetensors import TensorEntry, decode, read_exactly
from scute_compile.ir.dtypes import FORMATS

Words: TypeAlias = npt.NDArray[np.unsignedinteger]

BLOCK_BYTES = 1 << 20
"""Bytes per read: a block and its scratch copy stay in the processor's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """Facts about a tensor's entries.

    Of a tensor whose dtype is not in `FORMATS`, only `size` is known; the other facts are those of an empty tensor.
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
    """Every entry is 1, and the tensor is not empty."""
    size: int
    """Number of entries."""


Facts = Mapping[str, TensorFacts]
"""The facts of an adapter's tensors, by checkpoint key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """The result of the scan."""

    facts: Facts
    sha256: Mapping[str, str]
    """The hashes of the adapter's files by name; empty unless `scan` was called with `hash_files`."""
    tensor_sha256: Mapping[str, str]
    """The hashes of the tensors' bytes by key; empty unless `scan` was called with `hash_files`."""


def scan(adapter: AdapterFolder, *, hash_files: bool = False) -> Scan:
    """Read the adapter's weights once, in blocks, and return the facts of every tensor.

    Args:
        adapter: The opened folder.
        hash_files: Whether to hash the two files and each tensor as well, in the same pass.

    Raises:
        ScuteError: SC104 or SC109 when the file can't be read to its end, SC111 when its header is no longer the one
            that was read when the folder was opened.
    """
    buffer = np.empty(BLOCK_BYTES, np.uint8)
    scratch = np.empty(BLOCK_BYTES, np.uint8)
    digest = hashlib.sha256()
    facts: dict[str, TensorFacts] = {}
    tensor_hashes: dict[str, str] = {}
    with opened(adapter.weights) as file:
        # Entries are contiguous in this order, so the header and the entries together are the whole file.
        start = min((entry.begin for entry in adapter.tensors.values()), default=0)
        for block in _blocks(file, start, buffer, adapter):
            digest.update(block.data)
        if digest.hexdigest() != adapter.header_sha256:
            refuse_changed(str(adapter.weights), "another header", "the header that was read when it was opened")
        for key, entry in adapter.tensors.items():
            counts, of_tensor = _Counts(entry), hashlib.sha256()
            for block in _blocks(file, entry.nbytes, buffer, adapter):
                counts.add(block, scratch)
                if hash_files:
                    digest.update(block.data)
                    of_tensor.update(block.data)
            facts[key] = counts.facts()
            if hash_files:
                tensor_hashes[key] = of_tensor.hexdigest()
    hashes = {WEIGHTS: digest.hexdigest(), CONFIG: adapter.config_sha256} if hash_files else {}
    return Scan(
        facts=MappingProxyType(facts),
        sha256=MappingProxyType(hashes),
        tensor_sha256=MappingProxyType(tensor_hashes),
    )


def _blocks(
    file: FileIO, length: int, buffer: npt.NDArray[np.uint8], adapter: AdapterFolder
) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the next `length` bytes; each block is overwritten by the next."""
    for offset in range(0, length, BLOCK_BYTES):
        yield read_exactly(file, buffer[: min(BLOCK_BYTES, length - offset)], adapter.weights)


class _Counts:
    """The running reductions of one tensor, over its words: for positive floats, larger numbers are larger words."""

    def __init__(self, entry: TensorEntry) -> None:
        self._entry = entry
        self._format = FORMATS.get(entry.dtype)
        self._most = 0
        self._least = -1
        self._ones = 0

    def add(self, block: npt.NDArray[np.uint8], scratch: npt.NDArray[np.uint8]) -> None:
        if self._format is None:
            return
        words: Words = block.view(self._format.word)
        magnitudes: Words = scratch[: block.size].view(self._format.word)
        largest_magnitude = int(np.iinfo(words.dtype).max) >> 1  # every bit but the sign
        self._ones += int(np.count_nonzero(words == words.dtype.type(self._format.one)))
        np.bitwise_and(words, words.dtype.type(largest_magnitude), out=magnitudes)
        self._most = max(self._most, int(magnitudes.max()))
        # Subtracting 1 turns zero into the largest word, so that the minimum ignores zeros without a mask.
        np.subtract(magnitudes, words.dtype.type(1), out=magnitudes)
        least = int(magnitudes.min()) + 1
        if least <= largest_magnitude:
            self._least = least if self._least < 0 else min(self._least, least)

    def facts(self) -> TensorFacts:
        entry, floats = self._entry, self._format
        if floats is None:
            return TensorFacts(
                finite=True, zero=False, largest=0.0, smallest=0.0, not_one=0, ones=False, size=entry.size
            )
        finite = self._most < floats.infinity
        return TensorFacts(
            finite=finite,
            zero=self._most == 0,
            largest=self._number(self._most) if finite else math.inf,
            smallest=self._number(self._least) if 0 < self._least < floats.infinity else 0.0,
            not_one=entry.size - self._ones,
            ones=self._ones == entry.size > 0,
            size=entry.size,
        )

    def _number(self, word: int) -> float:
        width = self._format.itemsize if self._format else 0
        return float(decode(word.to_bytes(width, "little"), self._entry.dtype)[0])

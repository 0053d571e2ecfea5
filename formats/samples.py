"""The sampled bytes of a base's tensors: what the fingerprint of its content hashes."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from scute_compile.formats.safetensors import TensorEntry

SAMPLE_BYTES = 4096
"""Length of each sample of a tensor."""


def sample_spans(entry: TensorEntry) -> tuple[tuple[int, int], ...]:
    """Return the sampled `(offset, length)` spans of a tensor, offsets counted inside it.

    >>> sample_spans(TensorEntry(dtype="F32", shape=(2500,), begin=8, end=10008))
    ((0, 4096), (2952, 4096), (5904, 4096))
    """
    if entry.nbytes <= SAMPLE_BYTES:
        return ((0, entry.nbytes),)
    last = entry.nbytes - SAMPLE_BYTES
    return tuple((offset, SAMPLE_BYTES) for offset in sorted({0, last // 2, last}))


class Samples:
    """Takes the samples of a tensor out of its bytes, which are added from the first to the last."""

    def __init__(self, entry: TensorEntry) -> None:
        self._spans = [(offset, offset + length, bytearray()) for offset, length in sample_spans(entry)]
        self._position = 0

    def add(self, block: npt.NDArray[np.uint8]) -> None:
        """Add the next bytes."""
        first, last = self._position, self._position + block.size
        for start, stop, sample in self._spans:
            if start < last and first < stop:
                sample.extend(block[max(start - first, 0) : stop - first].tobytes())
        self._position = last

    def hexdigest(self) -> str:
        """Return the SHA-256 of all samples, in the order of their offsets."""
        return hashlib.sha256(b"".join(sample for _, _, sample in self._spans)).hexdigest()

"""The one table of dtypes: floating-point formats, their names in safetensors files, and what follows from their bits.

No other file lists dtypes. `torch_dtype` is the only function here that imports torch, when it is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatFormat:
    """A binary floating-point format: a sign bit, an exponent and a mantissa."""

    name: str
    """The name in torch, numpy and configurations: `bfloat16`."""
    code: str
    """The name in safetensors headers: `BF16`."""
    exponent_bits: int
    mantissa_bits: int

    @property
    def bits(self) -> int:
        """Bits per value."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def itemsize(self) -> int:
        """Bytes per value."""
        return self.bits // 8

    @property
    def word(self) -> str:
        """The numpy dtype of an unsigned integer of the same size, little-endian: `<u2`."""
        return f"<u{self.itemsize}"

    @property
    def stored(self) -> str:
        """The numpy dtype in which stored bytes are first read: `word` for bfloat16, which numpy lacks.

        >>> FORMATS["F16"].stored, FORMATS["BF16"].stored
        ('<f2', '<u2')
        """
        return self.word if self.name == "bfloat16" else f"<f{self.itemsize}"

    @property
    def one(self) -> int:
        """The bits of 1.0.

        >>> hex(FORMATS["BF16"].one)
        '0x3f80'
        """
        return ((1 << (self.exponent_bits - 1)) - 1) << self.mantissa_bits

    @property
    def infinity(self) -> int:
        """The bits of infinity; larger magnitudes are NaN.

        >>> hex(FORMATS["F32"].infinity)
        '0x7f800000'
        """
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits

    @property
    def largest(self) -> float:
        """The largest finite value.

        >>> FORMATS["F16"].largest
        65504.0
        """
        return float((2.0 - 2.0**-self.mantissa_bits) * 2.0 ** (2 ** (self.exponent_bits - 1) - 1))

    @property
    def smallest_normal(self) -> float:
        """The smallest positive value with full precision.

        >>> FORMATS["F16"].smallest_normal == 2.0**-14
        True
        """
        return float(2.0 ** (2 - 2 ** (self.exponent_bits - 1)))

    @property
    def epsilon(self) -> float:
        """The largest relative error of one rounding.

        >>> FORMATS["BF16"].epsilon == 2.0**-8
        True
        """
        return 2.0 ** -(self.mantissa_bits + 1)


FORMATS: Mapping[str, FloatFormat] = MappingProxyType(
    {
        row.code: row
        for row in (
            FloatFormat(name="float64", code="F64", exponent_bits=11, mantissa_bits=52),
            FloatFormat(name="float32", code="F32", exponent_bits=8, mantissa_bits=23),
            FloatFormat(name="bfloat16", code="BF16", exponent_bits=8, mantissa_bits=7),
            FloatFormat(name="float16", code="F16", exponent_bits=5, mantissa_bits=10),
        )
    }
)
"""By safetensors name: the formats whose numbers are read. Adapters and bases may hold any of them."""

_OTHER_BITS: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 8,
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        "U8": 8,
        "I8": 8,
        "F8_E5M2": 8,
        "F8_E4M3": 8,
        "F8_E8M0": 8,
        "F8_E4M3FNUZ": 8,
        "F8_E5M2FNUZ": 8,
        "I16": 16,
        "U16": 16,
        "I32": 32,
        "U32": 32,
        "I64": 64,
        "U64": 64,
        "C64": 64,
    }
)
BITS: Mapping[str, int] = MappingProxyType({**_OTHER_BITS, **{code: row.bits for code, row in FORMATS.items()}})
"""Bits per value of every dtype that a safetensors header may name, whether its numbers are read or not."""


class DType(StrEnum):
    """The dtypes that an artifact may be stored in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def format(self) -> FloatFormat:  # type: ignore[override] # str.format makes no sense on a dtype
        """The row of the table."""
        return format_named(self.value)

    @property
    def code(self) -> str:
        """The name in safetensors headers."""
        return self.format.code

    @property
    def itemsize(self) -> int:
        """Bytes per value."""
        return self.format.itemsize

    @property
    def largest(self) -> float:
        """The largest finite value."""
        return self.format.largest

    @property
    def smallest_normal(self) -> float:
        """The smallest positive value with full precision."""
        return self.format.smallest_normal

    @property
    def epsilon(self) -> float:
        """The largest relative error of one rounding."""
        return self.format.epsilon


def format_named(name: str) -> FloatFormat:
    """Return a format by its name in torch or a configuration, with or without `torch.`.

    Raises:
        KeyError: when the table has no such format.

    >>> format_named("torch.bfloat16").code
    'BF16'
    """
    plain = name.removeprefix("torch.")
    row = next((row for row in FORMATS.values() if row.name == plain), None)
    if row is None:
        raise KeyError(name)
    return row


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for a format by either name.

    >>> torch_dtype("F16"), torch_dtype("bfloat16")
    (torch.float16, torch.bfloat16)
    """
    import torch

    found = getattr(torch, FORMATS[name].name if name in FORMATS else format_named(name).name)
    assert isinstance(found, torch.dtype)  # noqa: S101 - narrows what getattr returns
    return found

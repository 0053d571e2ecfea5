"""The one table of dtypes."""

from __future__ import annotations

from enum import StrEnum


class DType(StrEnum):
    """Storage dtypes of an artifact."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def itemsize(self) -> int:
        """Bytes per value."""
        return 4 if self is DType.FLOAT32 else 2

    @property
    def largest(self) -> float:
        """The largest finite value."""
        return {"float32": 3.4028234663852886e38, "bfloat16": 3.3895313892515355e38, "float16": 65504.0}[self.value]

    @property
    def smallest_normal(self) -> float:
        """The smallest positive value with full precision."""
        return 2.0**-14 if self is DType.FLOAT16 else 2.0**-126

    @property
    def epsilon(self) -> float:
        """The largest relative error of one rounding."""
        return {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}[self.value]

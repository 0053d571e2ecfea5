"""The PEFT methods that the compiler reads."""

from __future__ import annotations

from enum import StrEnum


class Method(StrEnum):
    """A PEFT method; the value is the word in a manifest's field `method`."""

    LORA = "lora"
    DORA = "dora"
    ADALORA = "adalora"
    IA3 = "ia3"
    VERA = "vera"
    OFT = "oft"

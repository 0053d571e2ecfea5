"""The PEFT methods that the compiler reads."""

from __future__ import annotations

from enum import StrEnum


class Method(StrEnum):
    """A PEFT method, by the name that artifacts and reports use."""

    LORA = "lora"
    DORA = "dora"
    ADALORA = "adalora"
    IA3 = "ia3"
    VERA = "vera"
    OFT = "oft"

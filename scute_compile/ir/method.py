"""The PEFT methods that the compiler reads."""

from __future__ import annotations

from enum import StrEnum


class Method(StrEnum):
    """The methods that a pool may hold, named as artifacts name themselves."""

    LORA = "lora"
    DORA = "dora"
    ADALORA = "adalora"
    IA3 = "ia3"
    VERA = "vera"
    OFT = "oft"

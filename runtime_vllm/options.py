"""The plugin's settings: environment variables, read once per process before the engine builds its model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from scute_compile.diagnostics import Code, fail

MIB = 1 << 20
STORE = Path("~/.cache/scute/vllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The plugin's settings."""

    stock_kernels: bool = False
    """`SCUTE_VLLM_STOCK_KERNELS`: serve plain PEFT LoRA folders with vLLM's own kernels and buffers."""
    compile_folders: bool = False
    """`SCUTE_VLLM_COMPILE`: compile PEFT folders that vLLM refuses when they are loaded."""
    rotations: bool = True
    """`SCUTE_VLLM_ROTATIONS`: allocate buffers for delta rows in every captured step; without them OFT is refused."""
    pool_bytes: int | None = None
    """`SCUTE_VLLM_POOL_MIB`: memory for adapters; None for what vLLM's own buffers with `s` and `b` would take."""
    shared_bytes: int = 64 * MIB
    """`SCUTE_VLLM_SHARED_MIB`: memory for factors that adapters share."""
    pair_rank: int = 256
    """`SCUTE_VLLM_SHARED_RANK`: the largest rank of a shared pair."""
    pairs: int = 4
    """`SCUTE_VLLM_SHARED_PAIRS`: shared pairs on the device at once; captured steps have buffers for each."""
    store: Path = STORE
    """`SCUTE_VLLM_STORE`: where folders that were compiled when they were loaded are kept."""

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Read the settings. Raises SC703 for a value of the wrong kind.

        >>> Options.read({"SCUTE_VLLM_COMPILE": "1", "SCUTE_VLLM_POOL_MIB": "3"}).pool_bytes
        3145728
        """
        pool = _number(environment, "SCUTE_VLLM_POOL_MIB")
        shared = _number(environment, "SCUTE_VLLM_SHARED_MIB")
        return cls(
            stock_kernels=_flag(environment, "SCUTE_VLLM_STOCK_KERNELS", default=False),
            compile_folders=_flag(environment, "SCUTE_VLLM_COMPILE", default=False),
            rotations=_flag(environment, "SCUTE_VLLM_ROTATIONS", default=True),
            pool_bytes=None if pool is None else pool * MIB,
            shared_bytes=64 * MIB if shared is None else shared * MIB,
            pair_rank=_number(environment, "SCUTE_VLLM_SHARED_RANK") or 256,
            pairs=_number(environment, "SCUTE_VLLM_SHARED_PAIRS") or 4,
            store=Path(environment.get("SCUTE_VLLM_STORE") or STORE).expanduser(),
        )


def _flag(environment: Mapping[str, str], name: str, *, default: bool) -> bool:
    value = environment.get(name, "")
    if value not in ("", "0", "1"):
        fail(Code.SC703, where=name, found=repr(value), expected="0 or 1", next=f"set {name} to 0 or 1, or unset it")
    return default if value == "" else value == "1"


def _number(environment: Mapping[str, str], name: str) -> int | None:
    value = environment.get(name, "")
    if value == "":
        return None
    if not (value.isascii() and value.isdigit() and 0 < int(value) < 1 << 24):
        fail(
            Code.SC703,
            where=name,
            found=repr(value),
            expected="a whole number from 1 to 16777215",
            next=f"set {name} to a number, or unset it",
        )
    return int(value)

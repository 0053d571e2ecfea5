"""Brings the arguments of the public API into the types that the driver takes, and refuses values out of range."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from enum import StrEnum
from typing import TypeVar

from scute_compile import StrPath
from scute_compile.diagnostics import Code, Findings, fail
from scute_compile.driver.artifact_checks import Requested
from scute_compile.ir.dtypes import DType
from scute_compile.ir.target import LoraSharding, Target

MAX_TP = 1024
MOST = 10**9
"""The most tenants, tokens and the like that an argument may ask for."""
Choice = TypeVar("Choice", bound=StrEnum)


def path_of(path: StrPath) -> str:
    """Return a path or Hub id as text."""
    return os.fspath(path)


def paths_of(paths: StrPath | Iterable[StrPath]) -> tuple[str, ...]:
    """Return one or several paths as a tuple.

    Raises:
        ScuteError: SC703 for no path.
    """
    several = (paths,) if isinstance(paths, str | os.PathLike) else tuple(paths)
    if not several:
        fail(Code.SC703, where="paths", found="no path", expected="at least one", next="pass a folder or a Hub id")
    return tuple(path_of(path) for path in several)


def checked_target(target: Target) -> Target:
    """Return a target with its enumerations in place of their names.

    >>> checked_target(Target(dtype="bfloat16", lora_sharding="full")).dtype
    <DType.BFLOAT16: 'bfloat16'>

    Raises:
        ScuteError: SC703 for unknown names and for numbers out of range.
    """
    findings = Findings()
    _check_range(findings, MAX_TP, tp=target.tp)
    _check_range(findings, MOST, tenants=target.workload.tenants, tokens=target.workload.tokens)
    findings.raise_if_errors()
    return replace(
        target,
        dtype=None if target.dtype is None else choice(DType, "dtype", target.dtype),
        lora_sharding=choice(LoraSharding, "lora_sharding", target.lora_sharding),
    )


def requested(
    *,
    tp: int | None = None,
    lora_sharding: str | None = None,
    tenants: int | None = None,
    tokens: int | None = None,
) -> Requested:
    """Return a request for a target.

    Raises:
        ScuteError: SC703 for unknown names and for numbers out of range.
    """
    findings = Findings()
    _check_range(findings, MAX_TP, tp=tp)
    _check_range(findings, MOST, tenants=tenants, tokens=tokens)
    findings.raise_if_errors()
    layout = None if lora_sharding is None else choice(LoraSharding, "lora_sharding", lora_sharding)
    return Requested(tp=tp, lora_sharding=layout, tenants=tenants, tokens=tokens)


def at_least_one(**number: int) -> int:
    """Return a number that must be positive, named as the argument: `at_least_one(tokens=64)`.

    Raises:
        ScuteError: SC703 when it is below 1 or above `MOST`.
    """
    findings = Findings()
    _check_range(findings, MOST, **number)
    findings.raise_if_errors()
    (value,) = number.values()
    return value


def choice(kind: type[Choice], name: str, value: str) -> Choice:
    """Return the member of an enumeration by its name.

    >>> choice(LoraSharding, "lora_sharding", "full")
    <LoraSharding.FULL: 'full'>

    Raises:
        ScuteError: SC703 for a name that it lacks.
    """
    if value not in set(kind):
        fail(
            Code.SC703,
            where=name,
            found=f"`{value}`",
            expected=" or ".join(f"`{member}`" for member in kind),
            next="pass one of these",
        )
    return kind(value)


def shown(number: float) -> str:
    """Return a number for a message; of one with very many digits their count.

    >>> shown(0.5), shown(64), shown(10**30)
    ('0.5', '64', 'a number of about 31 digits')
    """
    if isinstance(number, float) or abs(number) < 10**20:
        return f"{number:g}" if isinstance(number, float) else str(number)
    return f"a number of about {int(number.bit_length() * 0.30103) + 1} digits"


def _check_range(findings: Findings, largest: int, **numbers: int | None) -> None:
    for name, value in numbers.items():
        if value is not None and not 1 <= value <= largest:
            findings.error(
                Code.SC703,
                where=name,
                found=shown(value),
                expected="at least 1" if value < 1 and largest == MOST else f"1 to {largest}",
                next="pass a number in that range",
            )

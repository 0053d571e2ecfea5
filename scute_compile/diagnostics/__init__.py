"""Diagnostics: every finding has a stable code, a place, what was found, what was expected and what to do next."""

from scute_compile.diagnostics.codes import USAGE_CODES, Code
from scute_compile.diagnostics.diagnostic import (
    Diagnostic,
    Findings,
    ScuteError,
    Severity,
    as_scute_error,
    fail,
    printable,
)

__all__ = [
    "USAGE_CODES",
    "Code",
    "Diagnostic",
    "Findings",
    "ScuteError",
    "Severity",
    "as_scute_error",
    "fail",
    "printable",
]

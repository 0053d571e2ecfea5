"""Writes the page of codes, `docs/errors.md`: `python -m scute_compile.diagnostics.codes_page > docs/errors.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from scute_compile.cli.app import NO_BASE
from scute_compile.diagnostics.codes import Code

FAMILIES = {
    "SC1": "Files",
    "SC2": "Configuration",
    "SC3": "Keys and tensors",
    "SC4": "The base model",
    "SC5": "Tensor parallelism",
    "SC6": "Artifacts and stores",
    "SC7": "Commands",
    "SC8": "The runtime",
}
"""The first letters of a code -> what the family is about."""

HEAD = """\
# Codes

Every message of Scute has a code, and says where it is, what was found, what was expected and what to do next. A code
is stable: it is never reused for something else, so scripts can rely on it (`--json` lists findings with their codes).

An `error` refuses the adapter, and the command ends with status 1. A `note` says something worth knowing about an
adapter that is exact all the same. Some codes are met as either. {no_base} end a command with status 2.

This page is written by `python -m scute_compile.diagnostics.codes_page > docs/errors.md`.
"""


def page() -> str:
    """Return the page in Markdown."""
    *first, last = sorted(code.name for code in NO_BASE)
    return "\n".join([HEAD.format(no_base=f"{', '.join(first)} and {last}"), *_sections()])


def _sections() -> Iterator[str]:
    for prefix, family in FAMILIES.items():
        yield f"## {prefix}xx: {family.lower()}\n"
        for code in Code:
            if code.name.startswith(prefix):
                yield f"### {code.name}: {code.title}\n\n{code.paragraph}\n"


if __name__ == "__main__":
    sys.stdout.write(page())

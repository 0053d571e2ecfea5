"""Writes the page of codes, `docs/errors.md`: `python -m scute_compile.diagnostics.codes_page > docs/errors.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from scute_compile.diagnostics.codes import USAGE_CODES, Code

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
"""First letters of a code -> the family's heading."""

HEAD = """\
<!-- written by python -m scute_compile.diagnostics.codes_page -->

# Codes

Every message of Scute has a code, a place, what was found, what was expected and what to do next. Codes are stable and
never reused, so scripts can rely on them (`--json` lists findings with their codes).

An `error` refuses the adapter, and the command ends with status 1. A `note` informs about an adapter that is exact.
Some codes occur as either. {usage} end a command with status 2.
"""


def page() -> str:
    """Return the page in Markdown."""
    *first, last = sorted(code.name for code in USAGE_CODES)
    return "\n".join([HEAD.format(usage=f"{', '.join(first)} and {last}"), *_sections()])


def _sections() -> Iterator[str]:
    for prefix, family in FAMILIES.items():
        yield f"## {prefix}xx: {family.lower()}\n"
        for code in Code:
            if code.name.startswith(prefix):
                yield f"### {code.name}: {code.title}\n\n{code.paragraph}\n"


if __name__ == "__main__":
    sys.stdout.write(page())

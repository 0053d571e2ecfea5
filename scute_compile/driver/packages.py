"""Names the package that is missing when a command needs more than the light install."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from scute_compile.diagnostics import Code, fail


@contextmanager
def needs(packages: str, *, command: str) -> Iterator[None]:
    """Turn a failed import into a finding.

    Args:
        packages: What the command needs: `torch, transformers and peft`.
        command: The command, for the finding.

    Raises:
        ScuteError: SC701 when an import inside the block finds no such module.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        fail(
            Code.SC701,
            where=command,
            found=f"no module named {error.name!r}",
            expected=packages,
            next=f"`pip install 'scute-compile[compile]'`, or run `scute {command}` on another machine",
        )

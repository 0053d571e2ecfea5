"""The request of `scute run`: adapters by name, and prompts that each name one of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from scute_compile.diagnostics import Code, Findings

BASE = "base"
"""The name of rows without an adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of the batch."""

    adapter: str | None
    """None for the base alone."""
    text: str

    @property
    def name(self) -> str:
        """The row's name in the output."""
        return self.adapter or BASE


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """The adapters and prompts of one call."""

    adapters: tuple[tuple[str, str], ...]
    """Names and artifacts, in the order given."""
    prompts: tuple[Prompt, ...]


def parse_request(adapters: Sequence[str], prompts: Sequence[str]) -> RunRequest:
    """Parse `NAME=ARTIFACT` and `NAME:TEXT`. An empty name and `base` mean the base alone.

    >>> parse_request(["a=store/a"], ["a:Hi: you", ":Hi"]).prompts[0].text
    'Hi: you'

    Raises:
        ScuteError: SC703 for arguments of another form, repeated names or no prompt, SC802 for prompts that name an
            unknown adapter. All faults are reported together.
    """
    findings = Findings()
    named = _parse_adapters(adapters, findings)
    rows = tuple(_parse_prompt(word, named.keys(), findings) for word in prompts)
    if not rows:
        findings.error(
            Code.SC703,
            where="--prompt",
            found="no prompt",
            expected="at least one",
            next="write --prompt NAME:TEXT, or --prompt :TEXT for the base alone",
        )
    findings.raise_if_errors()
    return RunRequest(adapters=tuple(named.items()), prompts=rows)


def _parse_adapters(words: Sequence[str], findings: Findings) -> dict[str, str]:
    """Return artifacts by name."""
    named: dict[str, str] = {}
    for word in words:
        name, equals, artifact = word.partition("=")
        if not (name and equals and artifact) or name == BASE or ":" in name:
            findings.error(
                Code.SC703,
                where="--adapter",
                found=word,
                expected=f"NAME=ARTIFACT, with a name other than `{BASE}`",
                next="write --adapter NAME=FOLDER once per adapter",
            )
        elif name in named:
            findings.error(
                Code.SC703,
                where="--adapter",
                found=f"the name `{name}` twice",
                expected="one name per adapter",
                next="choose another name",
            )
        if name and equals:
            named.setdefault(name, artifact)
    return named


def _parse_prompt(word: str, names: Collection[str], findings: Findings) -> Prompt:
    name, colon, text = word.partition(":")
    if not (colon and text):
        findings.error(
            Code.SC703,
            where="--prompt",
            found=word or "an empty word",
            expected="NAME:TEXT, or :TEXT",
            next="write --prompt NAME:TEXT once per prompt",
        )
    elif not _is_text(text):
        findings.error(
            Code.SC703,
            where="--prompt",
            found=f"{text:.80}, with bytes that are not UTF-8",
            expected="text",
            next="write the prompt in UTF-8",
        )
    elif name not in ("", BASE) and name not in names:
        findings.error(
            Code.SC802,
            where=name,
            found="a prompt for an unknown adapter",
            expected="one of " + ", ".join(f"`{known}`" for known in (*names, BASE)),
            next=f"add --adapter {name}=ARTIFACT, correct the name, or begin with `:` for the base alone",
        )
    return Prompt(adapter=None if name in ("", BASE) else name, text=text)


def _is_text(text: str) -> bool:
    """Return whether a word of the command line was valid UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

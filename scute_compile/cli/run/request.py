"""What `scute run` is asked: adapters by name, and prompts that each name one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scute_compile.cli.outcomes import envelope
from scute_compile.diagnostics import Code, Findings

if TYPE_CHECKING:
    from rich.console import Console

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
        """What the row is called in the output."""
        return self.adapter or BASE


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """Adapters and prompts of one call."""

    adapters: tuple[tuple[str, str], ...]
    """Name and artifact, in the order given."""
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one prompt was continued with."""

    prompt: Prompt
    text: str
    tokens: tuple[int, ...]
    """Of the continuation, without the one that ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """The answers of one batch."""

    base: str
    answers: tuple[Answer, ...]

    def to_json(self) -> dict[str, object]:
        """Return the answers as plain JSON values."""
        rows = [
            {"adapter": one.prompt.adapter, "prompt": one.prompt.text, "text": one.text, "tokens": list(one.tokens)}
            for one in self.answers
        ]
        return envelope("run", base=self.base, rows=rows)

    def render(self, console: Console) -> None:
        """Print one block per prompt."""
        for one in self.answers:
            console.print(shown(one.prompt.name, one.text), markup=False, highlight=False, soft_wrap=True)


def shown(name: str, text: str) -> str:
    r"""Return an answer as `name> text`, control characters escaped and lines kept apart.

    >>> shown("dora", "one\ntwo\x1b[31m")
    'dora> one\n      two\\x1b[31m'
    """
    from scute_compile.diagnostics import printable

    lines = [printable(line) for line in text.split("\n")]
    return f"{printable(name)}> " + ("\n" + " " * (len(printable(name)) + 2)).join(lines)


def _is_text(text: str) -> bool:
    """Whether no byte of the command line stands in it undecoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_request(adapters: Sequence[str], prompts: Sequence[str]) -> RunRequest:
    """Read `NAME=ARTIFACT` and `NAME:TEXT`, where an empty name and `base` mean the base alone.

    >>> parse_request(["a=store/a"], ["a:Hi: you", ":Hi"]).prompts[0].text
    'Hi: you'

    Raises:
        ScuteError: SC703 for words of another form, doubled names or no prompt; SC802 for prompts that name an adapter
            that isn't given. All of them together.
    """
    findings = Findings()
    named: dict[str, str] = {}
    for word in adapters:
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
                expected="one name each",
                next="choose another name",
            )
        if name and equals:
            named.setdefault(name, artifact)
    rows = []
    for word in prompts:
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
                found=f"{text:.80}, which holds bytes that are no UTF-8",
                expected="text",
                next="write the prompt in UTF-8",
            )
        elif name not in ("", BASE) and name not in named:
            findings.error(
                Code.SC802,
                where=name,
                found="a prompt for an adapter that isn't given",
                expected="one of " + ", ".join(f"`{known}`" for known in (*named, BASE)),
                next=f"add --adapter {name}=ARTIFACT, correct the name, or begin with `:` for the base alone",
            )
        rows.append(Prompt(adapter=None if name in ("", BASE) else name, text=text))
    if not rows:
        findings.error(
            Code.SC703,
            where="--prompt",
            found="no prompt",
            expected="at least one",
            next="write --prompt NAME:TEXT, or --prompt :TEXT for the base alone",
        )
    findings.raise_if_errors()
    return RunRequest(adapters=tuple(named.items()), prompts=tuple(rows))

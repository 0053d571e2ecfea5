"""The report of `scute run`: the continuation of every prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from scute_compile.cli.run.request import Prompt, RunRequest
from scute_compile.diagnostics import Diagnostic, Findings, ScuteError
from scute_compile.driver.artifact_checks import other_base
from scute_compile.driver.bases import OpenBase, open_model
from scute_compile.driver.packages import needs
from scute_compile.driver.reports import envelope
from scute_compile.formats.artifact import Artifact, open_artifact


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The continuation of one prompt."""

    prompt: Prompt
    text: str
    tokens: tuple[int, ...]
    """Token ids of the continuation, without the end token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """The continuations of one batch."""

    base: str
    answers: tuple[Answer, ...]

    def to_json(self) -> dict[str, object]:
        """Return the continuations as plain JSON values."""
        rows = [
            {
                "adapter": answer.prompt.adapter,
                "prompt": answer.prompt.text,
                "text": answer.text,
                "tokens": list(answer.tokens),
            }
            for answer in self.answers
        ]
        return envelope("run", base=self.base, rows=rows)


def run_prompts(
    base: str, request: RunRequest, *, max_new_tokens: int, on_token: Callable[[Sequence[str]], None]
) -> RunReport:
    """Continue prompts on a base and its adapters, in one batch.

    Args:
        base: A folder or a Hub id.
        request: Adapters and prompts.
        max_new_tokens: The largest number of tokens per prompt.
        on_token: Called after each step with the text of every row so far.

    Raises:
        ScuteError: SC6xx for artifacts, of which all faults are collected, SC4xx for the base, SC701 without torch
            and transformers, and what `continue_prompts` raises.
    """
    artifacts = _open_artifacts(request.adapters)
    opened = open_model(base, weights=True)
    _check_bases(artifacts, opened)
    with needs("torch and transformers", command="run"):
        from scute_compile.runtime_min.model.continuation import ServedBase, continue_prompts
    if opened.checkpoint.path is None:
        raise AssertionError(base)
    continuations = continue_prompts(
        ServedBase(
            source=base, folder=opened.checkpoint.path, dtype=opened.structure.dtype, structure=opened.structure_hash()
        ),
        artifacts,
        [(prompt.adapter, prompt.text) for prompt in request.prompts],
        max_new_tokens=max_new_tokens,
        on_token=on_token,
    )
    answers = zip(request.prompts, continuations, strict=True)
    return RunReport(
        base=base, answers=tuple(Answer(prompt=prompt, text=text, tokens=tokens) for prompt, (text, tokens) in answers)
    )


def _open_artifacts(adapters: Sequence[tuple[str, str]]) -> dict[str, Artifact]:
    artifacts, findings = {}, Findings()
    for name, source in adapters:
        try:
            artifacts[name] = open_artifact(source)
        except ScuteError as error:
            findings.diagnostics.extend(_of_adapter(name, error.diagnostics))
    findings.raise_if_errors()
    return artifacts


def _check_bases(artifacts: Mapping[str, Artifact], base: OpenBase) -> None:
    findings = Findings()
    for name, artifact in artifacts.items():
        findings.diagnostics.extend(_of_adapter(name, other_base(artifact, base)))
    findings.raise_if_errors()


def _of_adapter(name: str, diagnostics: Sequence[Diagnostic]) -> list[Diagnostic]:
    """Return findings with the adapter's name in this call. Artifacts of several stores may have one name."""
    return [replace(finding, where=f"{name}: {finding.where}") for finding in diagnostics]

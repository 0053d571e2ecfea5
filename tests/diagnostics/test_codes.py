"""Codes own their titles and default next steps; findings are only appended."""

from __future__ import annotations

import pytest

from scute_compile.diagnostics import USAGE_CODES, Code, Diagnostic, Findings, ScuteError, fail


def test_a_diagnostic_without_a_next_step_has_the_codes() -> None:
    found = Diagnostic(code=Code.SC404, where="base", found="int8 codes", expected="floating-point weights")
    assert found.next == Code.SC404.next == "use --base to pass the model that this one was quantized from"
    assert "next" in str(found)


def test_a_stated_next_step_takes_precedence() -> None:
    with pytest.raises(ScuteError) as caught:
        fail(Code.SC404, where="base", found="int8 codes", expected="floating-point weights", next="use another base")
    assert caught.value.diagnostics[0].next == "use another base"


def test_a_code_without_a_default_leaves_the_next_step_empty() -> None:
    findings = Findings()
    findings.note(Code.SC313, where="lm_head.weight", found="identical to the base's")
    assert [found.next for found in findings] == [""]
    assert "next" not in str(findings.notes[0])


def test_equal_findings_are_recorded_once() -> None:
    findings = Findings()
    for _ in range(2):
        findings.error(Code.SC307, where="q_proj", found="8 in", expected="16 in")
    assert len(findings.errors) == 1
    with pytest.raises(ScuteError):
        findings.raise_if_errors()


def test_titles_are_unique_lower_case_phrases() -> None:
    assert len({code.title for code in Code}) == len(Code)
    for code in Code:
        assert not code.title.endswith(".")
        assert code.paragraph.endswith(".")
        assert not code.next.endswith(".")


def test_usage_codes_are_codes_of_the_command_line_and_the_base() -> None:
    assert {code.name[:3] for code in USAGE_CODES} == {"SC4", "SC7"}

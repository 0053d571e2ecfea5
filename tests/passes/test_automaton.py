"""Patterns match what Python's `re` matches, in bounded time and memory."""

from __future__ import annotations

import re
import tracemalloc
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scute_compile.diagnostics import ScuteError
from scute_compile.passes.parse.automaton import MOST_CACHED, MOST_STEPS, UnsupportedPatternError, compiled
from scute_compile.passes.parse.patterns import full_match, layer_number

ATOMS = (
    *("a", "b", ".", r"\.", "[ab]", "[^a]", r"\d", r"\w", r"\W", r"\D", r"[^\d]", "[a-z]", "_", "1", ""),
    *("(?i:A)", "(?i:[^b])", "^", "$", r"\b", r"\B", r"\Z", "(?=a)", "(?!b)", "(?<=a)", "(?<!b.)", "(?s:.)"),
)
PATTERNS = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        *(inner.map(form.format) for form in ("({})*", "(?:{})+?", "({}){{1,3}}", "(?={})", "(?!{})")),
    ),
    max_leaves=6,
)
EDGES = [
    *(("(?i:a(?-i:b))", "Ab"), ("(?i:a(?-i:b))", "AB"), (r"a$\n", "a\n"), (r"a$b?\n", "ab\n"), (r"a\Z\n?", "a\n")),
    *(("(?i)[A-Z]", "\N{LATIN SMALL LETTER SHARP S}"), ("(?i)[A-Z]", "\N{LATIN CAPITAL LETTER I WITH DOT ABOVE}")),
    *((r"(?i)(?a:\w)", "\N{LATIN SMALL LETTER LONG S}"), ("(?i)s", "\N{LATIN SMALL LETTER LONG S}")),
    *(("(?i)k", "\N{KELVIN SIGN}"), ("(?ia)k", "\N{KELVIN SIGN}"), ("(?i)[^k]", "\N{KELVIN SIGN}"), ("(?i)[^k]", "K")),
]
"""Patterns and texts, of which random ones are few."""
PATHS = [f"model.layers.{layer}.self_attn.{name}" for layer, name in product(range(14), ("q_proj", "k_proj"))]


@settings(max_examples=500, deadline=None)
@given(PATTERNS, st.lists(st.text("ab.1_A-\n", max_size=5), min_size=1, max_size=5))
def test_a_pattern_matches_what_re_matches(pattern: str, texts: list[str]) -> None:
    try:
        wanted = re.compile(pattern)
        automaton = compiled(pattern)
    except (re.error, UnsupportedPatternError):
        return
    for text in texts:
        assert automaton.fullmatch(text) is (wanted.fullmatch(text) is not None), text


@pytest.mark.parametrize(("pattern", "text"), EDGES)
def test_edge_cases_match_what_re_matches(pattern: str, text: str) -> None:
    assert compiled(pattern).fullmatch(text) is (re.fullmatch(pattern, text) is not None)


@pytest.mark.parametrize(
    "pattern",
    [
        r".*\.(q_proj|k_proj|v_proj)",
        r"^(model(?=\.).*\.(q_proj|o_proj))$",
        r"^(?!.*vision).*(?:self_attn|mlp)\.(?:q|k)_proj$",
        r".*layers\.(1[0-3]|[0-9])\..*q_proj",
        r"(?:.*?(?:language|text|model).*?(?:self_attn|attention).*?(?:q_proj|k_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\.)",
        "(?:k_proj){e<=1}",
    ],
)
def test_patterns_that_programs_write_match_what_re_matches(pattern: str) -> None:
    assert [full_match(pattern, path, where="x") for path in PATHS] == [
        re.fullmatch(pattern, path) is not None for path in PATHS
    ]


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(?:" * 20 + "a" + "{1000})" * 20, "states"),
        (".*_proj|" + r"\(a*" * 400, "nests"),
        ("(" + "*" * 20000, "characters"),
        ("(" * 5000 + ")" * 5000, "nests"),
        ("([a-z0-9_.]+)*!", "exponential"),
        (r"(?:a|(?=b\w*)c)+?", "exponential"),
        (r"\)" * 100 + "(" * 100 + ")" * 100, "nests"),
        (r"(a)\1", "groupref"),
        ("(?>a)b", "atomic_group"),
        ("a++", "possessive_repeat"),
        ("(?<=a.*)b", "look-behind"),
        (r"(?<=\ba)b", "look-behind"),
        ("a{99999999999}", "repetition"),
        ("((a{,300}){,300}){,300}", "states"),
    ],
)
def test_patterns_without_a_bounded_automaton_are_refused(pattern: str, reason: str) -> None:
    tracemalloc.start()
    with pytest.raises(ScuteError, match=r"SC20[59]") as refused:
        full_match(pattern, PATHS[0], where="target_modules")
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()
    assert reason in str(refused.value)


def test_work_on_one_name_is_bounded() -> None:
    with pytest.raises(ScuteError, match=f"{MOST_STEPS} steps"):
        full_match("(a|aa){40}.*(?!" + ".*" * 50 + "b)", "a" * 20000, where="target_modules")


def test_remembered_steps_are_bounded() -> None:
    pattern = compiled("(?:.|$)*")
    assert pattern.fullmatch("".join(map(chr, range(0x4E00, 0x4E00 + 2 * MOST_CACHED))))
    assert 0 < len(pattern._steps) <= MOST_CACHED
    assert 0 < len(pattern._closures) <= MOST_CACHED


@pytest.mark.parametrize("pattern", ["[^.]*", "layers", "(?:h|layers)", "lay[^.]*", "blocks"])
@pytest.mark.parametrize("path", [*PATHS[:2], "a.layers.b.layers.12.c", "layers.3.q", "x.layers.3", "a.h.07.q"])
def test_layer_numbers_are_those_of_peft(pattern: str, path: str) -> None:
    found = re.match(rf".*?\.{pattern}\.(\d+)\.", path)
    assert layer_number(path, (pattern,)) == (int(found.group(1)) if found else None)


@pytest.mark.parametrize(
    ("pattern", "reason"), [("(layers)", "group"), ("h|layers", "alternatives"), (".*", "several layer numbers")]
)
def test_layers_patterns_that_change_what_peft_captures_are_refused(pattern: str, reason: str) -> None:
    with pytest.raises(ScuteError, match="SC209") as refused:
        layer_number("a.layers.1.layers.2.q", (pattern,))
    assert reason in str(refused.value)

"""Every case has its expected outcome in `compile` and `check`."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.adapters import write_config
from tests.support.artifact_files import rank_file
from tests.support.bases import made_once
from tests.support.cases import Case, Oracle, Outcome, base_tensor
from tests.support.commands import Ran, compiled, scute, scute_process, verified
from tests.support.damage import TRAP, WEIGHTS, Saved
from tests.support.more_cases import CASES

BY_NAME = {case.name: case for case in CASES}
HEAD = "base_model.model.lm_head.base_layer.weight"
FLOAT32 = 5e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A case on disk."""

    base: Path
    trained_on: Path
    unchanged: Path
    adapter: Path


@pytest.fixture(scope="session")
def made(shared_folder: Path, base_folder: Callable[[str], Path]) -> Callable[[Case], Made]:
    """Return a case's folders, written once."""

    def make(case: Case) -> Made:
        trained_on = case.trained_on or case.base
        folder = shared_folder / "cases" / re.sub(r"\W+", "-", case.name)
        base, other = base_folder(case.base), base_folder(trained_on)

        def write(target: Path) -> None:
            target.mkdir()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                write_config(case.config(), trained_on, other, target / "unchanged", seed=len(case.name))
            saved = Saved.read(target / "unchanged")
            if case.edit is not None:
                case.edit(saved)
            if HEAD in saved.tensors and saved.tensors[HEAD].numel() == 0:
                saved.tensors[HEAD] = base_tensor(base, "lm_head.weight")
            saved.write(target / "adapter")
            if case.spoil is not None:
                case.spoil(target / "adapter")

        made_once(folder, write)
        return Made(base=base, trained_on=other, unchanged=folder / "unchanged", adapter=folder / "adapter")

    return make


def findings_text(adapter: dict[str, Any]) -> str:
    """Return the text of all findings, in lower case."""
    fields = ("code", "title", "where", "found", "expected", "next")
    return "\n".join(" ".join(str(finding[name]) for name in fields) for finding in adapter["findings"]).lower()


def assert_words(case: Case, adapter: dict[str, Any]) -> None:
    """Check that the findings contain the words of the case."""
    text = findings_text(adapter)
    for word in case.words:
        spellings = (word,) if isinstance(word, str) else word
        assert any(spelling.lower() in text for spelling in spellings), f"none of {spellings} in:\n{text}"
    named = set(re.findall(r"layers\.\d+\.[a-z_]+\.[a-z_]+", text))
    assert len(named) >= case.sites_named, text


def by_layer(artifact: Path, rank: int = 0) -> dict[str, torch.Tensor]:
    """Return a rank's tensors, by their names from `layers.` on."""
    tensors = load_file(rank_file(artifact, rank))
    return {key[key.index("layers.") :]: value for key, value in tensors.items()}


def assert_matches_oracle(case: Case, where: Made, artifact: Path, store: Path, tp: int) -> None:
    """Check the artifact against the oracle of the case."""
    if case.oracle is Oracle.PEFT:
        figures = verified(artifact, where.adapter, where.base)
        assert figures["comparable"]
        assert figures["mean_abs_adapter_effect"] >= 0.1
        assert figures["relative_error"] <= FLOAT32
    elif case.oracle is Oracle.UNCHANGED:
        before = compiled(where.unchanged, where.trained_on, store / "before", "--tp", tp)
        for rank in range(tp):
            tensors, expected = by_layer(artifact, rank), by_layer(before, rank)
            assert tensors.keys() == expected.keys()
            assert all(torch.equal(tensors[key], expected[key]) for key in tensors)
        assert verified(artifact, where.adapter, where.base)["relative_error"] <= FLOAT32


def assert_nothing_left(store: Path) -> None:
    """Check that no output folder is left, complete or partial, and that the pickle was not run."""
    assert not store.exists(), sorted(store.rglob("*"))
    assert not Path(TRAP).exists()


def assert_outcome(case: Case, ran: Ran) -> None:
    """Check outcome, exit status and findings against the case."""
    assert ran.adapter["outcome"] == case.outcome.value, findings_text(ran.adapter)
    assert ran.code == (1 if case.outcome is Outcome.REFUSED else 0)
    severities = {finding["severity"] for finding in ran.adapter["findings"]}
    assert ("error" in severities) == (case.outcome is Outcome.REFUSED)
    assert ("note" in severities) or case.outcome is not Outcome.NOTED
    assert_words(case, ran.adapter)


@pytest.mark.parametrize("name", BY_NAME)
def test_a_case_has_its_outcome(
    name: str, made: Callable[[Case], Made], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = BY_NAME[name]
    where = made(case)
    monkeypatch.chdir(tmp_path)
    for tp in case.tp:
        asked = ("--base", where.base, "--tp", tp, "--json")
        assert_outcome(case, scute("check", where.adapter, *asked))
        store = tmp_path / f"store-{tp}"
        ran = scute("compile", where.adapter, *asked, "-o", store)
        assert_outcome(case, ran)
        if case.outcome is Outcome.REFUSED:
            assert_nothing_left(store)
        else:
            assert_matches_oracle(case, where, Path(ran.adapter["artifact"]), store, tp)


@pytest.mark.parametrize(
    "name",
    [
        "terminal escapes in a key",
        "only a pickle",
        "a header of an exabyte",
        "targets that backtrack without end",
        "the prefix appears twice",
    ],
)
def test_a_case_in_a_separate_process(name: str, made: Callable[[Case], Made], tmp_path: Path) -> None:
    case = BY_NAME[name]
    where = made(case)
    ran = scute_process("compile", where.adapter, "--base", where.base, "-o", tmp_path / "store", cwd=tmp_path)
    assert ran.code == (1 if case.outcome is Outcome.REFUSED else 0)
    assert "\x1b" not in ran.out + ran.err
    assert not (tmp_path / TRAP).exists()
    if case.outcome is Outcome.REFUSED:
        assert re.search(r"SC\d{3}", ran.err)
        assert not (tmp_path / "store").exists()


def test_a_truncated_file_is_described_by_its_actual_and_its_expected_size(made: Callable[[Case], Made]) -> None:
    where = made(BY_NAME["a file that lost its end"])
    text = findings_text(scute("check", where.adapter, "--base", where.base, "--json").adapter).replace(",", "")
    size = (where.adapter / WEIGHTS).stat().st_size
    assert str(size) in text
    assert str(size + 1024) in text


def test_rotations_without_a_version_use_the_series_of_peft_0_17(made: Callable[[Case], Made], tmp_path: Path) -> None:
    """PEFT 0.16 and 0.17 gave every power of Q the coefficient 2; since 0.18 the last one has 1."""
    where = made(BY_NAME["OFT without a version"])
    artifact = compiled(where.adapter, where.base, tmp_path / "store")
    tensors = load_file(rank_file(artifact))
    upper = torch.triu_indices(8, 8, 1)
    for key, vectors in load_file(where.adapter / WEIGHTS).items():
        q = torch.zeros(vectors.shape[0], 8, 8, dtype=torch.float64)
        q[:, upper[0], upper[1]] = vectors.double()
        q = q - q.transpose(1, 2)
        powers = (q, q @ q, q @ q @ q, q @ q @ q @ q)
        expected = 2 * sum(powers, torch.zeros_like(q))
        site = key.removeprefix("base_model.model.").removesuffix(".oft_R.weight")
        torch.testing.assert_close(tensors[f"{site}.dR"].double(), expected, atol=2e-6, rtol=2e-6)


def test_an_untrained_adapter_changes_nothing(made: Callable[[Case], Made], tmp_path: Path) -> None:
    where = made(BY_NAME["an adapter that was never trained"])
    artifact = compiled(where.adapter, where.base, tmp_path / "store")
    assert verified(artifact, where.adapter, where.base)["max_abs_logprob_error"] == 0.0

"""Files that change after an artifact was opened: their tensors are refused."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from scute_compile.diagnostics import ScuteError
from scute_compile.formats.artifact import Artifact, open_artifact
from scute_compile.runtime_min.oracle.site_tensors import load_sites
from tests.support.artifact_files import tampered
from tests.support.served import Pair, artifact_of, ids_of, logits_of, served

Spoil = Callable[[Path], None]


def _flipped(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[-3] ^= 1  # a low bit of a value, which only the hash shows
    file.write_bytes(raw)


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 100)


def _lengthened(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"..")


def _another(file: Path) -> None:
    save_file({"factor": torch.zeros(3, 3)}, file)


SPOILT: dict[str, Spoil] = {
    "a flipped bit": _flipped,
    "cut short": _cut,
    "lengthened": _lengthened,
    "gone": Path.unlink,
    "other tensors": _another,
}


def _copy(recipe: str, pair: Pair, shared: Path, tmp_path: Path) -> tuple[Path, Artifact]:
    made = artifact_of(recipe, "llama", pair, shared)
    store = tmp_path / f"store-{recipe}"
    shutil.copytree(made.artifact.parent, store)
    return made.base, open_artifact(store / made.artifact.name)


def _refused(act: Callable[[], object], code: str) -> None:
    with pytest.raises(ScuteError) as refused:
        act()
    assert refused.value.diagnostics[0].code.name == code


@pytest.mark.parametrize("what", SPOILT)
def test_a_rank_file_that_changes_after_it_was_opened_is_refused(
    what: str, pair: Pair, shared_folder: Path, tmp_path: Path
) -> None:
    base, artifact = _copy("lora", pair, shared_folder, tmp_path)
    model = served("llama", base)
    model.load_adapter(artifact, adapter_name="whole")
    ids = ids_of(2, 6)
    before = logits_of(model, ids, ["whole", None])
    SPOILT[what](artifact.rank_path(0))
    _refused(lambda: model.load_adapter(artifact, adapter_name="spoilt"), "SC603")
    _refused(lambda: model.replace_adapter(artifact, adapter_name="whole"), "SC603")
    _refused(lambda: load_sites(artifact, {}, torch.device("cpu")), "SC603")
    assert model.adapters == ("whole",)
    model.pool.evict("whole")  # it comes back from host memory: no file is read again
    assert torch.equal(logits_of(model, ids, ["whole", None]), before)


@pytest.mark.parametrize("what", SPOILT)
def test_a_shared_factor_that_changes_after_it_was_opened_is_refused_and_not_cached(
    what: str, pair: Pair, shared_folder: Path, tmp_path: Path
) -> None:
    base, artifact = _copy("vera", pair, shared_folder, tmp_path)
    model = served("llama", base)
    file = artifact.factor_path(artifact.manifest.factors[0].hash)
    whole = file.read_bytes()
    SPOILT[what](file)
    _refused(lambda: model.load_adapter(artifact, adapter_name="spoilt"), "SC606")
    file.write_bytes(whole)
    model.load_adapter(artifact, adapter_name="whole")
    fresh = served("llama", base)
    fresh.load_adapter(artifact, adapter_name="whole")
    ids = ids_of(1, 6)
    assert torch.equal(logits_of(model, ids, ["whole"]), logits_of(fresh, ids, ["whole"]))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("slot", [".A", ".B"])
def test_values_that_are_not_finite_are_refused_with_right_hashes(
    slot: str, value: float, pair: Pair, shared_folder: Path, tmp_path: Path
) -> None:
    base, artifact = _copy("lora", pair, shared_folder, tmp_path)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        key = next(key for key in tensors if key.endswith(slot))
        tensors[key] = tensors[key].clone()
        tensors[key].view(-1)[-1] = value

    model = served("llama", base)
    model.load_adapter(artifact, adapter_name="whole")
    before = logits_of(model, ids_of(2, 6), ["whole", None])
    bad = tampered(artifact.path, "bad", spoil)
    _refused(lambda: model.load_adapter(bad, adapter_name="bad"), "SC309")
    assert torch.equal(logits_of(model, ids_of(2, 6), ["whole", None]), before)

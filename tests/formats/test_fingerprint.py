"""The fingerprints of a base: which differences change them and which don't."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from scute_compile.formats.base_checkpoint import open_base
from scute_compile.formats.fingerprint import content_hash, structure_hash
from scute_compile.formats.safetensors import TensorEntry
from scute_compile.formats.samples import sample_spans

Arrays = dict[str, npt.NDArray[np.generic]]
TENSORS: Arrays = {
    "a": np.arange(5000, dtype=np.float32),
    "b": np.ones((3, 2), np.float16),
    "c": np.zeros(0, np.float32),
}


def write(folder: Path, *files: Arrays) -> str | None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for i, tensors in enumerate(files, 1):
        save_file(tensors, folder / f"model-{i:05d}-of-{len(files):05d}.safetensors")
    return content_hash(open_base(str(folder), weights=True))


def test_the_content_does_not_depend_on_how_files_are_split(tmp_path: Path) -> None:
    whole = write(tmp_path / "one", TENSORS)
    split = write(tmp_path / "split", {"c": TENSORS["c"], "a": TENSORS["a"]}, {"b": TENSORS["b"]})
    assert whole is not None
    assert whole == split


@pytest.mark.parametrize("place", [0, 2500, 4999])
def test_a_change_at_a_sampled_place_changes_the_content(tmp_path: Path, place: int) -> None:
    changed = np.arange(5000, dtype=np.float32)
    changed[place] += 1
    assert write(tmp_path / "one", TENSORS) != write(tmp_path / "two", TENSORS | {"a": changed})


def test_name_dtype_and_shape_are_part_of_the_content(tmp_path: Path) -> None:
    variants: list[Arrays] = [
        TENSORS,
        {"renamed": TENSORS["a"], "b": TENSORS["b"], "c": TENSORS["c"]},
        TENSORS | {"b": TENSORS["b"].reshape(2, 3)},
        TENSORS | {"b": TENSORS["b"].view(np.int16)},
        TENSORS | {"c": np.zeros((0, 2), np.float32)},
    ]
    hashes = {write(tmp_path / str(i), variant) for i, variant in enumerate(variants)}
    assert len(hashes) == len(variants)


def test_a_base_without_weights_has_no_content(tmp_path: Path) -> None:
    assert write(tmp_path / "one") is None


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097, 8192, 10_000, 1 << 30])
def test_samples_lie_inside_the_tensor_and_touch_both_ends(nbytes: int) -> None:
    spans = sample_spans(TensorEntry(dtype="U8", shape=(nbytes,), begin=100, end=100 + nbytes))
    assert spans[0][0] == 0
    assert spans[-1][0] + spans[-1][1] == nbytes
    assert all(length == min(nbytes, 4096) for _, length in spans)
    assert len(spans) == (1 if nbytes <= 4096 else 2 if nbytes == 4097 else 3)


def test_the_structure_ignores_order_and_dtype_but_not_shapes() -> None:
    tensors = {"a": ("F32", (2, 3)), "b": ("F32", (4,))}
    plain = structure_hash("llama", {"heads": 4, "rope": {"theta": 1.0}}, tensors)
    again = structure_hash(
        "llama",
        MappingProxyType({"rope": MappingProxyType({"theta": 1.0}), "heads": 4}),
        {"b": ("BF16", (4,)), "a": ("BF16", (2, 3))},
    )
    assert plain == again
    others = {
        structure_hash("mistral", {"heads": 4, "rope": {"theta": 1.0}}, tensors),
        structure_hash("llama", {"heads": 8, "rope": {"theta": 1.0}}, tensors),
        structure_hash("llama", {"heads": 4, "rope": {"theta": 1.0}}, tensors | {"b": ("F32", (5,))}),
        structure_hash("llama", {"heads": 4, "rope": {"theta": 1.0}}, {"a": ("F32", (2, 3))}),
    }
    assert len(others | {plain}) == 5

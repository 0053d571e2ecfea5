"""Reading safetensors files: values against the library's, and damaged files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from scute_compile.diagnostics import Code, ScuteError
from scute_compile.formats.safetensors import (
    TensorEntry,
    decode,
    parse_header,
    read_blocks,
    read_header,
    read_tensor,
)

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


def code_of(call: Callable[[], object]) -> tuple[Code, str]:
    with pytest.raises(ScuteError) as caught:
        call()
    return caught.value.diagnostics[0].code, str(caught.value)


def with_header(folder: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(shape: object, begin: object, end: object, dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_served_dtype_is_decoded_to_the_same_numbers_as_torch(tmp_path: Path, dtype: str) -> None:
    # Every 16-bit pattern: subnormals, infinities and NaN included.
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = patterns.view(DTYPES[dtype]) if dtype in {"BF16", "F16"} else torch.randn(1 << 16, dtype=DTYPES[dtype])
    save_file({"x": x.reshape(256, 256), "other": torch.ones(3)}, tmp_path / "x.safetensors")
    entries = read_header(tmp_path / "x.safetensors")
    got = read_tensor(tmp_path / "x.safetensors", entries["x"])
    wide = np.float64 if dtype == "F64" else np.float32
    assert got.dtype == wide
    assert got.shape == (256, 256)
    np.testing.assert_array_equal(got, x.reshape(256, 256).to(torch.from_numpy(got).dtype).numpy())
    blocks = list(read_blocks(tmp_path / "x.safetensors", entries["x"], block_bytes=1004))
    assert len(blocks) == -(-entries["x"].nbytes // 1000)
    np.testing.assert_array_equal(np.concatenate(blocks), got.reshape(-1))


def test_a_tensor_behind_another_is_read_from_its_place(tmp_path: Path) -> None:
    x = torch.arange(60, dtype=torch.float32).reshape(10, 6)
    save_file({"a": torch.ones(5, dtype=torch.bfloat16), "x": x}, tmp_path / "x.safetensors")
    path, stored = tmp_path / "x.safetensors", read_header(tmp_path / "x.safetensors")["x"]
    np.testing.assert_array_equal(read_tensor(path, stored), x.numpy())


def test_scalars_and_empty_tensors_keep_their_shapes(tmp_path: Path) -> None:
    save_file({"s": torch.tensor(2.5), "e": torch.ones(0, 4)}, tmp_path / "x.safetensors")
    entries = read_header(tmp_path / "x.safetensors")
    assert read_tensor(tmp_path / "x.safetensors", entries["s"]).shape == ()
    assert read_tensor(tmp_path / "x.safetensors", entries["e"]).shape == (0, 4)


def test_integers_are_listed_but_not_decoded(tmp_path: Path) -> None:
    save_file({"i": torch.arange(4)}, tmp_path / "x.safetensors")
    stored = read_header(tmp_path / "x.safetensors")["i"]
    assert stored.dtype == "I64"
    code, text = code_of(lambda: read_tensor(tmp_path / "x.safetensors", stored))
    assert code is Code.SC110
    assert "I64" in text
    assert code_of(lambda: decode(b"\0", "F8_E4M3"))[0] is Code.SC110


DAMAGED = {
    "hole at the start": {"a": entry([1], 4, 8)},
    "hole between": {"a": entry([1], 0, 4), "b": entry([1], 8, 12)},
    "overlap": {"a": entry([2], 0, 8), "b": entry([1], 4, 8)},
    "the same bytes twice": {"a": entry([1], 0, 4), "b": entry([1], 0, 4)},
    "shape and bytes differ": {"a": entry([3], 0, 8)},
    "negative dimension": {"a": entry([-1], 0, 4)},
    "negative offset": {"a": entry([1], -4, 0)},
    "end before begin": {"a": entry([1], 4, 0)},
    "fraction": {"a": entry([1.0], 0, 4)},
    "true as a number": {"a": entry([True], 0, 4)},
    "overflowing shape": {"a": entry([2**40, 2**40], 0, 4)},
    "zero times overflow": {"a": entry([2**62, 2**62, 0], 0, 0)},
    "unknown dtype": {"a": entry([1], 0, 4, "F31")},
    "dtype no text": {"a": entry([1], 0, 4, 7)},
    "entry no object": {"a": 3},
    "a field too many": {"a": entry([1], 0, 4) | {"stride": [1]}},
    "a field too few": {"a": {"dtype": "F32", "shape": [1]}},
    "metadata no text": {"__metadata__": {"a": 1}},
    "metadata no object": {"__metadata__": []},
    "an array": [1],
    "not JSON": b"{nope}",
    "not UTF-8": b'{"\xff": 1}',
    "duplicate keys": b'{"a":%s,"a":%s}' % ((json.dumps(entry([0], 0, 0)).encode(),) * 2),
    "NaN": b'{"a": NaN}',
    "deep nesting": b'{"a":' + b"[" * 100_000,
    "deep nesting, whole": b'{"a":' + b"[" * 900 + b'"\\ud800"' + b"]" * 900 + b"}",
    "huge number": b'{"a": ' + b"9" * 5000 + b"}",
    "lone surrogate": b'{"\\ud800":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}',
    "leading space": b" {}",
    "empty": b"",
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_header_is_refused(tmp_path: Path, case: str) -> None:
    path = with_header(tmp_path, DAMAGED[case], b"\0" * 12)
    assert code_of(lambda: read_header(path))[0] is Code.SC105


def test_bytes_after_the_last_tensor_are_refused(tmp_path: Path) -> None:
    path = with_header(tmp_path, {"a": entry([1], 0, 4)}, b"\0" * 5)
    assert code_of(lambda: read_header(path))[0] is Code.SC105


def test_a_truncated_file_says_how_many_bytes_it_should_have(tmp_path: Path) -> None:
    path = with_header(tmp_path, {"a": entry([100], 0, 400)}, b"\0" * 399)
    code, text = code_of(lambda: read_header(path))
    size = path.stat().st_size
    assert code is Code.SC104
    assert f"{size} bytes" in text
    assert f"{size + 1} bytes" in text


@pytest.mark.parametrize("size", range(9))
def test_eight_bytes_or_fewer_are_a_truncated_file(tmp_path: Path, size: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\x08" * size)
    assert code_of(lambda: read_header(path))[0] is Code.SC104


def test_a_git_lfs_pointer_is_reported_as_one(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    code, text = code_of(lambda: read_header(path))
    assert code is Code.SC103
    assert "git lfs pull" in text


@pytest.mark.parametrize("length", [2**60, 2**64 - 1, 10**8 + 1, 100])
def test_a_header_longer_than_the_file_is_refused_without_reading(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b'{"a"')
    code, text = code_of(lambda: read_header(path))
    assert code is Code.SC105
    assert str(length) in text


def test_a_sparse_file_with_a_header_over_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes((10**8 + 1).to_bytes(8, "little"))
    os.truncate(path, 2 * 10**8)
    assert code_of(lambda: read_header(path))[0] is Code.SC105


def test_pipes_folders_and_absent_files_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "absent"):
        assert code_of(lambda path=path: read_header(path))[0] is Code.SC109  # type: ignore[misc] # mypy infers no lambda with a default


def test_a_file_that_shrinks_after_the_header_was_read_is_truncated(tmp_path: Path) -> None:
    save_file({"x": torch.ones(100)}, tmp_path / "x.safetensors")
    stored = read_header(tmp_path / "x.safetensors")["x"]
    os.truncate(tmp_path / "x.safetensors", stored.end - 1)
    assert code_of(lambda: read_tensor(tmp_path / "x.safetensors", stored))[0] is Code.SC104


VALID = json.dumps(
    {"__metadata__": {"format": "pt"}, "a": entry([2], 0, 8), "b": entry([2, 1], 8, 12, "BF16")}
).encode()


@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_raise_anything_but_a_diagnostic(raw: bytes) -> None:
    assert_only_diagnostics(raw, len(raw) + 8)


@settings(max_examples=400)
@given(st.data())
def test_mutated_headers_never_raise_anything_but_a_diagnostic(data: st.DataObject) -> None:
    raw = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(
            st.sampled_from([b"", b"9", b"-", b'"', b"[", b"{", b"e9", b"null", b"1e999", b"\\ud800", b"\0", b"\xff"])
        )
        raw = raw or bytearray(b"{")
    assert_only_diagnostics(bytes(raw), len(raw) + 20)


def assert_only_diagnostics(raw: bytes, size: int) -> None:
    found, entries = set[Code](), dict[str, TensorEntry]()
    try:
        entries.update(parse_header(raw, size, "x"))
    except ScuteError as error:
        found = {d.code for d in error.diagnostics}
    assert found <= {Code.SC104, Code.SC105}
    assert all(0 <= e.begin <= e.end <= size for e in entries.values())

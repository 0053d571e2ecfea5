"""Folders, files and formatting keep the agreed sizes and form."""

from __future__ import annotations

from collections import Counter

from tests.test_architecture import modules


def test_a_folder_holds_at_most_16_files() -> None:
    counts = Counter(str(file.parent) for file in modules().values())
    assert {folder: count for folder, count in counts.items() if count > 16} == {}


def test_a_file_has_at_most_450_lines() -> None:
    assert [name for name, file in modules().items() if file.read_text().count("\n") > 450] == []


def test_the_formatter_is_switched_off_in_kernels_alone() -> None:
    files = {name: file for name, file in modules().items() if ".kernels." not in name}
    assert [name for name, file in files.items() if "fmt: skip" in file.read_text()] == []

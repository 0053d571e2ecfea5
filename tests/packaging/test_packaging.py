"""Each room at the root is installed as a package of `scute_compile`, and no folder with code is left out."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import scute_compile

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("passes", "pack", "formats", "runtime_min", "runtime_vllm")
NOT_SHIPPED = {"tests", "benchmarks", "examples", "docs", "build", "dist", "site"}


def _settings() -> dict[str, dict[str, str]]:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    settings: dict[str, dict[str, str]] = tools["setuptools"]
    return settings


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project


def _name(requirement: str) -> str:
    return re.split(r"[<>=\[; ]", requirement)[0]


def _folders_with_code() -> set[str]:
    """Return the folders that hold an `__init__.py`, relative to the root and without links."""
    found = set()
    for file in ROOT.rglob("__init__.py"):
        folder = file.parent.relative_to(ROOT)
        hidden = any(part.startswith(".") for part in folder.parts)
        through_link = folder.parts[0] == "scute_compile" and len(folder.parts) > 1 and folder.parts[1] in ROOMS
        if not (hidden or through_link or folder.parts[0] in NOT_SHIPPED):
            found.add(folder.as_posix())
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_and_its_link_are_one_folder(room: str) -> None:
    link = ROOT / "scute_compile" / room
    if not link.is_symlink():
        pytest.skip("a checkout without links: tests and wheel work there, static tools don't")
    assert link.resolve() == ROOT / room
    assert not Path(link.readlink()).is_absolute()


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_refuses_to_be_imported_by_its_bare_name(room: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {room}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "ImportError" in done.stderr
    assert f"scute_compile.{room}" in done.stderr


def test_every_folder_with_code_is_a_package_that_is_installed() -> None:
    places = _settings()["package-dir"]
    assert set(_settings()["packages"]) == set(places)
    assert {Path(place).as_posix() for place in places.values()} == _folders_with_code()


def test_packages_are_named_after_their_places() -> None:
    for package, place in _settings()["package-dir"].items():
        inside = place if place.startswith("scute_compile") else f"scute_compile/{place}"
        assert package == inside.replace("/", ".")


def test_the_package_and_the_project_have_one_version() -> None:
    assert scute_compile.__version__ == _project()["version"]


def test_the_default_install_declares_nothing_heavy() -> None:
    declared = {_name(line) for line in _project()["dependencies"]}
    assert declared & {"torch", "transformers", "peft", "triton"} == set()


def test_tests_install_all_that_commands_and_serving_need() -> None:
    extras = _project()["optional-dependencies"]
    assert "scute-compile[compile,runtime]" in extras["test"]
    assert {"peft", "torch", "transformers"} == {_name(line) for line in extras["compile"]}
    assert {"torch", "transformers", "triton"} == {_name(line) for line in extras["runtime"]}


def test_importing_the_package_imports_nothing_heavy() -> None:
    program = (
        "import sys, scute_compile; heavy = {'torch', 'transformers', 'peft', 'numpy', 'rich'} & set(sys.modules);"
        "raise SystemExit(', '.join(heavy) or 0)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0

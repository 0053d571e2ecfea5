"""Fixtures of the runtime's tests. Everything is imported inside the fixtures, as in `tests/conftest.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.served import Make


@pytest.fixture
def make(pair: Callable[[str, str], tuple[Path, Path]], shared_folder: Path) -> Make:
    """Return a function that returns a compiled adapter, by recipe and base."""
    from tests.support.served import artifact_of

    return lambda recipe, base: artifact_of(recipe, base, pair, shared_folder)

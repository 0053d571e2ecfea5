"""The public names of the runtime, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import scute_compile.runtime_min as runtime

PUBLIC = {
    "ContinuousBatch": "scute_compile.runtime_min.batching.continuous_batch",
    "Policy": "scute_compile.runtime_min.batching.policy",
    "Request": "scute_compile.runtime_min.batching.requests",
    "ServedModel": "scute_compile.runtime_min.model.served_model",
}


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"import sys; sys.path[:0] = {[str(entry) for entry in sys.path]!r}; "
    return subprocess.run(
        [sys.executable, "-c", path + program], cwd=folder, capture_output=True, text=True, check=False
    )


def test_the_public_names_are_the_classes() -> None:
    assert runtime.__all__ == sorted(PUBLIC)
    assert set(PUBLIC) <= set(dir(runtime))
    for name, module in PUBLIC.items():
        assert getattr(runtime, name).__module__ == module
    with pytest.raises(AttributeError, match="no attribute 'AdaptedModel'"):
        _ = runtime.AdaptedModel


def test_importing_the_runtime_imports_no_torch_until_a_name_is_used(tmp_path: Path) -> None:
    program = (
        "import scute_compile.runtime_min as runtime; print('torch' in sys.modules, 'transformers' in sys.modules); "
        "runtime.ServedModel; print('torch' in sys.modules)"
    )
    assert run(program, tmp_path).stdout.split() == ["False", "False", "True"]


def test_the_room_is_not_imported_by_its_bare_name() -> None:
    done = run("import runtime_min", Path(__file__).parents[3])
    assert done.returncode == 1
    assert "import this room as `scute_compile.runtime_min`, not as `runtime_min`" in done.stderr

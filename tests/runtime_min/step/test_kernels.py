"""The kernels, under Triton's interpreter, against the reference that is their meaning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("checks", ["kernel_checks", "exchange_checks"])
def test_kernels_compute_the_reference_in_the_interpreter(checks: str) -> None:
    pytest.importorskip("triton", reason="an extra that is there on Linux alone")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", HERE / f"{checks}.py", "-p", "no:cacheprovider", "-p", "no:xdist"],
        env={**clean, "TRITON_INTERPRET": "1"},
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout
    assert " passed" in done.stdout

"""Workers that vLLM spawns find the plugin by its entry point; the other tests fork theirs from one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from tests.runtime_vllm.adapters_by_method import Tenants
from tests.runtime_vllm.engine import OPTIONS, SEVERAL_PROCESSES, _answers
from tests.runtime_vllm.engine_forks import SETTINGS

NAMES = ("dora", None, "oft", "vera")


def test_two_spawned_workers_serve_compiled_adapters(llama: Tenants, tmp_path: Path) -> None:
    rows = [llama.row(name, seed, tp=2) for seed, name in enumerate(NAMES)]
    options = {**OPTIONS, "model": str(llama.base), "tensor_parallel_size": 2}
    request, answer = tmp_path / "request.json", tmp_path / "answer.json"
    request.write_text(json.dumps({"options": options, "rows": [asdict(row) for row in rows], "tokens": 8}))
    environment = {**os.environ, **SETTINGS, **SEVERAL_PROCESSES, "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    program = Path(__file__).with_name("spawned_engine.py")
    done = subprocess.run(
        [sys.executable, program, request, answer], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    for name, received in zip(NAMES, _answers(rows, json.loads(answer.read_text())), strict=True):
        llama.assert_equal(received, name)

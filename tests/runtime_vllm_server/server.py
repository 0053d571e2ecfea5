"""vLLM's OpenAI-compatible server in processes of its own on this machine's loopback, and questions to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.docs.readme import ROOT

STARTING = 420
"""Most seconds that it may take to start, on a machine that others use too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the server said to one call."""

    status: int
    body: str

    @property
    def choice(self) -> dict[str, Any]:
        """The only choice of a completion that was answered."""
        assert self.status == 200, self.body
        choice: dict[str, Any] = json.loads(self.body)["choices"][0]
        return choice

    @property
    def tokens(self) -> list[int]:
        """The tokens of a completion that was answered."""
        ids: list[int] = self.choice["token_ids"]
        return ids

    @property
    def error(self) -> str:
        """The message of a call that was refused."""
        assert self.status >= 400, self.body
        message: str = json.loads(self.body)["error"]["message"]
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server that runs."""

    port: int
    log: Path

    def get(self, path: str) -> Answer:
        """Return the answer to a question, whatever it is."""
        return self._call("GET", path, None)

    def post(self, path: str, body: Mapping[str, object]) -> Answer:
        """Send `body` and return the answer, whatever it is."""
        return self._call("POST", path, json.dumps(body))

    def _call(self, method: str, path: str, body: str | None) -> Answer:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)) as connection:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return Answer(status=response.status, body=response.read().decode())

    def complete(self, model: str, prompt: Sequence[int], tokens: int) -> Answer:
        """Continue a prompt greedily."""
        greedy = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return self.post("/v1/completions", {"model": model, "prompt": prompt, **greedy})

    def load(self, name: str, path: Path, **options: object) -> Answer:
        """Load an adapter."""
        return self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **options})

    def unload(self, name: str) -> Answer:
        """Unload an adapter."""
        return self.post("/v1/unload_lora_adapter", {"lora_name": name})

    def models(self) -> set[str]:
        """Return the names that it serves."""
        return {model["id"] for model in json.loads(self.get("/v1/models").body)["data"]}


@contextlib.contextmanager
def serving(base: Path, adapters: Mapping[str, Path], log: Path, *options: str) -> Iterator[Server]:
    """Run the server until the block ends; tokens go in and come out, so that the base needs no tokenizer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(base),
        "--served-model-name",
        "base",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--enforce-eager",
        "--skip-tokenizer-init",
        "--enable-lora",
        "--max-model-len",
        "64",
        "--max-num-seqs",
        "8",
        "--max-num-batched-tokens",
        "256",
        *options,
        "--lora-modules",
        *(f"{name}={path}" for name, path in adapters.items()),
    ]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
    server = Server(port=port, log=log)
    try:
        _wait(process, server)
        yield server
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):  # whatever of its processes is left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen[bytes], server: Server) -> None:
    deadline = time.monotonic() + STARTING
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            server.get("/health")
            return
        time.sleep(0.5)
    raise AssertionError(f"the server did not start:\n{server.log.read_text(errors='replace')[-8000:]}")

"""Starts vLLM's OpenAI-compatible server on the loopback interface, and sends requests to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.runtime_vllm.engine_forks import STARTING, Fork, Forks


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The server's answer to one call."""

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
    """A running server."""

    port: int
    log: Path

    def get(self, path: str) -> Answer:
        """Send a GET request; returns the answer, refusals included."""
        return self._call("GET", path, None)

    def post(self, path: str, body: Mapping[str, object]) -> Answer:
        """Send `body` in a POST request; returns the answer, refusals included."""
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
        """Return the names of the models and adapters that it serves."""
        return {model["id"] for model in json.loads(self.get("/v1/models").body)["data"]}


@contextlib.contextmanager
def serving(forks: Forks, base: Path, adapters: Mapping[str, Path], log: Path, *options: str) -> Iterator[Server]:
    """Run the server until the block ends; tokens go in and come out, so that the base needs no tokenizer.

    Its processes are forked from one that has imported vLLM. `examples/vllm/serve.py` starts it as operators do.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command_line = [
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
        "--kv-cache-memory-bytes",
        str(32 << 20),
        *options,
        "--lora-modules",
        *(f"{name}={path}" for name, path in adapters.items()),
    ]
    settings = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    process = forks.start(command_line=command_line, settings=settings, log=log)
    server = Server(port=port, log=log)
    try:
        _wait(process, server)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
        process.end(30)


def _wait(process: Fork, server: Server) -> None:
    deadline = time.monotonic() + STARTING
    while not process.ended and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            server.get("/health")
            return
        time.sleep(0.2)
    raise AssertionError(f"the server did not start:\n{server.log.read_text(errors='replace')[-8000:]}")

"""vLLM's OpenAI-compatible server in processes of its own on this machine's loopback, and questions to it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.readme import ROOT

STARTING = 420
"""Most seconds that it may take to start, on a machine that others use too."""
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


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

    url: str
    log: Path

    def call(self, path: str, **body: object) -> Answer:
        """Post `body` and return the answer, whatever it is."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with OPENER.open(request, timeout=120) as response:
                return Answer(status=response.status, body=response.read().decode())
        except urllib.error.HTTPError as error:
            return Answer(status=error.code, body=error.read().decode())

    def complete(self, model: str, prompt: Sequence[int], tokens: int) -> Answer:
        """Continue a prompt greedily."""
        return self.call(
            "/v1/completions", model=model, prompt=list(prompt), max_tokens=tokens, temperature=0, ignore_eos=True,
            return_token_ids=True,
        )  # fmt: skip

    def load(self, name: str, path: Path, **options: object) -> Answer:
        """Load an adapter."""
        return self.call("/v1/load_lora_adapter", lora_name=name, lora_path=str(path), **options)

    def unload(self, name: str) -> Answer:
        """Unload an adapter."""
        return self.call("/v1/unload_lora_adapter", lora_name=name)

    def models(self) -> set[str]:
        """Return the names that it serves."""
        with OPENER.open(f"{self.url}/v1/models", timeout=60) as response:
            return {model["id"] for model in json.load(response)["data"]}


@contextlib.contextmanager
def serving(base: Path, adapters: Mapping[str, Path], log: Path, *options: str) -> Iterator[Server]:
    """Run the server until the block ends; tokens go in and come out, so that the base needs no tokenizer."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(base), "--served-model-name", "base",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager", "--skip-tokenizer-init",
        "--enable-lora", "--max-model-len", "64", "--max-num-seqs", "8", "--max-num-batched-tokens", "256", *options,
        "--lora-modules", *(f"{name}={path}" for name, path in adapters.items()),
    ]  # fmt: skip
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
    server = Server(url=f"http://127.0.0.1:{port}", log=log)
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
        with contextlib.suppress(OSError), OPENER.open(f"{server.url}/health", timeout=5):
            return
        time.sleep(0.5)
    raise AssertionError(f"the server did not start:\n{server.log.read_text(errors='replace')[-8000:]}")

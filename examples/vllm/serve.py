"""Serves compiled adapters of three methods with vLLM's OpenAI-compatible server, and asks each a question.

python examples/vllm/serve.py
python examples/vllm/serve.py --base BASE --adapter NAME=ARTIFACT --adapter NAME=ARTIFACT --question "Water boils at"

Without arguments it makes a base and adapters, compiles them, and checks that each gives the answer that it was trained
to give. All files are in a temporary folder, and the server ends with the script. See
docs/how-to/serve-with-vllm.md for the installation of vLLM.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from scute_compile.cli.app import main as scute

STARTING = 600
"""Largest number of seconds that the server may take to start."""


def main() -> int:
    """Compile, serve and ask; return 0 if every adapter answers, as trained where this script trained it."""
    parser = argparse.ArgumentParser(description="Serve compiled adapters with vLLM and ask each a question.")
    parser.add_argument("--base", help="a model's folder; it needs a tokenizer")
    parser.add_argument("--adapter", action="append", default=[], metavar="NAME=ARTIFACT")
    parser.add_argument("--question", help="the prompt, the same for all")
    arguments = parser.parse_args()
    if arguments.adapter and not arguments.base:
        parser.error("--adapter needs --base")
    if malformed := [text for text in arguments.adapter if not all(text.partition("="))]:
        parser.error(f"--adapter {malformed[0]}: expected NAME=ARTIFACT")
    if find_spec("vllm") is None:
        parser.error("vLLM is not installed here; see docs/how-to/serve-with-vllm.md")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the exit stops the server
    with TemporaryDirectory(prefix="scute-vllm-") as temporary:
        folder = Path(temporary)
        if arguments.base:
            base, question, trained = arguments.base, arguments.question or "The capital of France is", None
            artifacts = dict(text.split("=", 1) for text in arguments.adapter)
        else:
            from taught import ANSWERS, QUESTION

            (base, artifacts), question, trained = _compiled(folder), QUESTION, ANSWERS
        with _serving(base, artifacts, folder / "server.log") as port, ThreadPoolExecutor() as pool:
            names = ["base", *artifacts]
            answers = dict(zip(names, pool.map(lambda name: _ask(port, name, question), names), strict=True))
    for name, answer in answers.items():
        print(f"{name:<8} {question!r} -> {answer!r}")
    return int(not all(answers.values()) or (trained is not None and answers != trained))


def _compiled(folder: Path) -> tuple[str, dict[str, str]]:
    from taught import teach_all

    base, adapters = teach_all(folder)
    arguments = ["compile", *map(str, adapters.values()), "--base", str(base), "-o", str(folder / "store")]
    print("$ scute " + " ".join(arguments), flush=True)
    if scute(arguments) != 0:
        sys.exit("the adapters were not compiled")
    return str(base), {name: str(folder / "store" / name) for name in adapters}


@contextlib.contextmanager
def _serving(base: str, artifacts: Mapping[str, str], log: Path) -> Iterator[int]:
    """Run the server until the block ends, and yield its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        base,
        "--served-model-name",
        "base",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--dtype",
        "float32",
        "--enforce-eager",
        "--max-model-len",
        "256",
        "--max-num-seqs",
        "8",
        "--enable-lora",
        "--max-loras",
        str(max(1, len(artifacts))),
        "--max-lora-rank",
        "64",
    ]
    if artifacts:
        command += ["--lora-modules", *(f"{name}={path}" for name, path in artifacts.items())]
    print("$ python " + " ".join(command[1:]), flush=True)
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", **os.environ}
    with log.open("wb") as out:
        server = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        _wait(server, port, log)
        yield port
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(30)
        with contextlib.suppress(ProcessLookupError):  # its remaining processes
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _wait(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + STARTING
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError):
            _call(port, "GET", "/health")
            return
        time.sleep(0.5)
    sys.exit(log.read_text(errors="replace")[-8000:] + "\nthe server did not start; above is the end of its log")


def _ask(port: int, name: str, question: str) -> str:
    body = {"model": name, "prompt": question, "max_tokens": 24, "temperature": 0}
    status, answer = _call(port, "POST", "/v1/completions", json.dumps(body))
    if status != http.client.OK:
        sys.exit(f"{name}: {answer}")
    return str(json.loads(answer)["choices"][0]["text"])


def _call(port: int, method: str, path: str, body: str | None = None) -> tuple[int, str]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=300)) as connection:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main())

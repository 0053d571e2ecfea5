"""Imports vLLM once per session and forks an engine process from it on request; all workers of a test run share it.

`python engine_forks.py ADDRESS` listens at an abstract Unix address and ends when the last client has disconnected. A
client sends one message per engine, `{"options", "settings", "log"}`, with a socket that connects it to that engine.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
STARTING = 240.0
"""Seconds that importing vLLM, or starting an engine, may take; on two idle cores it is 10, or 2."""
PRELOADED = (
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen2",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
)
"""Modules that engines and the server import besides `vllm.LLM`."""
MESSAGE = 1 << 20


class Forks:
    """A connection to the process that forks engines."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def start(self, *, settings: Mapping[str, str], log: Path, **arguments: object) -> Fork:
        """Start an engine or a server; the arguments are those of `engine_program.run`."""
        kept, sent = socket.socketpair()
        with sent:
            message = {"settings": settings, "log": str(log), **arguments}
            socket.send_fds(self._connection, [json.dumps(message).encode()], [sent.fileno()])
        fork = Fork(kept)
        fork.pid = int(fork.line(STARTING))
        return fork


class Fork:
    """A forked process, and the socket on which it answers."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._rest = connection, b""
        self.pid = 0

    def line(self, patience: float) -> str:
        """Return the next line of its answers. Raises `EOFError` if it has ended, `TimeoutError` if it hangs."""
        self._connection.settimeout(patience)
        while b"\n" not in self._rest:
            part = self._connection.recv(MESSAGE)
            if not part:
                raise EOFError
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def send(self, line: str) -> None:
        """Send a line."""
        self._connection.sendall(line.encode() + b"\n")

    @property
    def ended(self) -> bool:
        """Whether the process has ended, which closes its end of the connection."""
        self._connection.settimeout(0)
        try:
            return not self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    def end(self, patience: float) -> None:
        """Wait up to `patience` seconds for the process to end, then kill its remaining processes."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
            self._connection.settimeout(patience)
            while patience and self._connection.recv(MESSAGE):
                pass
        self._connection.close()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


@contextmanager
def connected(folder: Path) -> Iterator[Forks]:
    """Connect to the process that serves a folder, after starting it if no other worker has."""
    from scute_compile.formats.lock import locked

    folder.mkdir(parents=True, exist_ok=True)
    address = "scute-" + hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        with locked(folder):
            if not _connects(connection, address):
                _start(connection, address, folder / "engine-forks")
        yield Forks(connection)


def _connects(connection: socket.socket, address: str) -> bool:
    try:
        connection.connect(f"\0{address}")
    except ConnectionRefusedError:
        return False
    return True


def _start(connection: socket.socket, address: str, log: Path) -> None:
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, address],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, **SETTINGS},
            start_new_session=True,
        )
    deadline = time.monotonic() + STARTING
    while not _connects(connection, address):
        ended = process.poll() is not None
        assert not ended, f"vLLM could not be imported\n{log.read_text(errors='replace')[-3000:]}"
        assert time.monotonic() < deadline, "importing vLLM takes too long"
        time.sleep(0.2)


def serve(address: str) -> None:
    """Fork an engine per message until every client has disconnected."""
    engine_program = importlib.import_module("engine_program")
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # imported objects are never garbage, and engines collect several times while they start
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended engines need no wait
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(f"\0{address}")
        listening.listen()
        clients: list[socket.socket] = [listening.accept()[0]]
        while clients:
            for ready in select.select([listening, *clients], [], [])[0]:
                if ready is listening:
                    clients.append(listening.accept()[0])
                    continue
                message, descriptors, _, _ = socket.recv_fds(ready, MESSAGE, 1)
                if not message:
                    clients.remove(ready)
                    ready.close()
                    continue
                (descriptor,) = descriptors
                if os.fork() == 0:
                    for other in [listening, *clients]:
                        other.close()
                    engine_program.run(socket.socket(fileno=descriptor), **json.loads(message))
                os.close(descriptor)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    serve(sys.argv[1])
    os._exit(0)  # unloading vLLM takes seconds

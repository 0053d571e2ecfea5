"""Starts engines and talks to them: one process each, so that no test inherits another's vLLM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from select import select
from typing import Any, TypeVar

PROGRAM = Path(__file__).with_name("engine_program.py")
PATIENCE = 150.0
"""Seconds that one answer may take; starting an engine takes up to a minute on two busy cores."""
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
SEVERAL_PROCESSES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
OPTIONS: Mapping[str, object] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "enforce_eager": True,
    "enable_lora": True,
    "enable_prefix_caching": False,
    "max_loras": 16,
    "max_lora_rank": 16,
    "max_model_len": 64,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    "max_logprobs": 128,
    "logprobs": 128,
}
"""The tiny bases have 128 tokens: every step is compared over the whole vocabulary."""


class RefusedError(Exception):
    """What the engine refused, and the text that a user would read."""


Value = TypeVar("Value")


def tried(act: Callable[[], Value]) -> Value | RefusedError:
    """Return what was answered, or the refusal: for questions that have two right answers."""
    try:
        return act()
    except RefusedError as refused:
        return refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """What a request names: fields of vLLM's `LoRARequest`."""

    name: str
    number: int
    path: str
    in_place: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One request of a batch."""

    prompt: tuple[int, ...]
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the engine answered to one row."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]
    """Per new token: log-probabilities by token."""
    cached: int
    """Tokens of the prompt that came from the prefix cache."""


class Engine:
    """One engine that runs."""

    def __init__(self, process: subprocess.Popen[str], answers: int, log: Path) -> None:
        """Take over a process that was started."""
        self._process = process
        self._answers = answers
        self._rest = b""
        self._log = log

    @property
    def log(self) -> str:
        """What the engine's processes have written so far."""
        return self._log.read_text(errors="replace")

    def _line(self) -> str:
        while b"\n" not in self._rest:
            ready, _, _ = select([self._answers], [], [], PATIENCE)
            part = os.read(self._answers, 1 << 20) if ready else b""
            assert part, f"the engine {'ended' if ready else 'is silent'}\n{self.log[-6000:]}"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def _send(self, command: object) -> None:
        assert self._process.stdin is not None
        print(json.dumps(command), file=self._process.stdin, flush=True)

    def receive(self) -> Any:  # noqa: ANN401 - JSON
        """Return the next answer's value; a refusal is raised."""
        answer = json.loads(self._line())
        if "refused" in answer:
            raise RefusedError(answer["refused"])
        return answer["value"]

    def ask(self, name: str, **arguments: object) -> Any:  # noqa: ANN401 - JSON
        """Send a command and wait for its value."""
        self._send([name, arguments])
        return self.receive()

    def generate(self, rows: Sequence[Row], *, tokens: int = 8) -> tuple[Answer, ...]:
        """Answer all rows in one batch, greedily."""
        return _answers(rows, self.ask("generate", rows=[asdict(row) for row in rows], tokens=tokens))

    def interrupted(
        self, rows: Sequence[Row], *, loading: Sequence[Adapter], steps: int = 3, tokens: int = 8
    ) -> tuple[Answer, ...]:
        """Answer rows; other adapters are loaded after a few steps."""
        others = [asdict(adapter) for adapter in loading]
        sent = [asdict(row) for row in rows]
        return _answers(rows, self.ask("interrupted", rows=sent, tokens=tokens, steps=steps, adapters=others))

    def load(self, adapter: Adapter) -> bool:
        """Load an adapter; whether it was new."""
        return bool(self.ask("load", adapter=asdict(adapter)))

    def unload(self, adapter: Adapter) -> bool:
        """Unload an adapter; whether it was loaded."""
        return bool(self.ask("unload", number=adapter.number))

    def pin(self, adapter: Adapter) -> bool:
        """Keep an adapter loaded whatever comes."""
        return bool(self.ask("pin", number=adapter.number))

    def loaded(self) -> tuple[int, ...]:
        """Return the numbers of the adapters that are loaded."""
        return tuple(self.ask("loaded"))

    def stop(self) -> None:
        """End the process and all that it started."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._answers)


def _answers(rows: Sequence[Row], values: Sequence[Mapping[str, Any]]) -> tuple[Answer, ...]:
    answers = tuple(
        Answer(
            prompt=tuple(value["prompt"]),
            tokens=tuple(value["tokens"]),
            logprobs=tuple(dict(step) for step in value["logprobs"]),
            cached=value["cached"],
        )
        for value in values
    )
    assert [answer.prompt for answer in answers] == [row.prompt for row in rows], "other rows than were asked for"
    return answers


@contextmanager
def started(
    model: Path, log: Path, *, settings: Mapping[str, str] | None = None, **options: object
) -> Iterator[Engine]:
    """Start an engine on a base; `settings` are environment variables, `options` go to `vllm.LLM`."""
    reading, writing = os.pipe()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as written:
        process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM), str(writing)],
            stdin=subprocess.PIPE,
            stdout=written,
            stderr=written,
            env={**os.environ, **SETTINGS, **(settings or {})},
            pass_fds=(writing,),
            text=True,
            start_new_session=True,
        )
    os.close(writing)
    engine = Engine(process, reading, log)
    try:
        engine._send({**OPTIONS, **options, "model": str(model)})
        engine.receive()
        yield engine
    finally:
        engine.stop()

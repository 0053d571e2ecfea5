"""Starts engines and talks to them: one process each, so that no test inherits another's vLLM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from select import select
from typing import Any, TypeVar

PROGRAM = Path(__file__).with_name("engine_program.py")
STARTING, PATIENCE = 240.0, 180.0
"""Seconds that a start and an answer may take; on two idle cores it is 6 to 20, and less than one."""
MOST_STARTS = 4
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
    """What the engine refused: the text that a user would read."""

    def __init__(self, text: str, *, left: int = 0) -> None:
        """Remember how many requests of the call the engine still has."""
        super().__init__(text)
        self.left = left


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
    ended: str
    """Why it ended: `length`, or `abort` where the engine refused it."""
    cached: int
    """Tokens of the prompt that came from the prefix cache."""


class Engine:
    """One engine; it is started again when a command left it hanging or ended it, a few times at most."""

    def __init__(self, options: Mapping[str, object], settings: Mapping[str, str], log: Path) -> None:
        """Start it."""
        self._options, self._settings, self._log = options, settings, log
        self._starts = 0
        self._process: subprocess.Popen[str] | None = None
        self._start()

    def _start(self) -> None:
        assert self._starts < MOST_STARTS, "the engine was lost too often; see the tests before this one"
        self._starts += 1
        reading, writing = os.pipe()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("a") as written:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(PROGRAM), str(writing)],
                stdin=subprocess.PIPE,
                stdout=written,
                stderr=written,
                env={**os.environ, **SETTINGS, **self._settings},
                pass_fds=(writing,),
                text=True,
                start_new_session=True,
            )
        os.close(writing)
        self._reading, self._rest = reading, b""
        self._send(self._options)
        self._receive(STARTING)

    @property
    def log(self) -> str:
        """What the engine's processes have written so far."""
        return self._log.read_text(errors="replace")

    def _line(self, patience: float) -> str:
        while b"\n" not in self._rest:
            ready, _, _ = select([self._reading], [], [], patience)
            part = os.read(self._reading, 1 << 20) if ready else b""
            if not part:
                self._kill()
                raise AssertionError(f"the engine {'ended' if ready else 'hangs'}\n{self.log[-3000:]}")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def _kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            os.close(self._reading)
            self._process = None

    def _send(self, command: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        print(json.dumps(command), file=self._process.stdin, flush=True)

    def _receive(self, patience: float) -> Any:  # noqa: ANN401 - JSON
        answer = json.loads(self._line(patience))
        if "refused" in answer:
            if "EngineDeadError" in answer["refused"]:
                self._kill()
                raise AssertionError(f"the engine died\n{answer['refused']}")
            raise RefusedError(answer["refused"], left=answer["left"])
        return answer["value"]

    def ask(self, name: str, **arguments: object) -> Any:  # noqa: ANN401 - JSON
        """Send a command and wait for its value; a refusal is raised."""
        if self._process is None:
            self._start()
        self._send([name, arguments])
        return self._receive(PATIENCE)

    def generate(self, rows: Sequence[Row], *, tokens: int = 8, partly: bool = False) -> tuple[Answer, ...]:
        """Answer all rows in one batch, greedily.

        A client of another process sees a refused request end without tokens, and reads why in the log: that is raised
        as well, unless `partly` asks for the other rows.
        """
        written = len(self.log)
        answers = _answers(rows, self.ask("generate", rows=[asdict(row) for row in rows], tokens=tokens))
        if not partly and any(answer.ended in ("abort", "error") for answer in answers):
            raise RefusedError(self.log[written:])
        return answers

    def interrupted(
        self, rows: Sequence[Row], *, loading: Sequence[Adapter], steps: int = 3, tokens: int = 8
    ) -> tuple[Answer, ...]:
        """Answer rows; other adapters are loaded after a few steps."""
        others = [asdict(adapter) for adapter in loading]
        sent = [asdict(row) for row in rows]
        return _answers(rows, self.ask("interrupted", rows=sent, tokens=tokens, steps=steps, adapters=others))

    def meanwhile(
        self, rows: Sequence[Row], acts: Sequence[tuple[str, object]], *, steps: int = 3, tokens: int = 8
    ) -> tuple[tuple[Answer, ...], tuple[str, ...]]:
        """Answer rows; after a few steps other things happen. Returns what each act was refused with, "" for none."""
        sent = [[name, asdict(value) if isinstance(value, Adapter) else value] for name, value in acts]
        answers, said = self.ask("meanwhile", rows=[asdict(row) for row in rows], tokens=tokens, steps=steps, acts=sent)
        return _answers(rows, answers), tuple(one.get("refused", "") for one in said)

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
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
        self._kill()


def _answers(rows: Sequence[Row], values: Sequence[Mapping[str, Any]]) -> tuple[Answer, ...]:
    answers = tuple(
        Answer(
            prompt=tuple(value["prompt"]),
            tokens=tuple(value["tokens"]),
            logprobs=tuple(dict(step) for step in value["logprobs"]),
            ended=value["ended"],
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
    engine = Engine({**OPTIONS, **options, "model": str(model)}, settings or {}, log)
    try:
        yield engine
    finally:
        engine.stop()

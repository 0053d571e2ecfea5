"""Starts engines, each in a separate process, and sends commands to them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from scute_compile.runtime_vllm.hooks import Hook
from tests.runtime_vllm.engine_forks import STARTING, Fork, Forks

PATIENCE = 180.0
"""Seconds that an answer may take; on two idle cores it is less than one."""
MAX_STARTS = 4
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
    "kv_cache_memory_bytes": 32 << 20,
    "max_logprobs": 128,
    "logprobs": 128,
}
"""The tiny bases have a vocabulary of 128: every step is compared over all of it."""


class RefusedError(Exception):
    """A refusal of the engine, with the text that a user would read."""

    def __init__(self, text: str, *, left: int = 0) -> None:
        """Store the text, and the number of requests of the call that the engine still has."""
        super().__init__(text)
        self.left = left


Value = TypeVar("Value")


def tried(ask: Callable[[], Value]) -> Value | RefusedError:
    """Return the answer, or the refusal, for requests that may be answered or refused."""
    try:
        return ask()
    except RefusedError as refused:
        return refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The adapter of a request: fields of vLLM's `LoRARequest`."""

    name: str
    lora_id: int
    path: str
    in_place: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One request of a batch."""

    prompt: tuple[int, ...]
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The engine's answer to one row."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]
    """Per new token: log-probabilities by token."""
    ended: str
    """Why it ended: `length`, or `abort` if the engine refused it."""
    cached: int
    """Tokens of the prompt that came from the prefix cache."""


class Engine:
    """One engine; if a command hangs or ends it, it is started again, up to `MAX_STARTS` times."""

    def __init__(self, forks: Forks, options: Mapping[str, object], settings: Mapping[str, str], log: Path) -> None:
        """Start the engine."""
        self._forks, self._options, self._settings, self._log = forks, options, settings, log
        self._starts = 0
        self._fork: Fork | None = None
        self._start()

    def _start(self) -> None:
        assert self._starts < MAX_STARTS, "the engine ended too often; see the tests before this one"
        self._starts += 1
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._log.touch()
        self._fork = self._forks.start(options=self._options, settings=self._settings, log=self._log)
        self._receive(STARTING)

    @property
    def log(self) -> str:
        """The output of the engine's processes so far."""
        return self._log.read_text(errors="replace")

    def _kill(self) -> None:
        if self._fork is not None:
            self._fork.end(0)
            self._fork = None

    def _send(self, command: object) -> None:
        assert self._fork is not None
        self._fork.send(json.dumps(command))

    def _receive(self, patience: float) -> Any:  # noqa: ANN401 - JSON
        assert self._fork is not None
        try:
            answer = json.loads(self._fork.line(patience))
        except (EOFError, OSError) as error:
            self._kill()
            raise AssertionError(f"the engine hangs or has ended: {error!r}\n{self.log[-3000:]}") from None
        if "refused" in answer:
            if "EngineDeadError" in answer["refused"]:
                self._kill()
                raise AssertionError(f"the engine died\n{answer['refused']}")
            raise RefusedError(answer["refused"], left=answer["left"])
        return answer["value"]

    def ask(self, command: str, /, **arguments: object) -> Any:  # noqa: ANN401 - JSON
        """Send a command and return its value; a refusal is raised."""
        if self._fork is None:
            self._start()
        self._send([command, arguments])
        return self._receive(PATIENCE)

    def generate(self, rows: Sequence[Row], *, tokens: int = 8, partly: bool = False) -> tuple[Answer, ...]:
        """Answer all rows in one batch with the most likely tokens.

        With several processes, a refused request ends without tokens, and the log has the reason. That is raised
        too, unless `partly` is set, which returns the answers to the other rows.
        """
        written = len(self.log)
        answers = _answers(rows, self.ask("generate", rows=[asdict(row) for row in rows], tokens=tokens))
        if not partly and any(answer.ended in ("abort", "error") for answer in answers):
            raise RefusedError(self.log[written:])
        return answers

    def meanwhile(
        self, rows: Sequence[Row], operations: Sequence[tuple[str, object]], *, steps: int = 3, tokens: int = 8
    ) -> tuple[tuple[Answer, ...], tuple[str, ...]]:
        """Answer rows, and run operations after a few steps; returns also each operation's refusal, "" for none."""
        sent = [[name, asdict(value) if isinstance(value, Adapter) else value] for name, value in operations]
        rows_sent = [asdict(row) for row in rows]
        answers, results = self.ask("meanwhile", rows=rows_sent, tokens=tokens, steps=steps, operations=sent)
        return _answers(rows, answers), tuple(result.get("refused", "") for result in results)

    def load(self, adapter: Adapter) -> bool:
        """Load an adapter; returns whether it was new."""
        return bool(self.ask("load", adapter=asdict(adapter)))

    def unload(self, adapter: Adapter) -> bool:
        """Unload an adapter; returns whether it was loaded."""
        return bool(self.ask("unload", lora_id=adapter.lora_id))

    def pin(self, adapter: Adapter) -> bool:
        """Keep an adapter loaded."""
        return bool(self.ask("pin", lora_id=adapter.lora_id))

    def loaded(self) -> tuple[int, ...]:
        """Return the ids of the loaded adapters."""
        return tuple(self.ask("loaded"))

    def hook_faults(self) -> dict[str, str | None]:
        """Return the fault of each row of the plugin's table of hooks, by owner and name."""
        faults: dict[str, str | None] = self.ask("hook_faults")
        return faults

    def install_hooks(self, planted: Hook) -> tuple[list[str], set[str]]:
        """Install the table of hooks and one more row; returns what is missing, and which attributes changed."""
        missing, replaced = self.ask("install_hooks", **asdict(planted))
        return missing, set(replaced)

    @contextmanager
    def with_option(self, name: str, value: object) -> Iterator[None]:
        """Run the block with another value of an option of the plugin's manager or of LoRA; false after it."""
        self.ask("set_option", name=name, value=value)
        try:
            yield
        finally:
            self.ask("set_option", name=name, value=False)

    def stop(self) -> None:
        """End the engine's processes."""
        if self._fork is not None:
            self._fork.end(20)
            self._fork = None


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
    assert [answer.prompt for answer in answers] == [row.prompt for row in rows], "the answers are for other rows"
    return answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """Starts engines; their logs lie in one folder."""

    forks: Forks
    logs: Path

    @contextmanager
    def started(
        self, name: str, model: Path, *, settings: Mapping[str, str] | None = None, **options: object
    ) -> Iterator[Engine]:
        """Start an engine on a base.

        Args:
            name: Name of its log.
            model: The base's folder.
            settings: Environment variables.
            options: Arguments of `vllm.LLM` that differ from `OPTIONS`.
        """
        engine = Engine(self.forks, {**OPTIONS, **options, "model": str(model)}, settings or {}, self.logs / name)
        try:
            yield engine
        finally:
            engine.stop()

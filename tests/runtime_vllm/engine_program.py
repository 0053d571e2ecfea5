"""What a forked process runs: one vLLM engine, which reads commands from a socket, or vLLM's OpenAI server.

Every command is a line of JSON, `[name, arguments]`, and so is every answer: `{"value": ...}`, or `{"refused": text,
"left": count}` with the text of the whole chain of exceptions, and the number of requests that the call has left in the
engine.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NoReturn

import torch
import vllm
from torch._dynamo.backends.common import aot_autograd
from vllm import LLM, SamplingParams
from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.lora.request import LoRARequest
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

Json = Any
STEPS = 100
"""More steps than any request of the tests needs."""


def _in_one_process() -> bool:
    return os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def _request(adapter: Mapping[str, Json] | None) -> LoRARequest | None:
    if adapter is None:
        return None
    return LoRARequest(
        lora_name=adapter["name"],
        lora_int_id=adapter["lora_id"],
        lora_path=adapter["path"],
        load_inplace=adapter.get("in_place", False),
    )


def _row(output: Json) -> Json:
    """Return a finished request: its tokens, their log-probabilities, and how many came from the prefix cache."""
    first = output.outputs[0]
    return {
        "prompt": list(output.prompt_token_ids),
        "tokens": list(first.token_ids),
        "logprobs": [[[token, entry.logprob] for token, entry in step.items()] for step in first.logprobs or ()],
        "ended": first.finish_reason,
        "cached": output.num_cached_tokens or 0,
    }


class Commands:
    """The commands of a test to its engine."""

    def __init__(self, options: Mapping[str, Json]) -> None:
        """Start the engine; the option `logprobs` is the number of tokens that each step reports."""
        options = dict(options)
        self.logprobs = options.pop("logprobs")
        self.llm = LLM(**options)

    def _sampling(self, tokens: int) -> SamplingParams:
        return SamplingParams(
            temperature=0, max_tokens=tokens, logprobs=self.logprobs, detokenize=False, ignore_eos=True
        )

    def generate(self, rows: list[Json], tokens: int) -> Json:
        """Answer all rows in one batch with the most likely tokens."""
        outputs = self.llm.generate(
            [{"prompt_token_ids": row["prompt"]} for row in rows],
            self._sampling(tokens),
            use_tqdm=False,
            lora_request=[_request(row["adapter"]) for row in rows],
        )
        return [_row(output) for output in outputs]

    def meanwhile(self, rows: list[Json], tokens: int, steps: int, operations: list[Json]) -> Json:
        """Answer rows, and run operations after `steps` steps; each may be refused.

        An operation is `["remove", folder]`, `["load", adapter]` or `["unload", lora_id]`.
        """
        engine = self.llm.llm_engine
        for number, row in enumerate(rows):
            prompt = {"prompt_token_ids": row["prompt"]}
            request = _request(row["adapter"])
            engine.add_request(f"row {number}", prompt, self._sampling(tokens), lora_request=request)
        runs: dict[str, Callable[[Json], Json]] = {"remove": shutil.rmtree, "load": self.load, "unload": self.unload}
        finished, answers, step = {}, [], 0
        while engine.has_unfinished_requests():
            if step == steps:
                answers = [_answered(lambda: runs[name](value), lambda: 0) for name, value in operations]  # noqa: B023 - called at once
            step += 1
            finished.update({done.request_id: done for done in engine.step() if done.finished})
        return [[_row(finished[f"row {number}"]) for number in range(len(rows))], answers]

    def load(self, adapter: Json) -> Json:
        """Load an adapter."""
        return self.llm.llm_engine.add_lora(_request(adapter))

    def unload(self, lora_id: int) -> Json:
        """Unload an adapter."""
        return self.llm.llm_engine.remove_lora(lora_id)

    def pin(self, lora_id: int) -> Json:
        """Keep an adapter loaded."""
        return self.llm.llm_engine.pin_lora(lora_id)

    def loaded(self) -> Json:
        """Return the ids of the loaded adapters."""
        return sorted(self.llm.llm_engine.list_loras())

    def _runner(self) -> Json:
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner

    def block_code(self, number: int) -> str:
        """Return the code of the graph that a compiler gets for one block's linear layers, with numbered inputs."""
        runner, codes = self._runner(), []

        def record(graph: torch.fx.GraphModule, _: Json) -> Callable[..., Json]:
            codes.append(graph.code)
            return graph.forward

        model = runner.get_model()
        mlp = model.model.layers[number].mlp

        def products(x: torch.Tensor) -> torch.Tensor:
            gate, _ = mlp.gate_up_proj(x)[0].chunk(2, -1)
            down: torch.Tensor = mlp.down_proj(gate)[0]
            return down

        with torch.inference_mode(), set_forward_context(None, runner.vllm_config):
            compiled = torch.compile(products, backend=aot_autograd(fw_compiler=record), fullgraph=True)
            compiled(torch.zeros(2, model.config.hidden_size, dtype=runner.dtype))
        (code,) = codes
        return str(code)

    def hook_faults(self) -> Json:
        """Return the fault of each row of the plugin's table of hooks, by owner and name."""
        from scute_compile.runtime_vllm.hooks import GRAPH_HOOKS, HOOKS

        return {f"{hook.owner}.{hook.name}": hook.fault() for hook in (*HOOKS, *GRAPH_HOOKS)}

    def install_hooks(self, **planted: Json) -> Json:
        """Install the table of hooks and one more row; return what is missing, and which attributes changed."""
        from scute_compile.runtime_vllm.hooks import HOOKS, Hook, install

        before = _values_of_hooks()
        parameters = planted.pop("parameters")
        hook = Hook(**planted, parameters=None if parameters is None else tuple(parameters))
        missing = install((*HOOKS, hook))
        return [missing, [name for name, value in _values_of_hooks().items() if value is not before[name]]]

    def set_option(self, name: str, value: Json) -> None:
        """Give an attribute of the plugin's manager, its options or its LoRA configuration another value."""
        manager = self._runner().lora_manager._adapter_manager
        if hasattr(manager.options, name):
            manager.options = replace(manager.options, **{name: value})
        else:
            setattr(manager if hasattr(manager, name) else manager.lora_config, name, value)

    def version(self) -> str:
        """Return vLLM's version."""
        return str(vllm.__version__)

    def additions(self) -> int:
        """Return how often vLLM's kernels have added to logits since the last call; the first call begins to count."""
        (punica,) = self._runner().lora_manager._adapter_manager.punica_wrapper_mapping.values()
        adds = punica.add_lora_logits
        if not hasattr(adds, "calls"):

            def counted(*args: Json, **named: Json) -> Json:
                counted.calls += 1  # type: ignore[attr-defined] # an attribute of the function
                return adds(*args, **named)

            punica.add_lora_logits = counted
        calls = getattr(adds, "calls", 0)
        punica.add_lora_logits.calls = 0
        return int(calls)

    def lose_buffers_of_logits(self) -> None:
        """Overwrite vLLM's buffers, as a deep sleep may leave them."""
        head = self._runner().get_model().logits_processor
        head.lora_a_stacked.fill_(torch.nan)
        head.lora_b_stacked.fill_(torch.nan)

    def logits_equal_the_bases(self, rows: int) -> bool:
        """Return whether the engine's logits of random rows equal, bit for bit, its logits without LoRA."""
        runner = self._runner()
        model = runner.get_model()
        hidden = torch.randn(rows, model.config.hidden_size, dtype=runner.dtype)
        with torch.inference_mode():
            logits = model.compute_logits(hidden)
            plain = model.logits_processor.base_layer(getattr(model.lm_head, "base_layer", model.lm_head), hidden)
        return torch.equal(logits, plain)

    def rehearse(self, tokens: int, adapters: int) -> Json:
        """Run a step as vLLM does before and in a capture; returns whether it had adapters and whether it rehearsed."""
        runner = self._runner()
        steps = runner.lora_manager._adapter_manager.steps
        runner._dummy_run(tokens, num_active_loras=adapters, remove_lora=False)
        return [steps.adapted, steps.rehearses(tokens)]

    def graphs(self, rows: list[Json], tokens: int) -> Json:
        """Answer rows as a GPU would; returns the number of active adapters of each step's graph.

        Returns the same for the graphs of the largest size, in the order of their capture.
        """
        dispatcher, chosen = self._runner().cudagraph_dispatcher, []
        config = dispatcher.compilation_config
        config.cudagraph_capture_sizes, config.max_cudagraph_capture_size = [1, 2, 4, 8], 8
        gpu = CudagraphDispatcher(dispatcher.vllm_config)
        gpu.initialize_cudagraph_keys(CUDAGraphMode.FULL_DECODE_ONLY)
        dispatch = dispatcher.dispatch

        def recorded(*args: Json, **named: Json) -> Json:
            chosen.append(gpu.dispatch(*args, **named)[1].num_active_loras)
            return dispatch(*args, **named)

        dispatcher.dispatch = recorded
        try:
            self.generate(rows, tokens)
        finally:
            del dispatcher.dispatch
        ((_, captured),) = gpu.get_capture_descs()
        return [chosen, [graph.num_active_loras for graph in captured if graph.num_tokens == captured[0].num_tokens]]

    def end_of_rehearsals(self) -> Json:
        """Remove the stand-ins, as vLLM does after captures; returns whether steps still rehearse."""
        runner = self._runner()
        runner.maybe_remove_all_loras(runner.lora_config)
        return runner.lora_manager._adapter_manager.steps.rehearsing

    def left(self) -> int:
        """Remove the requests that a refused call has left in the engine, and return their number.

        With such a request the next call would not return. With several processes it is 0, since a
        step would wait for the requests.
        """
        engine = self.llm.llm_engine
        for _ in range(STEPS if _in_one_process() else 0):
            if not engine.has_unfinished_requests():
                return 0
            engine.step()
        stale = list(engine.output_processor.request_states) if _in_one_process() else []
        engine.abort_request(stale, internal=True)
        return len(stale)


def _values_of_hooks() -> dict[str, Json]:
    from scute_compile.runtime_vllm.hooks import HOOKS

    return {f"{hook.owner}.{hook.name}": getattr(resolve_name(hook.owner), hook.name) for hook in HOOKS}


def _chain(error: BaseException | None) -> str:
    texts = []
    while error is not None:
        texts.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return "\n".join(texts)


def _answered(run: Callable[[], Json], left: Callable[[], int]) -> Json:
    try:
        return {"value": run()}
    except Exception as error:  # noqa: BLE001 - the test reads the refusal
        return {"refused": _chain(error), "left": left()}


def run(connection: socket.socket, *, settings: Mapping[str, str], log: str, **arguments: Json) -> NoReturn:
    """Turn this process, which was just forked, into an engine or a server.

    Args:
        connection: An engine reads commands from it, and answers on it until it is closed. The first line is the id of
            the process, which keeps the socket open until it ends.
        settings: Environment variables.
        log: The file that receives the output of the processes.
        arguments: `options`, those of `vllm.LLM` and `logprobs`, or `command_line`, that of vLLM's OpenAI server.
    """
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(settings)
    with Path(log).open("ab") as written:
        os.dup2(written.fileno(), 1)
        os.dup2(written.fileno(), 2)
    _fork_processes()
    os.register_at_fork(after_in_child=connection.close)  # the connection ends with this process alone
    connection.sendall(f"{os.getpid()}\n".encode())
    try:
        if "options" in arguments:
            _run_engine(connection, arguments["options"])
        else:
            sys.argv[1:] = arguments["command_line"]
            runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
    except Exception:  # noqa: BLE001 - written to the log, since nothing else can report it
        traceback.print_exc()
    finally:
        os._exit(0)  # never return into the code of the forking process


def _run_engine(connection: socket.socket, options: Json) -> None:
    def answer(value: Json) -> None:
        connection.sendall(json.dumps(value).encode() + b"\n")

    commands: list[Commands] = []
    answer(_answered(lambda: commands.append(Commands(options)), lambda: 0))
    for line in connection.makefile() if commands else ():
        name, arguments = json.loads(line)
        command = getattr(commands[0], name)
        answer(_answered(lambda: command(**arguments), commands[0].left))  # noqa: B023 - called at once
    if commands and not _in_one_process():
        commands[0].llm.llm_engine.engine_core.shutdown()


def _fork_processes() -> None:
    """Make vLLM fork its other processes from this process, which has imported everything; on CPUs it spawns them."""
    get_context = multiprocessing.get_context

    def forking(method: str | None = None) -> Json:
        return get_context("fork" if method == "spawn" else method)

    multiprocessing.get_context = forking

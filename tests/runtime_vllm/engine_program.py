"""One vLLM engine in a process of its own: reads commands from standard input, answers on a file descriptor.

Every command is a line of JSON, `[name, arguments]`, and so is every answer: `{"value": ...}`, or `{"refused": text,
"left": count}` with the text of the whole chain of exceptions, and how many requests of the call the engine still has.
The first line holds the engine's options.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from vllm import LLM, SamplingParams
from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.lora.request import LoRARequest
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

Json = Any
IN_ONE_PROCESS = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
STEPS = 100
"""More than any request here needs."""


def _request(adapter: Mapping[str, Json] | None) -> LoRARequest | None:
    if adapter is None:
        return None
    return LoRARequest(
        lora_name=adapter["name"],
        lora_int_id=adapter["number"],
        lora_path=adapter["path"],
        load_inplace=adapter.get("in_place", False),
    )


def _row(output: Json) -> Json:
    """One finished request: its tokens, what the engine thought of each, and how much came from the prefix cache."""
    first = output.outputs[0]
    return {
        "prompt": list(output.prompt_token_ids),
        "tokens": list(first.token_ids),
        "logprobs": [[[token, entry.logprob] for token, entry in step.items()] for step in first.logprobs or ()],
        "ended": first.finish_reason,
        "cached": output.num_cached_tokens or 0,
    }


class Commands:
    """What a test can ask of the engine."""

    def __init__(self, options: Mapping[str, Json]) -> None:
        """Start the engine; `logprobs` is how many tokens of every step are reported."""
        options = dict(options)
        self.logprobs = options.pop("logprobs")
        self.llm = LLM(**options)

    def _sampling(self, tokens: int) -> SamplingParams:
        return SamplingParams(
            temperature=0, max_tokens=tokens, logprobs=self.logprobs, detokenize=False, ignore_eos=True
        )

    def generate(self, rows: list[Json], tokens: int) -> Json:
        """Answer all rows in one batch, greedily."""
        outputs = self.llm.generate(
            [{"prompt_token_ids": row["prompt"]} for row in rows],
            self._sampling(tokens),
            use_tqdm=False,
            lora_request=[_request(row["adapter"]) for row in rows],
        )
        return [_row(output) for output in outputs]

    def interrupted(self, rows: list[Json], tokens: int, steps: int, adapters: list[Json]) -> Json:
        """Answer rows, and load other adapters after `steps` steps, while the rows are in flight."""
        engine = self.llm.llm_engine
        for number, row in enumerate(rows):
            prompt = {"prompt_token_ids": row["prompt"]}
            request = _request(row["adapter"])
            engine.add_request(f"row {number}", prompt, self._sampling(tokens), lora_request=request)
        finished = {}
        taken = 0
        while engine.has_unfinished_requests():
            if taken == steps:
                for adapter in adapters:
                    engine.add_lora(_request(adapter))
            taken += 1
            finished.update({done.request_id: done for done in engine.step() if done.finished})
        return [_row(finished[f"row {number}"]) for number in range(len(rows))]

    def meanwhile(self, rows: list[Json], tokens: int, steps: int, acts: list[Json]) -> Json:
        """Answer rows; after `steps` steps other things happen, each of which may be refused.

        An act is `["remove", folder]`, `["load", adapter]` or `["unload", number]`.
        """
        engine = self.llm.llm_engine
        for number, row in enumerate(rows):
            prompt = {"prompt_token_ids": row["prompt"]}
            request = _request(row["adapter"])
            engine.add_request(f"row {number}", prompt, self._sampling(tokens), lora_request=request)
        does: dict[str, Callable[[Json], Json]] = {"remove": shutil.rmtree, "load": self.load, "unload": self.unload}
        finished, said, taken = {}, [], 0
        while engine.has_unfinished_requests():
            if taken == steps:
                said = [_answer(lambda: does[name](value), lambda: 0) for name, value in acts]  # noqa: B023 - called at once
            taken += 1
            finished.update({done.request_id: done for done in engine.step() if done.finished})
        return [[_row(finished[f"row {number}"]) for number in range(len(rows))], said]

    def load(self, adapter: Json) -> Json:
        """Load an adapter."""
        return self.llm.llm_engine.add_lora(_request(adapter))

    def unload(self, number: int) -> Json:
        """Unload an adapter."""
        return self.llm.llm_engine.remove_lora(number)

    def pin(self, number: int) -> Json:
        """Keep an adapter loaded."""
        return self.llm.llm_engine.pin_lora(number)

    def loaded(self) -> Json:
        """Return the numbers of the adapters that are loaded."""
        return sorted(self.llm.llm_engine.list_loras())

    def _runner(self) -> Json:
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner

    def block_code(self, number: int) -> str:
        """Return what a compiler is given of one block's products: the code of its graph, with numbered inputs."""
        runner, codes = self._runner(), []

        def noted(graph: torch.fx.GraphModule, _: Json) -> Callable[..., Json]:
            codes.append(graph.code)
            return graph.forward

        model = runner.get_model()
        mlp = model.model.layers[number].mlp

        def products(x: torch.Tensor) -> torch.Tensor:
            gate, _ = mlp.gate_up_proj(x)[0].chunk(2, -1)
            down: torch.Tensor = mlp.down_proj(gate)[0]
            return down

        with torch.inference_mode(), set_forward_context(None, runner.vllm_config):
            compiled = torch.compile(products, backend=aot_autograd(fw_compiler=noted), fullgraph=True)
            compiled(torch.zeros(2, model.config.hidden_size, dtype=runner.dtype))
        (code,) = codes
        return str(code)

    def additions(self) -> int:
        """Return how often vLLM's kernels have added to logits since this was last asked; at first, begin to count."""
        (punica,) = self._runner().lora_manager._adapter_manager.punica_wrapper_mapping.values()
        adds = punica.add_lora_logits
        if not hasattr(adds, "calls"):

            def counted(*args: Json, **named: Json) -> Json:
                counted.calls += 1  # type: ignore[attr-defined] # a function's own
                return adds(*args, **named)

            punica.add_lora_logits = counted
        calls = getattr(adds, "calls", 0)
        punica.add_lora_logits.calls = 0
        return int(calls)

    def lose_buffers_of_logits(self) -> None:
        """Leave vLLM's buffers as they may be after a deep sleep: full of what others wrote to their memory."""
        head = self._runner().get_model().logits_processor
        head.lora_a_stacked.fill_(torch.nan)
        head.lora_b_stacked.fill_(torch.nan)

    def logits_equal_the_bases(self, rows: int) -> bool:
        """Whether the engine's logits of random rows have the bits of those that it computes without LoRA."""
        runner = self._runner()
        model = runner.get_model()
        hidden = torch.randn(rows, model.config.hidden_size, dtype=runner.dtype)
        with torch.inference_mode():
            logits = model.compute_logits(hidden)
            plain = model.logits_processor.base_layer(getattr(model.lm_head, "base_layer", model.lm_head), hidden)
        return torch.equal(logits, plain)

    def rehearse(self, tokens: int, adapters: int) -> Json:
        """Run a step as vLLM does before and in a capture: whether it was adapted, and whether as a rehearsal."""
        runner = self._runner()
        steps = runner.lora_manager._adapter_manager.steps
        runner._dummy_run(tokens, num_active_loras=adapters, remove_lora=False)
        return [steps.adapted, steps.rehearses(tokens)]

    def graphs(self, rows: list[Json], tokens: int) -> Json:
        """Answer rows; return for how many active adapters the graph of each step would be, were there any here.

        And those of the largest size, in the order in which they would be captured.
        """
        dispatcher, chosen = self._runner().cudagraph_dispatcher, []
        config = dispatcher.compilation_config
        config.cudagraph_capture_sizes, config.max_cudagraph_capture_size = [1, 2, 4, 8], 8
        gpu = CudagraphDispatcher(dispatcher.vllm_config)
        gpu.initialize_cudagraph_keys(CUDAGraphMode.FULL_DECODE_ONLY)
        dispatch = dispatcher.dispatch

        def noted(*args: Json, **named: Json) -> Json:
            chosen.append(gpu.dispatch(*args, **named)[1].num_active_loras)
            return dispatch(*args, **named)

        dispatcher.dispatch = noted
        try:
            self.generate(rows, tokens)
        finally:
            del dispatcher.dispatch
        ((_, captured),) = gpu.get_capture_descs()
        return [chosen, [one.num_active_loras for one in captured if one.num_tokens == captured[0].num_tokens]]

    def end_of_rehearsals(self) -> Json:
        """Remove the stand-ins, as vLLM does after captures: whether steps are still taken for rehearsals."""
        runner = self._runner()
        runner.maybe_remove_all_loras(runner.lora_config)
        return runner.lora_manager._adapter_manager.steps.rehearsing

    def left(self) -> int:
        """Return how many requests are there for ever after a call was refused, and remove them.

        With such a request the next call would never return. In several processes a step waits for the others, so this
        can't be asked.
        """
        engine = self.llm.llm_engine
        for _ in range(STEPS if IN_ONE_PROCESS else 0):
            if not engine.has_unfinished_requests():
                return 0
            engine.step()
        stale = list(engine.output_processor.request_states) if IN_ONE_PROCESS else []
        engine.abort_request(stale, internal=True)
        return len(stale)


def _chain(error: BaseException | None) -> str:
    texts = []
    while error is not None:
        texts.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return "\n".join(texts)


def _answer(act: Callable[[], Json], left: Callable[[], int]) -> Json:
    try:
        return {"value": act()}
    except Exception as error:  # noqa: BLE001 - the test reads what was refused, and why
        return {"refused": _chain(error), "left": left()}


def main() -> None:
    """Serve commands until standard input ends."""
    with os.fdopen(int(sys.argv[1]), "w", buffering=1) as answers:
        commands: list[Commands] = []
        started = _answer(lambda: commands.append(Commands(json.loads(sys.stdin.readline()))), lambda: 0)
        print(json.dumps(started), file=answers)
        for line in sys.stdin if commands else ():
            name, arguments = json.loads(line)
            command = getattr(commands[0], name)
            print(json.dumps(_answer(lambda: command(**arguments), commands[0].left)), file=answers)  # noqa: B023 - called at once
    if IN_ONE_PROCESS:
        os._exit(0)  # nothing to put away, and the interpreter takes seconds to take vLLM apart


if __name__ == "__main__":
    main()

"""Measures the error of vLLM's log-probabilities with the plugin against PEFT in float32, and PEFT's error in bf16.

    PYTHONPATH=. python benchmarks/vllm_exactness.py prepare --work WORK_FOLDER   # in an environment with PEFT
    PYTHONPATH=. python benchmarks/vllm_exactness.py measure --work WORK_FOLDER   # with vLLM and the plugin

One batch of a small random Llama has several prompts for each of nine adapters of all five methods and for the base.
The error is the mean over the log-probabilities of the twenty most likely next tokens; the effect of an adapter is its
mean difference from the base. Two more comparisons: the log-probabilities after a decode step with those of a prefill
of the longer prompt, which run different kernels; and those of plain adapters in a batch of their own, for which a GPU
captures separate graphs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from tests.support.adapters import Config

PROMPTS, LENGTH, TOP = 6, 12, 20
PLAIN = ("base", "lora", "lora-2", "dora", "rsdora", "ia3")
"""Adapters without shared pairs and rotations."""


def configs() -> Mapping[str, Config]:
    """Return the configurations of the adapters by name."""
    from tests.support.adapters import RECIPES, lora, oft, vera
    from tests.support.bases import ATTENTION

    two_layers = vera(r=64, target_modules=["v_proj", "down_proj"]).config
    return {
        "lora": lora(r=16, lora_alpha=24),
        "lora-2": lora(r=5, lora_alpha=4, target_modules=["q_proj", "v_proj"]),
        "dora": lora(r=8, lora_alpha=16, use_dora=True),
        "rsdora": lora(r=8, lora_alpha=8, use_dora=True, use_rslora=True, target_modules=list(ATTENTION)),
        "ia3": RECIPES["ia3"].config,
        "vera": two_layers,
        "vera-2": two_layers,
        "oft": oft(oft_block_size=32).config,
        "oft-2": oft(oft_block_size=16, target_modules=["q_proj", "v_proj", "down_proj"]).config,
    }


def prompts() -> list[list[int]]:
    """Return the prompts, the same in every process."""
    drawn = torch.randint(3, 500, (PROMPTS, LENGTH), generator=torch.Generator().manual_seed(11))
    return [[int(token) for token in row] for row in drawn]


def prepare(work: Path, tp: int) -> None:
    """Write base, adapters, artifacts in every dtype for `tp` ranks, and PEFT's log-probabilities for every prompt."""
    import transformers
    from peft import PeftModel, get_peft_model

    import scute_compile as scute
    from scute_compile.ir.dtypes import DType, torch_dtype
    from scute_compile.ir.target import Target
    from tests.support.adapters import draw, normal, relative
    from tests.support.bases import Sites

    _write_base(work / "base")

    def base(dtype: torch.dtype) -> Any:  # noqa: ANN401 - transformers does not annotate it
        return transformers.AutoModelForCausalLM.from_pretrained(work / "base", dtype=dtype)

    expected = {"base": {dtype.value: _logprobs(base(torch_dtype(dtype.value))) for dtype in DType}}
    draws = {
        "magnitude": relative(0.05),
        "ia3_l": normal(0.1, mean=1),
        "vera_lambda": normal(0.5),
        "oft_R": normal(0.02),
        "": normal(0.05),
    }
    for number, (name, config_of) in enumerate(configs().items()):
        model = get_peft_model(base(torch.float32), config_of(Sites()))
        draw(model, number, draws)
        model.save_pretrained(work / "adapters" / name)
        expected[name] = {
            dtype.value: _logprobs(
                PeftModel.from_pretrained(
                    base(torch_dtype(dtype.value)), work / "adapters" / name, autocast_adapter_dtype=False
                ).to(torch_dtype(dtype.value))
            )
            for dtype in DType
        }
        for dtype in DType:
            report = scute.compile(
                work / "adapters" / name,
                base=work / "base",
                target=Target(tp=tp, dtype=dtype),
                store=work / dtype.value,
                name=name,
            )
            report.raise_if_refused()
    flat = {f"{name}/{kind}": value for name, by_dtype in expected.items() for kind, value in by_dtype.items()}
    save_file({key: value.contiguous() for key, value in flat.items()}, work / "expected.safetensors")
    (work / "names.json").write_text(json.dumps(list(expected)))


def _write_base(folder: Path) -> None:
    import transformers

    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=512,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def _logprobs(model: Any) -> torch.Tensor:  # noqa: ANN401 - transformers and PEFT do not annotate it
    """Return log-probabilities of the next token: `(prompts, vocabulary)`."""
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(prompts())).logits[:, -1]
    return torch.log_softmax(logits.double(), -1)


def engine(work: Path, dtype: str, tp: int, adapters: int) -> Any:  # noqa: ANN401 - vLLM's class
    """Return vLLM with LoRA enabled; on a GPU with CUDA graphs, on a CPU without."""
    from vllm import LLM

    options: dict[str, Any] = {"enforce_eager": True}
    if torch.cuda.is_available():
        options = {
            "attention_backend": "TRITON_ATTN",
            "max_num_batched_tokens": 2048,
            "compilation_config": {"custom_ops": ["none"], "cudagraph_capture_sizes": [1, 64]},
        }
    return LLM(
        str(work / "base"),
        skip_tokenizer_init=True,
        dtype=dtype,
        enable_lora=True,
        max_loras=adapters,
        max_lora_rank=16,
        tensor_parallel_size=tp,
        gpu_memory_utilization=0.3,  # on a CPU, of the host's memory
        max_model_len=256,
        max_num_seqs=64,
        enable_prefix_caching=False,
        **options,
    )


def measure(work: Path, dtype: str, tp: int, out: Path | None) -> None:
    """Generate two tokens for all prompts and adapters in one batch, and print a row per adapter."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    stored = load_file(work / "expected.safetensors")
    names: list[str] = json.loads((work / "names.json").read_text())
    expected = {name: {kind: stored[f"{name}/{kind}"] for kind in ("float32", "bfloat16")} for name in names}
    llm = engine(work, dtype, tp, len(names))
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=TOP, detokenize=False)
    rows = [(prompt, number, name) for prompt in prompts() for number, name in enumerate(names)]
    requests = [
        None if name == "base" else LoRARequest(name, number, str(work / dtype / name)) for _, number, name in rows
    ]

    def outputs(prompt_ids: Sequence[Sequence[int]], which: Sequence[int]) -> list[Any]:
        batch = [{"prompt_token_ids": [*ids]} for ids in prompt_ids]
        answers = llm.generate(batch, sampling, lora_request=[requests[row] for row in which], use_tqdm=False)
        return [answer.outputs[0] for answer in answers]

    every = range(len(rows))
    decoded = outputs([prompt for prompt, _, _ in rows], every)
    prefilled = outputs([[*rows[row][0], decoded[row].token_ids[0]] for row in every], every)
    plain = [row for row in every if rows[row][2] in PLAIN]
    alone = dict(zip(plain, outputs([rows[row][0] for row in plain], plain), strict=True))
    table = []
    for number, name in enumerate(names):
        which = every[number :: len(names)]
        gaps = [_difference(decoded[row].logprobs[1], prefilled[row].logprobs[0]) for row in which]
        plain_gaps = [_difference(alone[row].logprobs[1], prefilled[row].logprobs[0]) for row in which if name in PLAIN]
        table.append(
            {
                **_row(name, [decoded[row] for row in which], expected),
                "decode": _mean(gaps),
                "plain": _mean(plain_gaps) if plain_gaps else None,
            }
        )
    for row in table:
        ratio = f"{row['ratio']:.2f}" if row["ratio"] else ""
        sys.stdout.write(
            f"{row['adapter']:<10}error {row['error']:.2e}  effect {row['effect']:.2e}  "
            f"PEFT in bf16 {row['peft']:.2e}  ratio {ratio:<5}  "
            f"PEFT's token {row['tokens']} of {PROMPTS}  decode step against prefill {row['decode']:.2e}"
            + (f", in a plain batch {row['plain']:.2e}\n" if row["plain"] is not None else "\n")
        )
    if out:
        out.write_text(json.dumps(table, indent=1))


def _difference(logprobs: Mapping[int, Any], expected: Mapping[int, Any]) -> float:
    """Return the mean difference of the log-probabilities of the tokens that both have."""
    return _mean([abs(logprobs[token].logprob - expected[token].logprob) for token in {*logprobs} & {*expected}])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _row(name: str, outputs: Sequence[Any], expected: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, Any]:
    exact, rounded, base = expected[name]["float32"], expected[name]["bfloat16"], expected["base"]["float32"]
    errors, peft_errors, effects = [], [], []
    tokens = 0
    for number, output in enumerate(outputs):
        tokens += output.token_ids[0] == exact[number].argmax().item()
        for token, found in output.logprobs[0].items():
            errors.append(abs(found.logprob - exact[number, token].item()))
            peft_errors.append(abs((rounded - exact)[number, token].item()))
            effects.append(abs((exact - base)[number, token].item()))
    error, peft_error = _mean(errors), _mean(peft_errors)
    return {
        "adapter": name,
        "error": error,
        "effect": _mean(effects),
        "peft": peft_error,
        "ratio": error / peft_error if peft_error else None,
        "tokens": tokens,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["prepare", "measure"])
    parser.add_argument("--work", type=Path, required=True, help="folder that `prepare` writes and `measure` reads")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--tp", type=int, default=1, help="ranks; equal in both actions")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args()
    if options.action == "prepare":
        prepare(options.work, options.tp)
    else:
        measure(options.work, options.dtype, options.tp, options.json)

"""Error of an engine's log-probabilities against PEFT in float32, beside the error that PEFT itself makes in bf16.

    python benchmarks/vllm_exactness.py prepare --work WORK_FOLDER            # needs PEFT
    python benchmarks/vllm_exactness.py measure --work WORK_FOLDER --dtype bfloat16   # needs vLLM and the plugin

Nine adapters of all five methods and the base, several prompts each, all in one batch of a small random Llama. Compared
are the log-probabilities of the twenty likeliest next tokens; the effect is the adapter's own, against the base. A
token further, what a decode step says is compared with a prefill of the longer prompt: the two run on different
kernels. Plain adapters are asked once more by themselves, since on a GPU such steps have captured graphs of their own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

PROMPTS, LENGTH, TOP = 6, 12, 20
PLAIN = ("base", "lora", "lora-2", "dora", "rsdora", "ia3")
"""Nothing shared, and no input turned."""


def configs() -> Mapping[str, Callable[[], object]]:
    """Return how each adapter is made."""
    from peft import IA3Config, LoraConfig, OFTConfig, VeraConfig

    every = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    task: Any = {"task_type": "CAUSAL_LM"}
    return {
        "lora": lambda: LoraConfig(r=16, lora_alpha=24, target_modules=every, **task),
        "lora-2": lambda: LoraConfig(r=5, lora_alpha=4, target_modules=["q_proj", "v_proj"], **task),
        "dora": lambda: LoraConfig(r=8, lora_alpha=16, use_dora=True, target_modules=every, **task),
        "rsdora": lambda: LoraConfig(r=8, use_dora=True, use_rslora=True, target_modules=every[:4], **task),
        "ia3": lambda: IA3Config(
            target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], **task
        ),
        "vera": lambda: VeraConfig(r=64, target_modules=["v_proj", "down_proj"], **task),
        "vera-2": lambda: VeraConfig(r=64, target_modules=["v_proj", "down_proj"], **task),
        "oft": lambda: OFTConfig(oft_block_size=32, target_modules=every, **task),
        "oft-2": lambda: OFTConfig(oft_block_size=16, target_modules=["q_proj", "v_proj", "down_proj"], **task),
    }


def prompts() -> list[list[int]]:
    """Return the prompts, the same everywhere."""
    drawn = torch.randint(3, 500, (PROMPTS, LENGTH), generator=torch.Generator().manual_seed(11))
    return [[int(token) for token in row] for row in drawn]


def prepare(work: Path, tp: int) -> None:
    """Write base, adapters, artifacts in every dtype for `tp` ranks, and what PEFT says of every prompt."""
    import transformers
    from peft import PeftModel, get_peft_model

    import scute_compile as scute
    from scute_compile.ir.dtypes import DType, torch_dtype
    from scute_compile.ir.target import Target

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
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(work / "base")

    def base(dtype: torch.dtype) -> Any:  # noqa: ANN401 - transformers' own
        return transformers.AutoModelForCausalLM.from_pretrained(work / "base", dtype=dtype)

    expected = {"base": {dtype.value: _says(base(torch_dtype(dtype.value))) for dtype in DType}}
    for number, (name, made) in enumerate(configs().items()):
        model = get_peft_model(base(torch.float32), made())
        _draw(model, number)
        model.save_pretrained(work / "adapters" / name)
        expected[name] = {
            dtype.value: _says(
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
    flat = {f"{name}/{kind}": value.contiguous() for name, said in expected.items() for kind, value in said.items()}
    save_file(flat, work / "expected.safetensors")
    (work / "names.json").write_text(json.dumps(list(expected)))


def _draw(model: torch.nn.Module, seed: int) -> None:
    """Draw what is learned away from the identity: the size that some training gives it."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator)
            scale = {"magnitude": 0.05, "ia3_l": 0.1, "vera_lambda": 0.5, "oft_R": 0.02}
            near = next((value for part, value in scale.items() if part in name), 0.05)
            if "magnitude" in name or "ia3_l" in name:
                parameter.data = parameter.data * (1 + near * noise)
            else:
                parameter.data = near * noise


def _says(model: Any) -> torch.Tensor:  # noqa: ANN401 - transformers' or PEFT's
    """Return log-probabilities of the next token: `(prompts, vocabulary)`."""
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(prompts())).logits[:, -1]
    return torch.log_softmax(logits.double(), -1)


def measure(work: Path, dtype: str, tp: int, out: Path | None) -> None:
    """Ask an engine with every adapter loaded, all prompts in one batch, and print a row per adapter."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    gpu = torch.cuda.is_available()
    options: dict[str, Any] = {"enforce_eager": True}
    if gpu:
        options = {
            "attention_backend": "TRITON_ATTN",
            "gpu_memory_utilization": 0.3,
            "max_num_batched_tokens": 2048,
            "compilation_config": {"custom_ops": ["none"], "cudagraph_capture_sizes": [1, 64]},
        }
    stored = load_file(work / "expected.safetensors")
    names: list[str] = json.loads((work / "names.json").read_text())
    expected = {name: {kind: stored[f"{name}/{kind}"] for kind in ("float32", "bfloat16")} for name in names}
    llm = LLM(
        str(work / "base"),
        skip_tokenizer_init=True,
        dtype=dtype,
        enable_lora=True,
        max_loras=len(names),
        max_lora_rank=16,
        tensor_parallel_size=tp,
        max_model_len=256,
        max_num_seqs=64,
        enable_prefix_caching=False,
        **options,
    )
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=TOP, detokenize=False)
    asked, requests = [], []
    for prompt in prompts():
        for number, name in enumerate(names):
            asked.append({"prompt_token_ids": prompt})
            path = str(work / dtype / name)
            requests.append(None if name == "base" else LoRARequest(name, number, path))
    answers = llm.generate(asked, sampling, lora_request=requests, use_tqdm=False)
    longer = [
        {"prompt_token_ids": [*one["prompt_token_ids"], answer.outputs[0].token_ids[0]]}
        for one, answer in zip(asked, answers, strict=True)
    ]
    again = llm.generate(longer, sampling, lora_request=requests, use_tqdm=False)
    plain = [place for place in range(len(asked)) if names[place % len(names)] in PLAIN]
    alone = llm.generate(
        [asked[place] for place in plain], sampling, lora_request=[requests[place] for place in plain], use_tqdm=False
    )
    by_place = dict(zip(plain, alone, strict=True))
    rows = []
    for number, name in enumerate(names):
        own = range(number, len(asked), len(names))
        gaps = [_gap(answers[place].outputs[0].logprobs[1], again[place].outputs[0].logprobs[0]) for place in own]
        row = _row(name, [answers[place] for place in own], expected)
        rows.append({**row, "decode": sum(gaps) / len(gaps), "plain": None})
        if name in PLAIN:
            pairs = [(by_place[place].outputs[0].logprobs, again[place].outputs[0].logprobs) for place in own]
            rows[-1]["plain"] = sum(_gap(mine[1], theirs[0]) for mine, theirs in pairs) / len(pairs)
    for row in rows:
        ratio = f"{row['ratio']:.2f}" if row["ratio"] else ""
        sys.stdout.write(
            f"{row['adapter']:<10}error {row['error']:.2e}  effect {row['effect']:.2e}  "
            f"PEFT in bf16 {row['peft']:.2e}  ratio {ratio:<5}  "
            f"PEFT's token {row['tokens']} of {PROMPTS}  a decode step from a prefill {row['decode']:.2e}"
            + (f", among plain ones {row['plain']:.2e}\n" if row["plain"] is not None else "\n")
        )
    if out:
        out.write_text(json.dumps(rows, indent=1))


def _gap(ours: Mapping[int, Any], theirs: Mapping[int, Any]) -> float:
    """Return the mean difference of the same token's log-probabilities, after a decode step and after a prefill."""
    both = set(ours) & set(theirs)
    return sum(abs(ours[token].logprob - theirs[token].logprob) for token in both) / len(both)


def _row(name: str, answers: Sequence[Any], expected: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, Any]:
    exact, rounded, base = expected[name]["float32"], expected[name]["bfloat16"], expected["base"]["float32"]
    errors, peft, effects = [], [], []
    tokens = 0
    for number, answer in enumerate(answers):
        tokens += answer.outputs[0].token_ids[0] == exact[number].argmax().item()
        for token, said in answer.outputs[0].logprobs[0].items():
            errors.append(abs(said.logprob - exact[number, token].item()))
            peft.append(abs((rounded - exact)[number, token].item()))
            effects.append(abs((exact - base)[number, token].item()))
    error, own, effect = (sum(values) / len(values) for values in (errors, peft, effects))
    return {
        "adapter": name,
        "error": error,
        "effect": effect,
        "peft": own,
        "ratio": error / own if own else None,
        "tokens": tokens,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["prepare", "measure"])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--tp", type=int, default=1, help="ranks; the same for both parts")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.what == "prepare":
        prepare(given.work, given.tp)
    else:
        measure(given.work, given.dtype, given.tp, given.json)

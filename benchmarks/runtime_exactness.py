"""Measures the error of the minimal runtime's log-probabilities against PEFT in float32, and PEFT's error in its dtype.

    PYTHONPATH=. python benchmarks/vllm_exactness.py prepare --work WORK_FOLDER   # in an environment with PEFT
    PYTHONPATH=. python benchmarks/runtime_exactness.py --work WORK_FOLDER --dtype float16

One batch of a small random Llama has several prompts for each of nine adapters of all five methods and for the base; on
a GPU, kernels compute it. Each prompt is computed whole (by the prefill kernels), and with its last token as a decode
step of one token per row (by the decode kernels). Errors are means over the vocabulary; the effect of an adapter is its
mean difference from the base.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from vllm_exactness import prompts

from scute_compile.ir.dtypes import torch_dtype
from scute_compile.runtime_min import ServedModel

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def logprobs_by_step(served: ServedModel, rows: list[str | None], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return log-probabilities of the next token `(rows, vocabulary)`, by kind of step."""
    whole = served.forward(ids, adapter_names=rows).logits[:, -1]
    cache = transformers.DynamicCache()
    served.forward(ids[:, :-1], adapter_names=rows, past_key_values=cache, use_cache=True)
    last = served.forward(ids[:, -1:], adapter_names=rows, past_key_values=cache, use_cache=True).logits[:, -1]
    return {
        "prefill": torch.log_softmax(whole.double(), -1).cpu(),
        "decode": torch.log_softmax(last.double(), -1).cpu(),
    }


def measure(work: Path, dtype: str) -> list[dict[str, object]]:
    """Return a row of errors per adapter."""
    stored = load_file(work / "expected.safetensors")
    names: list[str] = json.loads((work / "names.json").read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(work / "base", dtype=torch_dtype(dtype))
    served = ServedModel(
        model.to(DEVICE).eval(), max_adapters=len(names), pool_bytes="40000KiB", max_num_batched_tokens=2048
    )
    for name in names:
        if name != "base":
            served.load_adapter(work / dtype / name, adapter_name=name)
    ids = torch.tensor(prompts(), device=DEVICE)
    rows = [None if name == "base" else name for name in names for _ in range(len(ids))]
    logprobs = logprobs_by_step(served, rows, ids.repeat(len(names), 1))
    table = []
    for number, name in enumerate(names):
        exact, base = stored[f"{name}/float32"], stored["base/float32"]
        effect = (exact - base).abs().mean().item() if name != "base" else 1.0
        batch_rows = slice(number * len(ids), (number + 1) * len(ids))
        peft_error = (stored[f"{name}/{dtype}"] - exact).abs().mean().item()
        errors = {step: (found[batch_rows] - exact).abs().mean().item() for step, found in logprobs.items()}
        table.append(
            {
                "adapter": name,
                "effect": effect,
                "peft": peft_error / effect,
                **{step: error / effect for step, error in errors.items()},
                "ratio": max(errors.values()) / peft_error if peft_error else None,
            }
        )
    return table


def main() -> None:
    """Measure, print the table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder written by `vllm_exactness.py prepare`")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float16")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args()
    rows = measure(options.work, options.dtype)
    machine = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "a CPU"
    sys.stdout.write(f"{options.dtype} on {machine}: mean error of log-probabilities over the adapter's mean effect\n")
    for row in rows:
        ratio = f"{row['ratio']:.2f}" if row["ratio"] else "-"
        sys.stdout.write(
            f"{row['adapter']:<8}  effect {row['effect']:.3f}  PEFT {row['peft']:.2e}  prefill {row['prefill']:.2e}  "
            f"decode {row['decode']:.2e}  at most {ratio} times PEFT's\n"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

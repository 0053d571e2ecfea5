"""Times a decode step of vLLM, stock and with the plugin, with one request on each of many adapters.

    PYTHONPATH=. python benchmarks/vllm_steps.py --shape llama-3.1-8b --work WORK_FOLDER --json vllm_steps.json   # GPU
    PYTHONPATH=. python benchmarks/vllm_steps.py --shape tiny --work WORK_FOLDER            # CPU: tests the script only

The base has dummy weights; the adapters come from `serving_adapters.py`. Each engine runs in a separate process. The
time of a step is the difference of the times of two generations over the difference of their lengths; the figure is the
median of several tries. With `--gpus 2` the stock engines run on one GPU and the plugin's on the other, at once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scute_compile.base.shapes import SHAPES as MODEL_SHAPES
from scute_compile.base.shapes import ModelShape, gated_shape

SHAPES = {
    "llama-3.1-8b": (MODEL_SHAPES["llama-3.1-8b"], 32),
    "tiny": (gated_shape("tiny", layers=2, hidden=128, kv=64, mlp=256), 4),
}
MIXED = ("lora", "dora", "ia3", "vera", "oft")
WITHOUT_VERA = ("lora", "dora", "ia3", "oft")


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """An engine, and the mixes of adapters that it is timed on."""

    name: str
    plugin: bool
    max_rank: int
    mixes: Mapping[str, Sequence[str]]
    """Adapters by name of the mix. Request i uses adapter i modulo their number; none: the base.

    `folder:NAME` is a PEFT folder instead of an artifact.
    """


ENGINES = (
    Engine(name="stock", plugin=False, max_rank=16, mixes={"base": (), "lora": ("folder:lora",)}),
    Engine(
        name="stock, one of rank 64",
        plugin=False,
        max_rank=64,
        mixes={"lora": ("folder:lora",), "lora and one of rank 64": ("folder:lora-64", *["folder:lora"] * 1000)},
    ),
    Engine(
        name="plugin",
        plugin=True,
        max_rank=64,
        mixes={
            "base": (),
            "stock folders": ("folder:lora",),
            "lora": ("lora",),
            "dora": ("dora",),
            "ia3": ("ia3",),
            "oft": ("oft",),
            "vera": ("vera",),
            "without vera": WITHOUT_VERA,
            "five methods": MIXED,
            "lora and one of rank 64": ("lora-64", *["lora"] * 1000),
        },
    ),
    Engine(
        name="plugin, ranks up to 16",
        plugin=True,
        max_rank=16,
        mixes={
            "base": (),
            "stock folders": ("folder:lora",),
            "lora": ("lora",),
            "dora": ("dora",),
            "without vera": WITHOUT_VERA,
            "five methods": MIXED,
        },
    ),
)


def main() -> None:
    """Write the adapters, run every engine, print the table, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--tenants", type=int, default=20, help="requests, each with its adapter")
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for configuration, adapters and artifacts; kept"
    )
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument(
        "--gpus",
        type=int,
        default=1,
        help="2: stock engines on the first GPU, the plugin's engines on the second, at once",
    )
    parser.add_argument("--mixes", nargs="+", help="measure only these mixes")
    parser.add_argument("--engine", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.engine is not None:
        measure(chosen, ENGINES[chosen.engine])
        return
    prepare(chosen)
    queues: list[list[int]] = [[] for _ in range(max(1, chosen.gpus))]
    for number, engine in enumerate(ENGINES):
        queues[-1 if engine.plugin else 0].append(number)
    with ThreadPoolExecutor(len(queues)) as pool:
        futures = [pool.submit(run_engines, chosen, queue, gpu) for gpu, queue in enumerate(queues)]
    rows = [row for future in futures for row in future.result()]
    table(rows)
    if chosen.json:
        chosen.json.write_text(json.dumps(rows, indent=1))


def run_engines(chosen: argparse.Namespace, numbers: Sequence[int], gpu: int) -> list[dict[str, Any]]:
    """Run engines one after another on one GPU, each in a separate process."""
    rows: list[dict[str, Any]] = []
    for number in numbers:
        engine = ENGINES[number]
        environment = {**os.environ, **({} if engine.plugin else {"VLLM_PLUGINS": "none"})}
        if chosen.gpus > 1:
            environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
        done = subprocess.run(
            [sys.executable, __file__, *sys.argv[1:], "--engine", str(number)],
            env=environment,
            check=False,
            stdout=subprocess.PIPE,
            text=True,
        )
        measured = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("ROW ")]
        rows += measured or [{"engine": engine.name, "mix": f"failed, status {done.returncode}", "ms": None}]
    return rows


def shape_of(chosen: argparse.Namespace) -> tuple[ModelShape, int]:
    """Return the model's shape and its number of attention heads."""
    shape, heads = SHAPES[chosen.shape]
    return replace(shape, layers=chosen.layers or shape.layers), heads


def prepare(chosen: argparse.Namespace) -> None:
    """Write the configuration, the PEFT folders and the artifacts, unless they exist."""
    from serving_adapters import compile_all, write_adapters, write_config

    shape, heads = shape_of(chosen)
    if not (chosen.work / "ready").exists():
        base = write_config(chosen.work / "base", shape, heads=heads)
        compile_all(write_adapters(chosen.work / "folders", shape), base, chosen.work / "store")
        (chosen.work / "ready").touch()


def measure(chosen: argparse.Namespace, engine: Engine) -> None:
    """Start an engine and print a line of JSON for each mix."""
    import torch
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    gpu = torch.cuda.is_available()
    options: dict[str, Any] = {"dtype": "bfloat16"} if gpu else {"dtype": "float32", "enforce_eager": True}
    if gpu:
        sizes = [1, chosen.tenants]
        options |= {
            "attention_backend": "TRITON_ATTN",
            "compilation_config": {"custom_ops": ["none"], "cudagraph_capture_sizes": sizes},
        }
    llm = LLM(
        str(chosen.work / "base"),
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_lora=True,
        max_loras=chosen.tenants,
        max_lora_rank=engine.max_rank,
        gpu_memory_utilization=0.8 if gpu else 0.3,  # on a CPU, of the host's memory
        max_model_len=512,
        max_num_batched_tokens=2048,
        max_num_seqs=max(32, chosen.tenants),
        enable_prefix_caching=False,
        **options,
    )
    short, long, tries = (16, 80, 5) if gpu else (2, 4, 1)

    def seconds(tokens: int, requests: list[Any]) -> float:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": [3 + number] * 8} for number in range(chosen.tenants)]
        start = time.perf_counter()
        llm.generate(prompts, sampling, lora_request=requests, use_tqdm=False)
        return time.perf_counter() - start

    serial = 0
    for mix, adapters in engine.mixes.items():
        if chosen.mixes and mix not in chosen.mixes:
            continue
        requests: list[Any] = [None] * chosen.tenants
        for row in range(chosen.tenants if adapters else 0):
            serial += 1
            name = adapters[row % len(adapters)]
            folder = chosen.work / ("folders" if name.startswith("folder:") else "store") / name.removeprefix("folder:")
            requests[row] = LoRARequest(f"{name}-{serial}", serial, str(folder))
        first = seconds(short, requests)  # includes loading the adapters
        times = [(seconds(long, requests) - seconds(short, requests)) / (long - short) for _ in range(tries)]
        step = round(statistics.median(times) * 1e3, 3)
        row_out = {"engine": engine.name, "mix": mix, "ms": step, "first_s": round(first, 2)}
        sys.stdout.write("ROW " + json.dumps(row_out) + "\n")
        sys.stdout.flush()
        with (chosen.work / "rows.jsonl").open("a") as file:  # keeps the figures of a run that is interrupted
            file.write(json.dumps(row_out) + "\n")


def table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows with their ratios to plain LoRA on the same engine."""
    lora = {row["engine"]: row["ms"] for row in rows if row["mix"] == "lora"}
    for row in rows:
        ratio = f"{row['ms'] / lora[row['engine']]:7.3f}" if row["ms"] and lora.get(row["engine"]) else " " * 7
        sys.stdout.write(f"{row['engine']:<24}{row['mix']:<28}{row['ms'] or '':>9} ms {ratio} of its plain LoRA\n")


if __name__ == "__main__":
    main()

"""Times the prefill kernels over several adapters, beside vLLM's kernels and copy bandwidth: one GPU, one call.

    PYTHONPATH=. python benchmarks/prefill.py --json prefill.json

Llama-3.1-8B's four fused GEMMs in bf16, one layer's worth, four distinct layers in turn, 4096 tokens over 8 adapters,
CUDA graph replays, medians. vLLM's kernels are timed in the same run if `.vllm_ops` exists. Beside whole steps: the
expand alone with and without an output scale, and the rotation alone against a copy of as many bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from decode_step import (
    DEVICE,
    DISTINCT_LAYERS,
    DTYPE,
    GEMMS,
    Base,
    Pool,
    gemm_of,
    kernel_ms,
    median_ms,
    normal,
)

from scute_compile.runtime_min.step import launch_prefill
from scute_compile.runtime_min.step.arguments import Gemm
from scute_compile.runtime_min.step.launch import empty_intermediates

POOLS = {
    "lora": ("lora",),
    "dora": ("dora",),
    "ia3": ("ia3",),
    "oft": ("oft",),
    "vera": ("vera",),
    "all five": ("lora", "dora", "ia3", "vera", "oft"),
}
Layer = Callable[[int, int, torch.Tensor], object]


def layer_ms(base: Base, layer: Layer) -> float:
    """Return the time of one layer's four GEMMs in milliseconds."""

    def run() -> None:
        for distinct in range(DISTINCT_LAYERS):
            for index in range(len(GEMMS)):
                layer(distinct, index, base.weights[distinct][index])

    return median_ms(run, 10) / DISTINCT_LAYERS


def vllm_ms(base: Base, adapters: int, rows: int, xs: Sequence[torch.Tensor]) -> float:
    """Return the layer's time with vLLM's kernels, all adapters plain LoRA of rank 16."""
    from vllm_baseline import VllmLayer, load

    ops = load()
    layers = [
        [
            VllmLayer.random(ops, widths=w, inputs=k, max_loras=adapters, rank=16, dtype=DTYPE, device=DEVICE)
            for _, k, w in GEMMS
        ]
        for _ in range(DISTINCT_LAYERS)
    ]
    meta = ops.meta(torch.arange(adapters, dtype=torch.int32, device=DEVICE).repeat_interleave(rows), adapters)

    def run(distinct: int, index: int, weight: torch.Tensor) -> None:
        y = torch.nn.functional.linear(xs[index], weight)
        layers[distinct][index].run(xs[index], y, meta)

    return layer_ms(base, run)


def expand_ms(pool: Pool, xs: Sequence[torch.Tensor]) -> float:
    """Return the time of a layer's four expands alone."""

    def run(index: int, gemm: Gemm) -> None:
        held = empty_intermediates(xs[index], gemm, pool.buffers, pool.features)
        launch_prefill.expand(outputs[index], held, None, pool.tensors, pool.buffers, gemm, pool.features, len(xs[0]))

    outputs = [normal(len(xs[0]), sum(widths)) for _, _, widths in GEMMS]
    return kernel_ms(run)


def scaled_expands(adapters: int, rows: int, xs: Sequence[torch.Tensor], rounds: int = 7) -> dict[str, float]:
    """Return the times of a layer's expands without and with an output scale, and the median of their ratios.

    The two are measured in turn: a card's clock moves by more than they differ.
    """
    plain, scaled = (Pool([(method, 16)] * adapters, rows=rows) for method in ("lora", "dora"))
    times = [(expand_ms(plain, xs), expand_ms(scaled, xs)) for _ in range(rounds)]
    return {
        "lora": statistics.median(a for a, _ in times),
        "dora": statistics.median(b for _, b in times),
        "with scale": statistics.median(b / a for a, b in times),
    }


def rotation(pool: Pool, xs: Sequence[torch.Tensor]) -> list[dict[str, float]]:
    """Return, for each GEMM, the bytes that the rotation must move and its rate beside a copy's."""
    rows = []
    for index, (_, k, widths) in enumerate(GEMMS):
        x, gemm = xs[index], gemm_of(0, index)

        def rotate(x: torch.Tensor = x, gemm: Gemm = gemm) -> torch.Tensor:
            return launch_prefill.rotate(x, pool.tensors, pool.buffers, gemm, pool.features)

        taken = median_ms(rotate, 20)
        moved = x.numel() * 2 * (2 + len(widths))  # x in; a copy and one delta row per slice out
        source = torch.empty(moved // 4, dtype=DTYPE, device=DEVICE)
        target = torch.empty_like(source)
        copied = median_ms(lambda a=source, b=target: b.copy_(a), 20)
        rows.append({"inputs": k, "MB": moved / 1e6, "ms": taken, "of copy": copied / taken})
    return rows


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the numbers go")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--adapters", type=int, default=8)
    options = parser.parse_args()
    each = options.tokens // options.adapters
    base = Base.random()
    xs = [normal(options.tokens, k) for _, k, _ in GEMMS]
    plain = layer_ms(base, lambda _, index, weight: torch.nn.functional.linear(xs[index], weight))
    print(f"{torch.cuda.get_device_name()}, {options.tokens} tokens: base {plain:.3f} ms per layer", flush=True)
    result: dict[str, object] = {"device": torch.cuda.get_device_name(), "tokens": options.tokens, "base_ms": plain}
    for name, methods in POOLS.items():
        pool = Pool([(methods[i % len(methods)], 16) for i in range(options.adapters)], rows=each)
        step = layer_ms(base, pool.layer(xs))
        result[name] = {"ms": step, "added_ms": step - plain}
        print(f"  {name:10s} {step:7.3f}  added {step - plain:7.3f}", flush=True)
        if name == "oft":
            result["rotation"] = rotation(pool, xs)
        del pool
        torch.cuda.empty_cache()
    result["expand"] = expands = scaled_expands(options.adapters, each, xs)
    print(f"  expand alone {expands['lora']:.3f} ms, with output scale {expands['with scale']:.3f} times")
    for row in result["rotation"]:  # type: ignore[attr-defined] # a list of rows
        print(
            f"  rotation, {row['inputs']} inputs: {row['MB']:.0f} MB in {row['ms']:.3f} ms, "
            f"{row['of copy']:.2f} of a copy's rate"
        )
    if (Path(__file__).parent.parent / ".vllm_ops").is_dir():
        step = vllm_ms(base, options.adapters, each, xs)
        result["vllm lora"] = {"ms": step, "added_ms": step - plain}
        print(f"  vLLM, LoRA {step:7.3f}  added {step - plain:7.3f}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

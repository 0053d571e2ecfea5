"""Times one decode step with many adapters, beside vLLM's kernels and a floor by bytes: one GPU, one call.

    PYTHONPATH=. python benchmarks/decode_step.py --json decode_step.json

Llama-3.1-8B's layer shapes in bf16, all seven projections as four fused GEMMs, four distinct layers in turn for 32, one
token per tenant, a different adapter per tenant, CUDA graph replays, medians. vLLM's kernels are timed in the same run
if `.vllm_ops` exists (see `unpack_vllm_ops.sh`). Floor: adapter bytes over the read bandwidth of a sum over 2 GiB, plus
launches times the cost of a tiny kernel in a graph, both measured in the run. Model: the prediction of `time_model.py`
from launches of the runtime's kernels and from reads of as many bytes, also measured in the run. `shrink.py`,
`expand.py` and `rotate.py` time the kernels of such a step one by one.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
from step_timing import capture, warm_up
from time_model import Moved, ReadTimes, modelled_ms, moved, read_times

from scute_compile.runtime_min.pool.resident_pool import ResidentPool
from scute_compile.runtime_min.step.arguments import Gemm, PoolTensors, features_of
from scute_compile.runtime_min.step.launch import adapted_linear
from scute_compile.runtime_min.step.plan import Capacity, StepBuffers, plan_step
from tests.support.drawn_adapters import LLAMA_8B, gemms_of, pair_of, sites_of, tenant

DTYPE, DEVICE = torch.bfloat16, torch.device("cuda")
DISTINCT_LAYERS, LAYERS = 4, LLAMA_8B.layers
GEMMS = gemms_of(LLAMA_8B)
FIRSTS = (0, *accumulate(len(widths) for _, _, widths in GEMMS[:-1]))
"""The first site of each GEMM of a layer."""
SITES = len(LLAMA_8B.projections)
PAIR_RANK, BLOCK = 256, 32
LAUNCHES = {"lora": 2, "dora": 2, "ia3": 1, "vera": 2, "oft": 2}
Call = Callable[[], object]
Kernel = Callable[[int, Gemm], object]
"""Launches one kernel, given the index of a GEMM in `GEMMS` and its sites."""


def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Return random values: zeros run faster than real data."""
    return (torch.randn(*shape, device=DEVICE) * scale).to(DTYPE)


def median_ms(call: Call, repeats: int = 20) -> float:
    """Return the median time of a CUDA graph's replay in milliseconds."""
    warm_up(call)
    graph = capture(call)
    times = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def kernel_ms(kernel: Kernel, repeats: int = 20) -> float:
    """Return the median time of one kernel's launches in one layer, on all of its GEMMs, in milliseconds."""

    def run() -> None:
        for distinct in range(DISTINCT_LAYERS):
            for index in range(len(GEMMS)):
                kernel(index, gemm_of(distinct, index))

    return median_ms(run, repeats) / DISTINCT_LAYERS


def gemm_of(distinct: int, index: int) -> Gemm:
    """Return the sites of one GEMM of one distinct layer."""
    return Gemm(first_site=distinct * SITES + FIRSTS[index], widths=GEMMS[index][2])


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """Weights of the distinct layers, in the order of `GEMMS`."""

    weights: tuple[tuple[torch.Tensor, ...], ...]

    @classmethod
    def random(cls) -> Base:
        """Draw random weights."""
        return cls(
            weights=tuple(
                tuple(normal(sum(widths), k, scale=k**-0.5) for _, k, widths in GEMMS) for _ in range(DISTINCT_LAYERS)
            )
        )

    def step(self, layer: Callable[[int, int, torch.Tensor], object]) -> None:
        """Call `layer` for every GEMM of a step."""
        for number in range(LAYERS):
            distinct = number % DISTINCT_LAYERS
            for index in range(len(GEMMS)):
                layer(distinct, index, self.weights[distinct][index])


class Pool:
    """Resident adapters of several methods, and the plan of a step with one or more rows for each."""

    def __init__(
        self, methods: Sequence[tuple[str, int]], *, rows: int = 1, pair_rank: int = PAIR_RANK, block: int = BLOCK
    ) -> None:
        """Load one adapter per `(method, rank)`; more than one row per adapter is a prefill step."""
        sites = sites_of(replace(LLAMA_8B, layers=DISTINCT_LAYERS))
        pair = pair_of(sites, pair_rank, DTYPE) if any(method == "vera" for method, _ in methods) else None
        made = {
            (method, rank): tenant(
                method, sites, DTYPE, rank=rank, block=block, pair=pair if method == "vera" else None
            )
            for method, rank in dict.fromkeys(methods)
        }
        pages = sum(made[key].buffer.numel() // 2048 + 2 for key in methods)
        self.bytes = sum(made[key].buffer.numel() for key in methods) * LAYERS // DISTINCT_LAYERS
        self.resident = ResidentPool(sites, num_pages=pages, max_adapters=len(methods), dtype=DTYPE, device=DEVICE)
        names = [f"{method}-{rank}-{number}" for number, (method, rank) in enumerate(methods)]
        for name, key in zip(names, methods, strict=True):
            self.resident.add(name, made[key])
        adapters = list(self.resident.ensure(names).values())
        torch.cuda.synchronize()
        facts, pairs = self.resident.facts, self.resident.pairs
        rotated = sum(facts[adapter].rotated for adapter in adapters) * rows
        ranks = sum(max(facts[each].rank, facts[each].pair_rank if rows > 1 else 0) for each in adapters) * rows
        capacity = Capacity(
            tokens=len(adapters) * rows,
            ranks=max(16, ranks),
            pairs=max(1, len(pairs)),
            rotated=rotated,
            prefill=rows > 1,
        )
        self.buffers = StepBuffers(capacity, DEVICE)
        plan = plan_step([adapter for adapter in adapters for _ in range(rows)], facts, pairs, capacity)
        self.buffers.fill(plan)
        self.tensors = PoolTensors.of(self.resident.memory)
        self.features = features_of(plan, whole_granules=True)

    def layer(self, xs: Sequence[torch.Tensor]) -> Callable[[int, int, torch.Tensor], object]:
        """Return the adapted layer for `Base.step`."""

        def run(distinct: int, index: int, weight: torch.Tensor) -> torch.Tensor:
            gemm = gemm_of(distinct, index)
            return adapted_linear(xs[index], weight, None, self.tensors, self.buffers, gemm, self.features)

        return run


def pools(tenants: int) -> Mapping[str, Sequence[tuple[str, int]]]:
    """Return the mixes that are measured."""

    def cycle(*methods: str) -> list[tuple[str, int]]:
        return [(methods[i % len(methods)], 16) for i in range(tenants)]

    mixes = {method: cycle(method) for method in ("lora", "dora", "ia3", "oft", "vera")}
    mixes["lora+dora+ia3+oft"] = cycle("lora", "dora", "ia3", "oft")
    mixes["all five"] = cycle("lora", "dora", "ia3", "vera", "oft")
    if tenants == 20:
        mixes["one of rank 256"] = [*cycle("lora")[:-1], ("lora", 256)]
        mixes["vera, 1"], mixes["vera, 16"] = [("vera", 16)], [("vera", 16)] * 16
    return mixes


def vllm_step(base: Base, tenants: int, rank: int, xs: Sequence[torch.Tensor]) -> float:
    """Return the whole step's time with vLLM's kernels, all tenants plain LoRA of one rank."""
    from vllm_baseline import VllmLayer, load

    ops = load()
    layers = [
        [
            VllmLayer.random(ops, widths=w, inputs=k, max_loras=tenants, rank=rank, dtype=DTYPE, device=DEVICE)
            for _, k, w in GEMMS
        ]
        for _ in range(DISTINCT_LAYERS)
    ]
    meta = ops.meta(torch.arange(tenants, dtype=torch.int32, device=DEVICE), tenants)

    def run(distinct: int, index: int, weight: torch.Tensor) -> None:
        y = torch.nn.functional.linear(xs[index], weight)
        layers[distinct][index].run(xs[index], y, meta)

    return median_ms(lambda: base.step(run))


def ceilings() -> tuple[float, float]:
    """Return read bandwidth in bytes per second, and the cost of a tiny kernel in a graph in seconds."""
    big = torch.ones(1 << 30, dtype=DTYPE, device=DEVICE)
    read = 2 * big.numel() / (median_ms(big.sum) * 1e-3)
    one = torch.ones(1, device=DEVICE)
    launch = median_ms(lambda: [one.add_(1) for _ in range(1000)]) * 1e-6
    return read, launch


def kernel_options(doc: str | None) -> int:
    """Return the number of tenants that the command line of a kernel's benchmark asks for."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, default=20)
    tenants: int = parser.parse_args().tenants
    print(f"{torch.cuda.get_device_name()}, {tenants} tenants")
    return tenants


def kernel_table(
    doc: str | None,
    mixes: Sequence[tuple[str, str, int, int]],
    time_ms: Callable[[Pool, Sequence[torch.Tensor]], float],
    bytes_read: Callable[[Moved], int],
) -> None:
    """Print the time of a kernel in a step for each mix of adapters, and its floor by bytes.

    Args:
        doc: Description of the command.
        mixes: Label, method, rank and width of rotation blocks of all tenants.
        time_ms: Returns the time of the kernel on the GEMMs of a layer in milliseconds.
        bytes_read: Returns the bytes that the kernel reads at a GEMM.
    """
    tenants, (read, _) = kernel_options(doc), ceilings()
    xs = [normal(tenants, k) for _, k, _ in GEMMS]
    for label, method, rank, block in mixes:
        methods = [(method, rank)] * tenants
        traffic = [moved(methods, gemm, pair_rank=PAIR_RANK, block=block, size=DTYPE.itemsize) for gemm in GEMMS]
        floor = LAYERS * sum(map(bytes_read, traffic)) / read * 1e3
        taken = LAYERS * time_ms(Pool(methods, block=block), xs)
        print(f"{label:<17} {taken:6.3f} ms, floor by bytes {floor:6.3f}")
        torch.cuda.empty_cache()


def plain_ms(base: Base, xs: Sequence[torch.Tensor]) -> float:
    """Return the time of a step's base GEMMs."""
    return median_ms(lambda: base.step(lambda _, index, weight: torch.nn.functional.linear(xs[index], weight)))


def launch_costs(base: Base) -> Mapping[str, float]:
    """Return by method the milliseconds that its kernels add at one GEMM with a minimum of bytes to read.

    One tenant of LoRA of rank 1, of IA3, of VeRA on a pair of rank 16 (the expand's least block; two of the shrink's),
    of OFT with blocks of 8, whose rows in the GEMM itself are not counted.
    """
    xs = [normal(1, k) for _, k, _ in GEMMS]
    rotated = [normal(1 + len(widths), k) for _, k, widths in GEMMS]
    plain = dict.fromkeys(("lora", "ia3", "vera"), plain_ms(base, xs)) | {"oft": plain_ms(base, rotated)}
    pools = {method: Pool([(method, 1)], pair_rank=16, block=8) for method in plain}
    costs = {
        method: (median_ms(lambda p=pool: base.step(p.layer(xs))) - plain[method]) / (LAYERS * len(GEMMS))
        for method, pool in pools.items()
    }
    return {**costs, "dora": costs["lora"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Predicts the time that a pool of adapters with one row each adds to a step."""

    read: ReadTimes
    costs: Mapping[str, float]
    """Of `launch_costs`."""

    def __call__(self, base: Base, methods: Sequence[tuple[str, int]], plain: float) -> float:
        """Return milliseconds; `plain` is the time of the base's GEMMs for the same rows."""
        traffic = [moved(methods, gemm, pair_rank=PAIR_RANK, block=BLOCK, size=DTYPE.itemsize) for gemm in GEMMS]
        added = LAYERS * modelled_ms(traffic, [method for method, _ in methods], self.read, self.costs)
        if rotated := sum(method == "oft" for method, _ in methods):
            rows = [normal(len(methods) + rotated * len(widths), k) for _, k, widths in GEMMS]
            added += plain_ms(base, rows) - plain
        return added


def measure(
    base: Base, tenants: int, read: float, launch: float, model: Model, *, with_vllm: bool
) -> dict[str, object]:
    """Measure every pool of one size, printing as it goes."""
    errors = []
    xs = [normal(tenants, k) for _, k, _ in GEMMS]
    plain = plain_ms(base, xs)
    print(f"{tenants} tenants: base GEMMs {plain:.3f} ms", flush=True)
    rows: dict[str, object] = {"base_ms": plain}
    for name, methods in pools(tenants).items():
        pool = Pool(methods)
        inputs = [x[: len(methods)].contiguous() for x in xs]
        base_ms = plain if len(methods) == tenants else plain_ms(base, inputs)
        step = median_ms(lambda p=pool, ins=inputs: base.step(p.layer(ins)))
        most = max(LAUNCHES[method] for method, _ in methods)
        floor = pool.bytes / read * 1e3 + LAYERS * len(GEMMS) * most * launch * 1e3
        predicted, added = model(base, methods, base_ms), step - base_ms
        errors.append(abs(predicted / added - 1))
        rows[name] = {"step_ms": step, "added_ms": added, "floor_ms": floor, "model_ms": predicted, "bytes": pool.bytes}
        print(
            f"  {name:18s} step {step:6.3f}  added {added:6.3f}  floor {floor:5.3f}  "
            f"model {predicted:5.3f}  {pool.bytes / 1e6:7.1f} MB",
            flush=True,
        )
        del pool
        torch.cuda.empty_cache()
    rows["model_error"] = statistics.median(errors)
    print(f"  the model's median error: {rows['model_error']:.1%}", flush=True)
    if with_vllm:
        for rank in (16, 64, *([256] if tenants == 20 else [])):
            step = vllm_step(base, tenants, rank, xs)
            rows[f"vllm lora {rank}"] = {"step_ms": step, "added_ms": step - plain}
            print(f"  vLLM, LoRA rank {rank:<3d} step {step:6.3f}  added {step - plain:6.3f}", flush=True)
    return rows


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the numbers go")
    parser.add_argument("--tenants", type=int, nargs="+", default=[20, 64])
    options = parser.parse_args()
    read, launch = ceilings()
    print(f"{torch.cuda.get_device_name()}: read {read / 1e12:.2f} TB/s, tiny kernel in a graph {launch * 1e6:.2f} us")
    base = Base.random()
    with_vllm = (Path(__file__).parent.parent / ".vllm_ops").is_dir()
    costs, times = launch_costs(base), read_times(median_ms, DEVICE)
    print("reading alone, us: " + ", ".join(f"{n / 1e6:.1f} MB {times(n) * 1e3:.1f}" for n in (1e6, 4e6, 16e6, 64e6)))
    print(
        "kernels of one GEMM with a minimum of bytes to read, us: "
        + ", ".join(f"{method} {cost * 1e3:.1f}" for method, cost in costs.items())
    )
    model = Model(read=times, costs=costs)
    sizes = {str(n): measure(base, n, read, launch, model, with_vllm=with_vllm) for n in options.tenants}
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "read": read,
        "launch": launch,
        "launch_costs_ms": costs,
        **sizes,
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

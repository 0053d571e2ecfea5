"""Measures adapters of all five methods on several ranks: exactness in both layouts, communication, step times.

    PYTHONPATH=. python benchmarks/two_ranks.py --ranks 2 --tiny           # on a CPU, over gloo
    PYTHONPATH=. python benchmarks/two_ranks.py --layers 6 --work WORK_FOLDER --json FILE   # on GPUs, over NCCL

Exactness: one batch has nine adapters (LoRA twice, DoRA, rank-stabilised DoRA on attention, IA3, VeRA twice on one
shared pair, OFT twice) and a row of the base. Each row is compared with PEFT in float32 and with a run on one rank.
Communication: the bytes that a rank sends in a decode step of plain LoRA. Step times: decode steps with one token per
tenant, on GPUs as replays of a CUDA graph if the model can be captured.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from rank_models import NINE, Setup, compile_all, peft_logprobs, tiny, write_adapters, write_base
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file
from step_timing import timed
from torch.multiprocessing.spawn import start_processes

from scute_compile.formats.artifact import open_artifact
from scute_compile.ir.dtypes import torch_dtype
from scute_compile.ir.linear import Split
from scute_compile.ir.target import LoraSharding
from scute_compile.runtime_min.base_model import load_model
from scute_compile.runtime_min.model.served_model import ServedModel
from scute_compile.runtime_min.ranks.group import Purpose, RankGroup
from scute_compile.runtime_min.ranks.load_time_norms import shard_scale
from scute_compile.runtime_min.reference import take

FIVE = ("lora-a", "dora", "ia3", "vera-a", "oft-a")
CUDA = torch.cuda.is_available()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The benchmark's settings, equal in all processes."""

    work: Path
    setup: Setup
    ranks: int
    tokens: int
    tenants: int
    repeats: int

    @property
    def base(self) -> Path:
        """The base's folder."""
        return self.work / "base"

    def store(self, layout: str, size: int) -> Path:
        """The store of a layout compiled for `size` ranks."""
        return self.work / f"store-{layout}-{size}"

    def model(self, rank: int, attention: str | None = None) -> torch.nn.Module:
        """The base on a rank's device. Comparisons with PEFT use eager attention, which graphs cannot capture."""
        model = load_model(self.base, torch_dtype(self.setup.dtype)).to(device_of(rank))
        if attention is not None:
            model.set_attn_implementation(attention)
        return model

    def ids(self) -> torch.Tensor:
        """Tokens `(10, tokens)`."""
        generator = torch.Generator().manual_seed(7)
        return torch.randint(0, self.setup.vocabulary, (len(NINE) + 1, self.tokens), generator=generator)


def device_of(rank: int) -> torch.device:
    """Return the rank's device."""
    return torch.device("cuda", rank) if CUDA else torch.device("cpu")


def worker(rank: int, run: Run, size: int) -> None:
    """Run all measurements on one rank of `size`; rank 0 writes the results."""
    if CUDA:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group(
            "nccl" if CUDA else "gloo", init_method=f"file://{run.work / f'meeting-{size}'}", rank=rank, world_size=size
        )
    tensors: dict[str, torch.Tensor] = {}
    facts: dict[str, object] = {}
    layouts = ("default", "full") if size > 1 else ("default",)
    for layout in layouts:
        tensors[layout], facts[f"{layout} traffic"] = mixed_batch(run, rank, size, layout)
    if size > 1:
        facts["dora scale error"] = scale_error(run, size)
    facts["steps"] = steps(run, rank, size)
    if rank == 0:
        save_file(tensors, run.work / f"answers-{size}.safetensors")
        (run.work / f"facts-{size}.json").write_text(json.dumps(facts))
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()


def served_model(
    run: Run,
    rank: int,
    size: int,
    layout: str,
    *,
    max_adapters: int,
    tokens: int,
    rows: int,
    attention: str | None = None,
) -> ServedModel:
    """Return the model with a pool of the size of `max_adapters` copies of all adapters together."""
    files = sum(path.stat().st_size for path in run.store(layout, size).glob("*/rank-0*"))
    return ServedModel.for_rank(
        run.model(rank, attention),
        lora_sharding=layout,
        max_adapters=max_adapters,
        pool_bytes=(128 << 10) + files * max_adapters,
        max_num_batched_tokens=tokens,
        max_num_seqs=rows,
        shared_bytes="128MiB" if CUDA else "2MiB",
    )


def mixed_batch(run: Run, rank: int, size: int, layout: str) -> tuple[torch.Tensor, dict[str, object]]:
    """Return the mixed batch's log-probabilities on the CPU, and the bytes that decode steps of plain LoRA send."""
    ids = run.ids().to(device_of(rank))
    served = served_model(
        run,
        rank,
        size,
        layout,
        max_adapters=max(len(NINE) + 1, run.tenants),
        tokens=ids.numel(),
        rows=max(len(ids), run.tenants),
    )
    for name in (*NINE, "attention"):
        served.load_adapter(run.store(layout, size) / name, adapter_name=name)
    logprobs = torch.log_softmax(served.forward(ids, adapter_names=[*NINE, None]).logits.float(), -1).cpu()
    traffic: dict[str, object] = {}
    for name in ("attention", "lora-a"):
        served.ranks.traffic.reset()
        served.forward(ids[:1, :1].expand(run.tenants, 1).contiguous(), adapter_names=[name] * run.tenants)
        traffic[name] = {purpose.value: sent for purpose, sent in served.ranks.traffic.sent.items()}
    return logprobs, traffic


def scale_error(run: Run, size: int) -> float:
    """Return the largest difference between DoRA's s computed from the ranks' shards and the compiled s."""
    ranks, model = RankGroup(), load_model(run.base)
    artifact = open_artifact(run.work / "scale-store" / "dora")
    raw = load_file(run.work / "adapters" / "dora" / "adapter_model.safetensors")
    file = load_file(artifact.rank_path(ranks.rank))
    worst = torch.zeros((), dtype=torch.float64)
    for record in artifact.manifest.sites:
        key = f"base_model.model.{record.name}.lora_"
        inputs, outputs = record.inputs[ranks.rank], record.outputs[ranks.rank]
        weight = take(take(model.get_parameter(f"{record.name}.weight").detach(), 0, outputs), 1, inputs)
        a, b = take(raw[f"{key}A.weight"], 1, inputs), take(raw[f"{key}B.weight"], 0, outputs).T
        shards = [x.to(device_of(ranks.rank)) for x in (weight, a, b, take(raw[f"{key}magnitude_vector"], 0, outputs))]
        s = shard_scale(*shards[:3], 1.0, shards[3], split=Split(record.split), ranks=ranks).cpu()
        worst = torch.maximum(worst, (s - 1 - file[f"{record.name}.ds"].double()).abs().max())
    worst = worst.to(device_of(ranks.rank))
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.item()


def steps(run: Run, rank: int, size: int) -> dict[str, object]:
    """Return the times of decode steps in milliseconds, by adapters and layout."""
    lora = [f"{('lora-a', 'lora-b')[i % 2]}" for i in range(run.tenants)]
    five = [FIVE[i % len(FIVE)] for i in range(run.tenants)]
    step = run.ids()[:1, :1].expand(run.tenants, 1).contiguous().to(device_of(rank))
    times: dict[str, object] = {}
    for layout in ("default", "full") if size > 1 else ("default",):
        served = served_model(
            run, rank, size, layout, max_adapters=run.tenants, tokens=run.tenants, rows=run.tenants, attention="sdpa"
        )
        for pool, names in (("base", []), ("plain LoRA", lora), ("five methods", five)):
            for i, name in enumerate(names):
                served.load_adapter(run.store(layout, size) / name, adapter_name=f"{name} {i}")
            rows = [f"{name} {i}" for i, name in enumerate(names)] or [None] * run.tenants
            with served.step(rows, [1] * run.tenants), torch.no_grad():
                times[f"{pool}, {layout}"] = timed(
                    lambda m=served.model: m(input_ids=step, use_cache=False), run.repeats
                )
            for row in filter(None, rows):
                served.delete_adapter(row)
        del served
    return times


def prepare(run: Run) -> None:
    """Write the base and the adapters and compile them for each number of ranks and layout, unless they exist."""
    if (run.work / "scale-store").exists():
        return
    write_base(run.setup, run.base)
    write_adapters(run.setup, run.base, run.work / "adapters")
    for size, layout in {(1, "default"), *((run.ranks, layout) for layout in ("default", "full") if run.ranks > 1)}:
        compile_all(
            run.base,
            run.work / "adapters",
            run.store(layout, size),
            tp=size,
            sharding=LoraSharding(layout),
            dtype=run.setup.dtype,
        )
    dora = run.work / "dora-alone"
    dora.mkdir()
    (dora / "dora").symlink_to(run.work / "adapters" / "dora")
    compile_all(run.base, dora, run.work / "scale-store", tp=run.ranks, sharding=LoraSharding.DEFAULT, dtype="float32")


def compared(run: Run) -> list[dict[str, object]]:
    """Return a row per adapter: mean errors against PEFT and against one rank, over the adapter's mean effect."""
    ids, device = run.ids(), device_of(0)
    single = load_file(run.work / "answers-1.safetensors")["default"]
    layouts = load_file(run.work / f"answers-{run.ranks}.safetensors")
    base = peft_logprobs(run.base, None, ids, device)
    rows = []
    for row, name in enumerate((*NINE, "base")):
        adapter = None if name == "base" else run.work / "adapters" / name
        exact, effect = base[row], 1.0
        if adapter is not None:
            exact = peft_logprobs(run.base, adapter, ids[row : row + 1], device)[0]
            effect = (exact - base[row]).abs().mean().item()
        dtype = torch_dtype(run.setup.dtype)
        rounded = peft_logprobs(run.base, adapter, ids[row : row + 1], device, dtype=dtype)[0]
        errors = {
            "adapter": name,
            "effect": effect,
            f"PEFT in {run.setup.dtype}": _error(rounded, exact, effect),
            "one rank": _error(single[row], exact, effect),
        }
        for layout, logprobs in layouts.items():
            errors[layout] = _error(logprobs[row], exact, effect)
            errors[f"{layout} - one rank"] = _error(logprobs[row], single[row], effect)
        rows.append(errors)
    return rows


def _error(logprobs: torch.Tensor, expected: torch.Tensor, effect: float) -> float:
    return (logprobs - expected).abs().mean().item() / effect


def communication(run: Run, facts: dict[str, dict[str, dict[str, float]]]) -> list[dict[str, object]]:
    """Return the bytes that plain LoRA adds to a step, and S-LoRA's ratio (arXiv:2311.03285 section 6.3)."""
    setup, rows = run.setup, []
    for name, share, formula in (
        ("attention", 0.5, 5 * setup.rank / (2 * setup.hidden)),
        ("lora-a", 1.0, 9 * setup.rank / (4 * setup.hidden)),
    ):
        for layout in ("default", "full") if run.ranks > 1 else ():  # a single rank sends nothing
            sent = facts[f"{layout} traffic"][name]
            base = share * sent[Purpose.BASE]
            rows.append(
                {
                    "adapter": name,
                    "layout": layout,
                    "base bytes": base,
                    "adapter bytes": sent[Purpose.ADAPTERS],
                    "ratio": sent[Purpose.ADAPTERS] / base,
                    "S-LoRA's": formula if layout == "full" else 0.0,
                }
            )
    return rows


def show(title: str, rows: Sequence[dict[str, object]], console: Console) -> None:
    """Print rows as a table."""
    table = Table(*rows[0], title=title, title_justify="left")
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=max(2, torch.cuda.device_count()), help="1: a single GPU")
    parser.add_argument("--layers", type=int, help="layers of the base")
    parser.add_argument("--tiny", action="store_true", default=not CUDA, help="tiny shapes; the default without a GPU")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--tokens", type=int, default=16, help="tokens per row of the mixed batch")
    parser.add_argument("--tenants", type=int, default=20, help="rows of a decode step, each with its adapter")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--work", type=Path, help="folder in which base, adapters and artifacts are kept for later runs"
    )
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    return parser.parse_args()


def main() -> None:
    """Run all measurements, print the tables, and write the JSON."""
    options = arguments()
    setup = tiny(options.ranks) if options.tiny else Setup()
    shape = replace(setup.shape, layers=options.layers or setup.shape.layers)
    setup = replace(setup, shape=shape, dtype=options.dtype or setup.dtype)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    console = Console(width=200)
    with TemporaryDirectory() as folder:
        run = Run(
            work=(options.work or Path(folder)).resolve(),
            setup=setup,
            ranks=options.ranks,
            tokens=options.tokens,
            tenants=options.tenants,
            repeats=options.repeats,
        )
        run.work.mkdir(parents=True, exist_ok=True)
        prepare(run)
        for size in sorted({1, run.ranks}):
            (run.work / f"meeting-{size}").unlink(missing_ok=True)
            start_processes(worker, (run, size), nprocs=size, start_method="spawn")  # type: ignore[no-untyped-call] # torch does not annotate it
        facts = {size: json.loads((run.work / f"facts-{size}.json").read_text()) for size in (1, run.ranks)}
        machine = f"{run.ranks} x {torch.cuda.get_device_name()}" if CUDA else f"{run.ranks} processes on a CPU"
        errors, sent = compared(run), communication(run, facts[run.ranks])
    pools = [
        {
            "pool": pool,
            "1 rank ms": facts[1]["steps"].get(pool, {}).get("ms", "-"),
            f"{run.ranks} ranks ms": step["ms"],
            "graph": str(step["graph"]),
        }
        for pool, step in facts[run.ranks]["steps"].items()
    ]
    console.print(f"{machine}, torch {torch.__version__}, {setup.to_json()}")
    show("mean error of log-probabilities against PEFT in float32, over the adapter's mean effect", errors, console)
    if run.ranks > 1:
        show("bytes that a rank sends per step; base bytes: those of attention alone, or all", sent, console)
        scale = facts[run.ranks]["dora scale error"]
        console.print(f"DoRA's s from the ranks' shards differs from the compiled s by at most {scale:.2e}")
    show(f"decode step, {run.tenants} tenants", pools, console)
    if options.json:
        result = {
            "machine": machine,
            "torch": torch.__version__,
            "shapes": setup.to_json(),
            "errors": errors,
            "communication": sent,
            "dora scale error": facts[run.ranks].get("dora scale error"),
            "steps": {str(size): fact["steps"] for size, fact in facts.items()},
        }
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

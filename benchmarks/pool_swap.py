"""How fast adapters come in from host memory, and how many are resident at once: one GPU, one call.

    python benchmarks/pool_swap.py --json pool_swap.json

Swap-in is timed from the call to the end of the device's work, and set beside a pinned copy of as many bytes measured
in the same run. Shapes are Llama-3.1-8B's, all layers, bf16.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from scute_compile.runtime_min.pool.directory import PAGE_BYTES, Field
from scute_compile.runtime_min.pool.packed_adapter import PackedAdapter
from scute_compile.runtime_min.pool.resident_pool import ResidentPool
from tests.support.drawn_adapters import LLAMA_8B, DirectoryEntry, pair_of, sites_of, tenant

DTYPE = torch.bfloat16
PAIR_RANK = 256
DISTINCT = 8
"""Images that the tenants of a method share in host memory; on the device each has pages of its own."""
SWAPS: tuple[tuple[str, str, int], ...] = (
    ("IA3", "ia3", 0),
    ("VeRA, own part", "vera", 0),
    ("LoRA rank 8", "lora", 8),
    ("LoRA rank 16", "lora", 16),
    ("DoRA rank 16", "dora", 16),
    ("OFT block 32", "oft", 0),
    ("LoRA rank 64", "lora", 64),
)
Row = Mapping[str, object]


def main() -> None:
    """Measure, print the tables, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the numbers go")
    parser.add_argument("--tenants", type=int, default=1024, help="resident tenants of IA3, and as many of VeRA")
    parser.add_argument("--layers", type=int, default=LLAMA_8B.layers, help="fewer, for a trial")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda", help="`cpu` tries the script without a GPU")
    options = parser.parse_args()
    device = torch.device(options.device)
    sites = sites_of(replace(LLAMA_8B, layers=options.layers))
    result = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "swaps": [swap(case, sites, device, options.repeats) for case in SWAPS],
        "batch": batch(sites, device, options.repeats),
        "overlap": overlap(sites, device, options.repeats) if device.type == "cuda" else None,
        "tenants": tenants(sites, device, options.tenants),
    }
    report(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def timed(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median seconds of a call and the device's work for it, after two calls that warm up."""
    times = []
    for _ in range(repeats + 2):
        settle(device)
        start = time.perf_counter()
        call()
        settle(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def settle(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def copy_seconds(size: int, device: torch.device, repeats: int) -> float:
    """Return the seconds of one copy of `size` bytes from pinned memory."""
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty_like(host, device=device)
    return timed(lambda: target.copy_(host, non_blocking=True), device, repeats)


def packed_adapters(
    method: str, sites: Sequence[DirectoryEntry], device: torch.device, *, rank: int, count: int
) -> list[PackedAdapter]:
    """Return adapters of one method that share a pair where it has one."""
    pin = device.type == "cuda"
    pair = pair_of(sites, PAIR_RANK, DTYPE, pin=pin) if method == "vera" else None
    return [tenant(method, sites, DTYPE, rank=rank, pair=pair, seed=seed, pin=pin) for seed in range(count)]


def swap(case: tuple[str, str, int], sites: Sequence[DirectoryEntry], device: torch.device, repeats: int) -> Row:
    """Let adapters take turns in a pool with one slot to spare, so that each comes in anew."""
    label, method, rank = case
    made = packed_adapters(method, sites, device, rank=rank, count=3)
    pool = ResidentPool(sites, num_pages=2 * made[0].pages, max_adapters=2, dtype=DTYPE, device=device)
    for packed in made:
        pool.add(packed.name, packed)
    turn = 0

    def next_in() -> None:
        nonlocal turn
        turn = (turn + 1) % len(made)
        pool.ensure([made[turn].name])
        pool.memory.wait()

    next_in()
    size = len(made[0].buffer)
    seconds, copy = timed(next_in, device, repeats), copy_seconds(size, device, repeats)
    check(pool, made[turn])
    return {
        "what": label,
        "bytes": size,
        "swap_seconds": seconds,
        "copy_seconds": copy,
        "copy_bandwidth": size / copy,
        "share_of_copy": copy / seconds,
    }


def batch(sites: Sequence[DirectoryEntry], device: torch.device, repeats: int) -> Row:
    """Bring 64 IA3 adapters in by one call: the cost of small ones is the host's, so it is shown by adapter."""
    first, count = packed_adapters("ia3", sites, device, rank=0, count=1)[0], 64
    pool = ResidentPool(sites, num_pages=count * first.pages, max_adapters=count, dtype=DTYPE, device=device)
    for number in range(2 * count):
        pool.add(f"t{number}", first)
    names = [f"t{number}" for number in range(2 * count)]
    turn = 0

    def next_batch() -> None:
        nonlocal turn
        turn = 1 - turn
        pool.ensure(names[turn * count : (turn + 1) * count])
        pool.memory.wait()

    size = count * len(first.buffer)
    seconds, copy = timed(next_batch, device, repeats), copy_seconds(size, device, repeats)
    return {
        "what": f"{count} IA3 in one call",
        "bytes": size,
        "swap_seconds": seconds,
        "copy_seconds": copy,
        "copy_bandwidth": size / copy,
        "share_of_copy": copy / seconds,
    }


def overlap(sites: Sequence[DirectoryEntry], device: torch.device, repeats: int) -> Row:
    """Prefetch a rank-16 LoRA while matrix products run, and compare with the products alone."""
    made = packed_adapters("lora", sites, device, rank=16, count=3)
    pool = ResidentPool(sites, num_pages=2 * made[0].pages, max_adapters=2, dtype=DTYPE, device=device)
    for packed in made:
        pool.add(packed.name, packed)
    x = torch.randn(4096, 4096, dtype=DTYPE, device=device)
    turn = 0

    def step(*, prefetch: bool) -> None:
        nonlocal turn
        with pool.in_use([made[turn].name]):
            for _ in range(20):
                torch.mm(x, x)
            if prefetch:
                turn = (turn + 1) % len(made)
                pool.prefetch([made[turn].name])

    alone = timed(lambda: step(prefetch=False), device, repeats)
    together = timed(lambda: step(prefetch=True), device, repeats)
    copied = timed(
        lambda: pool.memory.write_image(made[0].buffer, torch.arange(made[0].pages, dtype=torch.int32), 0),
        device,
        repeats,
    )
    return {"step_seconds": alone, "with_prefetch_seconds": together, "image_seconds": copied}


def tenants(sites: Sequence[DirectoryEntry], device: torch.device, count: int) -> Row:
    """Keep `count` IA3 and `count` VeRA tenants resident, and measure what they take."""
    made = {method: packed_adapters(method, sites, device, rank=0, count=DISTINCT) for method in ("ia3", "vera")}
    factors = sum(factor.pages for factor in made["vera"][0].factors)
    pages = sum(count * of[0].pages for of in made.values())
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    pool = ResidentPool(
        sites,
        num_pages=pages,
        max_adapters=2 * count,
        dtype=DTYPE,
        device=device,
        map_entries=pages,
        shared_pages=factors,
    )
    allocated = torch.cuda.memory_allocated() - before if device.type == "cuda" else 0
    names = {f"{method}-{number}": of[number % DISTINCT] for method, of in made.items() for number in range(count)}
    for name, packed in names.items():
        pool.add(name, packed)
    settle(device)
    start = time.perf_counter()
    slots = pool.ensure(names)
    settle(device)
    seconds = time.perf_counter() - start
    for name in list(names)[:: max(1, count // 16)]:
        check(pool, names[name], slots[name])
    stats = pool.stats()
    print(stats)
    return {
        "adapters": len(names),
        "bytes_each": {method: of[0].pages * PAGE_BYTES for method, of in made.items()},
        "shared_bytes": factors * PAGE_BYTES,
        "allocated_bytes": allocated,
        "load_seconds": seconds,
        "load_bandwidth": (stats.pages.in_use + factors) * PAGE_BYTES / seconds,
        "stats": {key: value for key, value in stats.to_json().items() if key != "adapters"},
    }


def check(pool: ResidentPool, packed: PackedAdapter, slot: int | None = None) -> None:
    """Compare what the device's tables lead to with the packed: bit for bit, or this run is worth nothing."""
    slot = pool.resident[packed.name] if slot is None else slot
    pool.memory.wait()
    start = int(pool.memory.directory[slot, :, Field.OWN_PAGES].max())
    physical = pool.memory.page_map[start : start + packed.pages].long()
    found = pool.memory.pages[physical].cpu().view(torch.uint8).flatten()
    if not torch.equal(found, packed.buffer):
        raise SystemExit(f"{packed.name} in slot {slot} differs from its packed")


def report(result: Mapping[str, object]) -> None:
    """Print the tables."""
    rows = [*_rows(result["swaps"]), *_rows([result["batch"]])]
    print(f"\n{result['device']}, torch {result['torch']}; medians\n")
    print(f"{'swap-in':<20}{'MB':>9}{'ms':>9}{'copy ms':>9}{'copy GB/s':>11}{'of copy':>9}")
    for row in rows:
        size, seconds, copy = (float(str(row[key])) for key in ("bytes", "swap_seconds", "copy_seconds"))
        print(
            f"{row['what']:<20}{size / 1e6:>9.2f}{seconds * 1e3:>9.3f}{copy * 1e3:>9.3f}{size / copy / 1e9:>11.1f}"
            f"{copy / seconds:>9.1%}"
        )
    for key in ("overlap", "tenants"):
        if isinstance(part := result[key], Mapping):
            print(f"\n{key}")
            for name, value in part.items():
                print(f"  {name:<24}{value}")


def _rows(part: object) -> list[Row]:
    return [row for row in part if isinstance(row, Mapping)] if isinstance(part, list) else []


if __name__ == "__main__":
    main()

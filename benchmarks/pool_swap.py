"""Measures swap-in of adapters from host memory, and the number of resident adapters, on one GPU.

    python benchmarks/pool_swap.py --json pool_swap.json

Swap-in is timed from the call to the end of the device's work, and compared with a pinned copy of as many bytes in the
same run. Shapes are those of all layers of Llama-3.1-8B, in bfloat16.
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
"""Packed adapters per method; tenants share them in host memory, but each has its own pages on the device."""
SWAPS: tuple[tuple[str, str, int], ...] = (
    ("IA3", "ia3", 0),
    ("VeRA, without pair", "vera", 0),
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
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--tenants", type=int, default=1024, help="resident adapters of IA3, and as many of VeRA")
    parser.add_argument("--layers", type=int, default=LLAMA_8B.layers, help="number of layers; fewer for a trial")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda", help="`cpu` runs the script without a GPU")
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
    """Return the median seconds of a call and of the device's work for it, after two warm-up calls."""
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
    """Return `count` adapters of one method; those of VeRA share one pair."""
    pin = device.type == "cuda"
    pair = pair_of(sites, PAIR_RANK, DTYPE, pin=pin) if method == "vera" else None
    return [tenant(method, sites, DTYPE, rank=rank, pair=pair, seed=seed, pin=pin) for seed in range(count)]


def swap(case: tuple[str, str, int], sites: Sequence[DirectoryEntry], device: torch.device, repeats: int) -> Row:
    """Swap three adapters through a pool of two, so that each call swaps one in."""
    label, method, rank = case
    made = packed_adapters(method, sites, device, rank=rank, count=3)
    pool = ResidentPool(sites, num_pages=2 * made[0].pages, max_adapters=2, dtype=DTYPE, device=device)
    for packed in made:
        pool.add(packed.name, packed)
    turn = 0

    def swap_in_next() -> None:
        nonlocal turn
        turn = (turn + 1) % len(made)
        pool.ensure([made[turn].name])
        pool.memory.wait()

    swap_in_next()
    size = len(made[0].buffer)
    seconds, copy = timed(swap_in_next, device, repeats), copy_seconds(size, device, repeats)
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
    """Swap in 64 IA3 adapters by one call; for small adapters most of the time is the host's."""
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
    """Prefetch a LoRA of rank 16 during matrix products, and compare with the products alone."""
    made = packed_adapters("lora", sites, device, rank=16, count=3)
    pool = ResidentPool(sites, num_pages=2 * made[0].pages, max_adapters=2, dtype=DTYPE, device=device)
    for packed in made:
        pool.add(packed.name, packed)
    x = torch.randn(4096, 4096, dtype=DTYPE, device=device)
    turn = 0

    def step(*, prefetch: bool) -> None:
        nonlocal turn
        lease = pool.acquire([made[turn].name])
        for _ in range(20):
            torch.mm(x, x)
        if prefetch:
            turn = (turn + 1) % len(made)
            pool.prefetch([made[turn].name])
        pool.release(lease)

    alone = timed(lambda: step(prefetch=False), device, repeats)
    together = timed(lambda: step(prefetch=True), device, repeats)
    copied = timed(
        lambda: pool.memory.write_adapter(made[0].buffer, torch.arange(made[0].pages, dtype=torch.int32), 0),
        device,
        repeats,
    )
    return {"step_seconds": alone, "with_prefetch_seconds": together, "write_seconds": copied}


def tenants(sites: Sequence[DirectoryEntry], device: torch.device, count: int) -> Row:
    """Make `count` IA3 and `count` VeRA adapters resident, and measure their memory and the time of loading."""
    made = {method: packed_adapters(method, sites, device, rank=0, count=DISTINCT) for method in ("ia3", "vera")}
    factors = sum(factor.pages for factor in made["vera"][0].factors)
    pages = sum(count * adapters[0].pages for adapters in made.values())
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
    names = {
        f"{method}-{number}": adapters[number % DISTINCT]
        for method, adapters in made.items()
        for number in range(count)
    }
    for name, packed in names.items():
        pool.add(name, packed)
    settle(device)
    start = time.perf_counter()
    indices = pool.ensure(names)
    settle(device)
    seconds = time.perf_counter() - start
    for name in list(names)[:: max(1, count // 16)]:
        check(pool, names[name], indices[name])
    stats = pool.stats()
    print(stats)
    return {
        "adapters": len(names),
        "bytes_each": {method: adapters[0].pages * PAGE_BYTES for method, adapters in made.items()},
        "shared_bytes": factors * PAGE_BYTES,
        "allocated_bytes": allocated,
        "load_seconds": seconds,
        "load_bandwidth": (stats.pages.in_use + factors) * PAGE_BYTES / seconds,
        "stats": {key: value for key, value in stats.to_json().items() if key != "adapters"},
    }


def check(pool: ResidentPool, packed: PackedAdapter, index: int | None = None) -> None:
    """Exit unless the adapter's pages on the device equal its packed bytes."""
    index = pool.resident[packed.name] if index is None else index
    pool.memory.wait()
    start = int(pool.memory.directory[index, :, Field.OWN_PAGES].max())
    physical = pool.memory.page_map[start : start + packed.pages].long()
    found = pool.memory.pages[physical].cpu().view(torch.uint8).flatten()
    if not torch.equal(found, packed.buffer):
        raise SystemExit(f"{packed.name} at index {index} differs from its packed bytes")


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

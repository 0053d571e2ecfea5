"""Times the swap-in of adapters from host memory to a GPU, and counts how many adapters are resident at once.

    PYTHONPATH=. python benchmarks/pool_swap.py --json pool_swap.json
    PYTHONPATH=. python benchmarks/pool_swap.py --device cpu --layers 2 --tenants 16 --repeats 2  # tests the script

The shape is Llama-3.1-8B's with all layers, in bf16. A swap-in is timed from the call until the device has finished,
beside a copy of as many bytes from pinned memory in the same run. More measurements: 64 small adapters in one call, a
prefetch during matrix products, and the memory of 1024 resident adapters of IA3 and 1024 of VeRA.
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
"""Packed adapters that the tenants of a method share in host memory; on the device each tenant has its pages."""
SWAPS: tuple[tuple[str, str, int], ...] = (
    ("IA3", "ia3", 0),
    ("VeRA without pair", "vera", 0),
    ("LoRA rank 8", "lora", 8),
    ("LoRA rank 16", "lora", 16),
    ("DoRA rank 16", "dora", 16),
    ("OFT block 32", "oft", 0),
    ("LoRA rank 64", "lora", 64),
)
"""Label, method and rank."""
Row = Mapping[str, object]


def main() -> None:
    """Run all measurements, print the tables, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--tenants", type=int, default=1024, help="number of resident tenants of IA3, and of VeRA")
    parser.add_argument("--layers", type=int, default=LLAMA_8B.layers, help="fewer layers than the model has")
    parser.add_argument("--repeats", type=int, default=20, help="repetitions of each measurement")
    parser.add_argument("--device", default="cuda", help="`cpu` tests the script without a GPU")
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
    """Return the median time in seconds of a call and the device's work for it, after two calls as a warm-up."""
    times = []
    for _ in range(repeats + 2):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def copy_seconds(size: int, device: torch.device, repeats: int) -> float:
    """Return the time in seconds of a copy of `size` bytes from pinned memory."""
    host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty_like(host, device=device)
    return timed(lambda: target.copy_(host, non_blocking=True), device, repeats)


def packed_adapters(
    method: str, sites: Sequence[DirectoryEntry], device: torch.device, *, rank: int, count: int
) -> list[PackedAdapter]:
    """Return adapters of a method; those of VeRA share one pair."""
    pin = device.type == "cuda"
    pair = pair_of(sites, PAIR_RANK, DTYPE, pin=pin) if method == "vera" else None
    return [tenant(method, sites, DTYPE, rank=rank, pair=pair, seed=seed, pin=pin) for seed in range(count)]


def swap(case: tuple[str, str, int], sites: Sequence[DirectoryEntry], device: torch.device, repeats: int) -> Row:
    """Swap three adapters in by turns, in a pool with room for two, and return the time of a swap-in."""
    label, method, rank = case
    adapters = packed_adapters(method, sites, device, rank=rank, count=3)
    pool = ResidentPool(sites, num_pages=2 * adapters[0].pages, max_adapters=2, dtype=DTYPE, device=device)
    for packed in adapters:
        pool.add(packed.name, packed)
    turn = 0

    def swap_in_next() -> None:
        nonlocal turn
        turn = (turn + 1) % len(adapters)
        pool.ensure([adapters[turn].name])
        pool.memory.wait()

    swap_in_next()
    size = len(adapters[0].buffer)
    seconds = timed(swap_in_next, device, repeats)
    check(pool, adapters[turn])
    return _swap_row(label, size, seconds, copy_seconds(size, device, repeats))


def batch(sites: Sequence[DirectoryEntry], device: torch.device, repeats: int) -> Row:
    """Swap 64 IA3 adapters in by one call; the time of small adapters is that of the host."""
    first, count = packed_adapters("ia3", sites, device, rank=0, count=1)[0], 64
    pool = ResidentPool(sites, num_pages=count * first.pages, max_adapters=count, dtype=DTYPE, device=device)
    for number in range(2 * count):
        pool.add(f"t{number}", first)
    names = [f"t{number}" for number in range(2 * count)]
    turn = 0

    def swap_in_batch() -> None:
        nonlocal turn
        turn = 1 - turn
        pool.ensure(names[turn * count : (turn + 1) * count])
        pool.memory.wait()

    size = count * len(first.buffer)
    seconds = timed(swap_in_batch, device, repeats)
    return _swap_row(f"{count} IA3 in one call", size, seconds, copy_seconds(size, device, repeats))


def _swap_row(label: str, size: int, seconds: float, copy: float) -> Row:
    return {
        "what": label,
        "bytes": size,
        "swap_seconds": seconds,
        "copy_seconds": copy,
        "copy_bandwidth": size / copy,
        "share_of_copy": copy / seconds,
    }


def overlap(sites: Sequence[DirectoryEntry], device: torch.device, repeats: int) -> Row:
    """Return the time of matrix products alone, with a prefetch of a LoRA of rank 16, and that of the write alone."""
    adapters = packed_adapters("lora", sites, device, rank=16, count=3)
    pool = ResidentPool(sites, num_pages=2 * adapters[0].pages, max_adapters=2, dtype=DTYPE, device=device)
    for packed in adapters:
        pool.add(packed.name, packed)
    x = torch.randn(4096, 4096, dtype=DTYPE, device=device)
    turn = 0

    def step(*, prefetch: bool) -> None:
        nonlocal turn
        lease = pool.acquire([adapters[turn].name])
        for _ in range(20):
            torch.mm(x, x)
        if prefetch:
            turn = (turn + 1) % len(adapters)
            pool.prefetch([adapters[turn].name])
        pool.release(lease)

    alone = timed(lambda: step(prefetch=False), device, repeats)
    together = timed(lambda: step(prefetch=True), device, repeats)
    written = timed(
        lambda: pool.memory.write_adapter(adapters[0].buffer, torch.arange(adapters[0].pages, dtype=torch.int32), 0),
        device,
        repeats,
    )
    return {"step_seconds": alone, "with_prefetch_seconds": together, "write_seconds": written}


def tenants(sites: Sequence[DirectoryEntry], device: torch.device, count: int) -> Row:
    """Make `count` tenants of IA3 and of VeRA resident, and return their memory and the time to load them."""
    by_method = {method: packed_adapters(method, sites, device, rank=0, count=DISTINCT) for method in ("ia3", "vera")}
    factors = sum(factor.pages for factor in by_method["vera"][0].factors)
    pages = sum(count * of[0].pages for of in by_method.values())
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
    names = {f"{method}-{number}": of[number % DISTINCT] for method, of in by_method.items() for number in range(count)}
    for name, packed in names.items():
        pool.add(name, packed)
    synchronize(device)
    start = time.perf_counter()
    indices = pool.ensure(names)
    synchronize(device)
    seconds = time.perf_counter() - start
    for name in list(names)[:: max(1, count // 16)]:
        check(pool, names[name], indices[name])
    stats = pool.stats()
    print(stats)
    return {
        "adapters": len(names),
        "bytes_each": {method: of[0].pages * PAGE_BYTES for method, of in by_method.items()},
        "shared_bytes": factors * PAGE_BYTES,
        "allocated_bytes": allocated,
        "load_seconds": seconds,
        "load_bandwidth": (stats.pages.in_use + factors) * PAGE_BYTES / seconds,
        "stats": {key: value for key, value in stats.to_json().items() if key != "adapters"},
    }


def check(pool: ResidentPool, packed: PackedAdapter, index: int | None = None) -> None:
    """Compare the pages of an adapter on the device with the packed adapter, bit for bit."""
    index = pool.resident[packed.name] if index is None else index
    pool.memory.wait()
    start = int(pool.memory.directory[index, :, Field.OWN_PAGES].max())
    physical = pool.memory.page_map[start : start + packed.pages].long()
    pages = pool.memory.pages[physical].cpu().view(torch.uint8).flatten()
    if not torch.equal(pages, packed.buffer):
        raise SystemExit(f"{packed.name} at adapter index {index} differs from the packed adapter")


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

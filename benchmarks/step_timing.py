"""Time of a call that all ranks make together: of a CUDA graph's replay where the call lets itself be captured."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

CUDA = torch.cuda.is_available()


def timed(call: Callable[[], object], repeats: int) -> dict[str, object]:
    """Return the median milliseconds of a call: of a graph's replay where the device lets it be captured."""
    graph = None
    if CUDA:
        call, graph = captured(call)
    times = []
    for _ in range(repeats + 2):
        if dist.is_initialized():
            dist.barrier()
        if CUDA:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if CUDA:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    return {"ms": statistics.median(times[2:]), "graph": graph is not None}


def captured(call: Callable[[], object]) -> tuple[Callable[[], object], torch.cuda.CUDAGraph | None]:
    """Return a graph's replay in the place of a call, or the call itself when it can't be captured on every rank."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
    except RuntimeError as error:
        print(f"no graph: {str(error).splitlines()[0][:100]}", file=sys.stderr)
        torch.cuda.synchronize()
        return call, None
    return graph.replay, graph

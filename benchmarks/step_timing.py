"""Times a call that all ranks make together, as a replay of a CUDA graph if the call can be captured.

This module has no command; `two_ranks.py` uses it; `decode_step.py` and `vllm_baseline.py` use its capture.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

CUDA = torch.cuda.is_available()


def timed(call: Callable[[], object], repeats: int) -> dict[str, object]:
    """Return the median time of a call in milliseconds, and whether a CUDA graph's replay was timed."""
    graph = None
    if CUDA:
        call, graph = captured_if_possible(call)
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


def captured_if_possible(call: Callable[[], object]) -> tuple[Callable[[], object], torch.cuda.CUDAGraph | None]:
    """Return the replay of a call's CUDA graph and the graph, or the call and None if the capture fails."""
    warm_up(call, 3)
    try:
        graph = capture(call, capture_error_mode="thread_local")
    except RuntimeError as error:
        print(f"no graph: {str(error).splitlines()[0][:100]}", file=sys.stderr)
        torch.cuda.synchronize()
        return call, None
    return graph.replay, graph


def warm_up(call: Callable[[], object], times: int = 1) -> None:
    """Make a call on a side stream, before its capture; the first time compiles its kernels."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(times):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def capture(call: Callable[[], object], **options: str) -> torch.cuda.CUDAGraph:
    """Capture a call in a CUDA graph; `options` are keyword arguments of `torch.cuda.graph`.

    Raises:
        RuntimeError: The call cannot be captured.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        call()
    return graph

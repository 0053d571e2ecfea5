"""Searches for fast settings of vLLM's LoRA kernels, so that the baseline is fair with and without tuning.

    found = tuned_config(ops, tokens=20, inputs=4096, widths=(4096, 1024, 1024), rank=16, max_loras=20, ...)
    with ops.forced(shrink=found.shrink.setting, expand=found.expand.setting):
        ...                                   # or write_tuned_folder(folder, [found, ...]); ops.use_folder(folder)

vLLM ships no tuned settings. Each kernel is timed alone, at most `MAX_CANDIDATES` settings of it, by the median of
ten replays of one CUDA graph that runs it on many layers in turn, so that weights come from memory. The most important
settings are searched as a grid first, then the others one at a time from the best so far.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from vllm_baseline import VllmLayer, VllmOps, captured

MAX_CANDIDATES = 20
MAX_COPIES = 48  # layers in rotation
COLD_BYTES = 120 << 20  # of either factor, twice the L2 of an H200: weights in rotation must come from memory
Setting: TypeAlias = dict[str, int]
Tree: TypeAlias = dict[str, dict[str, dict[str, dict[str, dict[str, Setting]]]]]  # max_loras + 1, slices, tokens, k, n


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The fastest setting of one kernel, its microseconds a launch, and those of vLLM's default setting."""

    setting: Setting
    us: float
    default_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """The settings found for one shape; the shrink's times include the zeroing of its buffer."""

    tokens: int
    inputs: int
    widths: tuple[int, ...]
    rank: int
    max_loras: int
    shrink: Found
    expand: Found


def tuned_config(
    ops: VllmOps,
    *,
    tokens: int,
    inputs: int,
    widths: Sequence[int],
    rank: int,
    max_loras: int,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | None = None,
    mapping: torch.Tensor | None = None,
    replays: int = 10,
) -> Tuned:
    """Return the fastest settings for one fused GEMM's shape; the defaults are among the candidates.

    `mapping` [tokens] holds each row's adapter index (-1: none) and defaults to the indices in turn. The winners are
    checked against plain torch. Afterwards the kernels use their defaults again (as after `ops.use_folder(None)`).

    Raises:
        ArithmeticError: The winners' results are wrong.
    """
    device = device or torch.device("cuda")
    if mapping is None:
        mapping = torch.arange(tokens, device=device) % max_loras
    layers = _cold_layers(ops, widths=widths, inputs=inputs, max_loras=max_loras, rank=rank, dtype=dtype, device=device)
    x = torch.randn(tokens, inputs, dtype=dtype, device=device)
    y = torch.randn(tokens, sum(widths), dtype=dtype, device=device)
    buffer, meta = layers[0].buffer(tokens).zero_(), ops.meta(mapping, max_loras)
    work = y.clone()

    def shrink_all() -> None:
        for layer in layers:
            ops.lora_shrink(x, layer.a, buffer, *meta, 1.0)

    def expand_all() -> None:
        for layer in layers:
            ops.lora_expand(buffer, layer.b, work, *meta, offset_start=0, add_inputs=True)

    looked_up = ops.settings_module.get_lora_op_configs
    key = {"max_loras": max_loras + 1, "batch": tokens, "rank": rank, "num_slices": len(widths)}
    ops.use_folder(None)
    defaults: tuple[Setting, Setting] = (
        looked_up("shrink", hidden_size=inputs, **key),
        looked_up("expand", hidden_size=max(widths), add_inputs=True, **key),
    )
    timer = _Timer(launches=len(layers), device=device, replays=replays)
    shrink = _search(timer, shrink_all, lambda it: ops.forced(shrink=it), defaults[0], shrink_steps(inputs, rank))
    buffer.normal_()
    expand = _search(timer, expand_all, lambda it: ops.forced(expand=it), defaults[1], expand_steps(rank))
    with ops.forced(shrink=shrink.setting, expand=expand.setting):
        layers[0].check(x, y, mapping)
    return Tuned(
        tokens=tokens,
        inputs=inputs,
        widths=tuple(widths),
        rank=rank,
        max_loras=max_loras,
        shrink=shrink,
        expand=expand,
    )


def _cold_layers(
    ops: VllmOps,
    *,
    widths: Sequence[int],
    inputs: int,
    max_loras: int,
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[VllmLayer, ...]:
    smaller = max_loras * rank * min(inputs * len(widths), sum(widths)) * dtype.itemsize  # bytes of A or of B
    copies = min(MAX_COPIES, max(4, math.ceil(COLD_BYTES / smaller))) if device.type == "cuda" else 1
    return tuple(
        VllmLayer.random(
            ops, widths=widths, inputs=inputs, max_loras=max_loras, rank=rank, dtype=dtype, device=device, seed=seed
        )
        for seed in range(copies)
    )


def shrink_steps(inputs: int, rank: int) -> tuple[tuple[Setting, ...], ...]:
    """Return the changes to try for the shrink: all of the first step, then each later step's from the best so far."""
    wide = 16 if rank <= 16 else 32
    crossed = tuple(
        {"block_m": 16, "block_n": wide, "block_k": block_k, "split_k": split_k, "num_warps": 4, "num_stages": 2}
        for block_k in (64, 128, 256)
        for split_k in (1, 4, 8, 16)
        if split_k == 1 or block_k * split_k <= inputs  # a split beyond K has nothing to do
    )
    others = tuple({"block_n": n} for n in (16, 64, 128) if n != wide and n <= max(16, rank))
    return crossed, ({"num_warps": 8},), others, ({"block_m": 32}, {"block_m": 64}), ({"num_stages": 4},)


def expand_steps(rank: int) -> tuple[tuple[Setting, ...], ...]:
    """Return the changes to try for the expand, likewise; its K is the rank, and one stage is forced on Hopper."""
    deep = min(64, max(16, 1 << (rank - 1).bit_length()))
    crossed = tuple(
        {"block_m": 16, "block_n": block_n, "block_k": deep, "num_warps": warps, "num_stages": 2}
        for block_n in (16, 32, 64, 128)
        for warps in (4, 8)
    )
    others = tuple({"block_k": k} for k in (16, 32, 64, 128) if k != deep and k <= max(32, rank))
    return crossed, others, ({"block_n": 256},), ({"block_m": 32}, {"block_m": 64})


def _search(
    timer: _Timer,
    call: Callable[[], None],
    forced: Callable[[Setting], AbstractContextManager[None]],
    default: Setting,
    steps: tuple[tuple[Setting, ...], ...],
) -> Found:
    def timed(setting: Setting) -> float:
        with forced(setting):
            return timer.median_us(call)

    default_us = best_us = timed(default)
    best, tried = default, 1
    for step in steps:
        start = best
        for change in step[: MAX_CANDIDATES - tried]:
            setting = {**start, **change}
            tried += 1
            us = timed(setting)
            if us < best_us:
                best, best_us = setting, us
    return Found(setting=best, us=best_us, default_us=default_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timer:
    launches: int
    device: torch.device
    replays: int

    def median_us(self, call: Callable[[], None]) -> float:
        """Return the median time of one launch; infinite when the setting doesn't fit the device."""
        from triton.runtime.errors import OutOfResources  # type: ignore[import-untyped] # Triton has no types

        try:
            run = captured(call) if self.device.type == "cuda" else call
        except OutOfResources:
            return math.inf
        run()
        return statistics.median(self._times(run)) / self.launches

    def _times(self, run: Callable[[], None]) -> Iterator[float]:
        for _ in range(self.replays):
            if self.device.type == "cuda":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call] # torch leaves it unannotated
                start.record()
                run()
                end.record()
                end.synchronize()
                yield start.elapsed_time(end) * 1e3
            else:
                began = time.perf_counter()
                run()
                yield (time.perf_counter() - began) * 1e6


def write_tuned_folder(folder: Path, found: Sequence[Tuned]) -> None:
    """Write vLLM's tuned files for this GPU, for VLLM_TUNED_CONFIG_FOLDER or `VllmOps.use_folder`.

    vLLM takes the nearest entry for a number that is not listed, except for the number of slices, which must be listed.
    Two sites with equal slices, rank and widest slice share one entry for the expand, that of the last site.
    """
    gpu = torch.cuda.get_device_name().replace(" ", "_").replace("-", "_")
    shrink: Tree = {}
    expand: Tree = {}
    for tuned in found:
        above = (tuned.max_loras + 1, len(tuned.widths), tuned.tokens)
        _enter(shrink, (*above, tuned.inputs, tuned.rank), tuned.shrink.setting)
        _enter(expand, (*above, tuned.rank, max(tuned.widths)), tuned.expand.setting)
    folder.mkdir(parents=True, exist_ok=True)
    for name, tree in ((f"{gpu}_SHRINK.json", shrink), (f"{gpu}_EXPAND_TRUE.json", expand)):
        (folder / name).write_text(json.dumps(tree, indent=1, sort_keys=True) + "\n")


def _enter(tree: Tree, path: tuple[int, int, int, int, int], setting: Setting) -> None:
    first, second, third, fourth, fifth = map(str, path)
    below = tree.setdefault(first, {}).setdefault(second, {}).setdefault(third, {})
    below.setdefault(fourth, {})[fifth] = setting

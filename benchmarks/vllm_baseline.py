"""vLLM 0.33.0's own Triton LoRA kernels as a baseline for the benchmarks, with default and with tuned settings.

    benchmarks/unpack_vllm_ops.sh .vllm_ops     # once: five files from vLLM's wheel; they are never committed
    python benchmarks/vllm_baseline.py          # checks the kernels against plain torch

Only torch and triton are needed: what the five files import from the rest of vLLM is replaced by small stand-ins.
Without CUDA the kernels run in Triton's interpreter, in float16 only: its `tl.dot` takes bfloat16 for integers. A layer
runs what vLLM's PunicaWrapperGPU.add_lora_linear runs: an empty float32 buffer, one shrink (which zeroes the buffer
first), one expand that adds to the output. vLLM calls both through a custom op; here they are plain functions, so
compare replays of CUDA graphs, as the server runs its decode steps.
"""

from __future__ import annotations

import importlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch

FOLDER = Path(__file__).resolve().parent.parent / ".vllm_ops"
OPS = "vllm.lora.ops.triton_ops"

Meta: TypeAlias = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOps:
    """The loaded kernels.

    Attributes:
        lora_shrink: `(x [T, K], A's, buffer [slices, T, r] float32, *meta, scale)`; zeroes the buffer, then fills it.
        lora_expand: `(buffer, B's, y [T, sum of widths], *meta, offset_start=0, add_inputs=False)`.
        LoRAKernelMeta: the class that sorts rows by adapter; `meta` below is the short way to it.
        shrink_module, expand_module, settings_module, envs: the modules behind them, whose caches the functions below
            empty.
    """

    lora_shrink: Callable[..., None]
    lora_expand: Callable[..., None]
    LoRAKernelMeta: Any
    shrink_module: ModuleType
    expand_module: ModuleType
    settings_module: ModuleType
    envs: ModuleType

    def meta(self, mapping: torch.Tensor, max_loras: int, *, specialize: bool = False) -> Meta:
        """Return the seven tensors that both kernels take, for an adapter index per row (`mapping` [T], -1: none).

        `specialize` is vLLM's `specialize_active_lora` (default off): the grid then has one layer per adapter in the
        batch (rounded up to a power of two), otherwise always `max_loras + 1`. Must not run inside a graph's capture.
        """
        counts = [n for n in range(1, max_loras + 2) if n & (n - 1) == 0 or n == max_loras + 1]
        made = self.LoRAKernelMeta.make(max_loras, len(mapping), mapping.device, counts if specialize else None)
        made.prepare_tensors(mapping)
        meta: Meta = made.meta_args(len(mapping), specialize)
        return meta

    def use_folder(self, folder: Path | None) -> None:
        """Take the kernels' settings from vLLM's tuned files in `folder`, or the defaults (None)."""
        vars(self.envs)["VLLM_TUNED_CONFIG_FOLDER"] = None if folder is None else str(folder)
        self.settings_module.load_lora_op_config.cache_clear()
        self.settings_module.get_lora_op_configs.cache_clear()

    def clear_pointers(self) -> None:
        """Forget the addresses and strides of all layers.

        vLLM keys them by address alone, so they go stale when memory is reused. A VllmLayer renews its own entries when
        it is made and keeps their tensors alive for graphs, so this only frees memory.
        """
        vars(self.settings_module)["_LORA_A_PTR_DICT"].clear()
        vars(self.settings_module)["_LORA_B_PTR_DICT"].clear()

    @contextmanager
    def forced(self, *, shrink: dict[str, int] | None = None, expand: dict[str, int] | None = None) -> Iterator[None]:
        """Run both kernels with the given settings, whatever the shape (None: as `use_folder` says)."""
        look_up = self.settings_module.get_lora_op_configs
        for module, setting in ((self.shrink_module, shrink), (self.expand_module, expand)):
            if setting is not None:
                vars(module)["get_lora_op_configs"] = lambda *_args, _setting=setting, **_kwargs: _setting
        try:
            yield
        finally:
            for module in (self.shrink_module, self.expand_module):
                vars(module)["get_lora_op_configs"] = look_up


def load(folder: Path = FOLDER) -> VllmOps:
    """Load the kernels that `unpack_vllm_ops.sh` unpacked into `folder`; VLLM_TUNED_CONFIG_FOLDER applies.

    Raises:
        FileNotFoundError: The folder doesn't hold the files.
        RuntimeError: vLLM itself has been imported in this process, or there is neither CUDA nor the interpreter.
    """
    place = folder / "vllm/lora/ops/triton_ops"
    if not (place / "lora_shrink_op.py").is_file():
        raise FileNotFoundError(f"no vLLM kernels in {folder}; run: benchmarks/unpack_vllm_ops.sh {folder}")
    if "vllm" in sys.modules and not hasattr(sys.modules["vllm"], "scute_stand_in"):
        raise RuntimeError("vLLM itself is imported in this process; load the baseline in a separate process")
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("there is no CUDA device; set TRITON_INTERPRET=1 before triton is imported")
    if "vllm" not in sys.modules:
        _put_stand_ins(folder)
    shrink = importlib.import_module(f"{OPS}.lora_shrink_op")
    expand = importlib.import_module(f"{OPS}.lora_expand_op")
    return VllmOps(
        lora_shrink=shrink.lora_shrink,
        lora_expand=expand.lora_expand,
        LoRAKernelMeta=importlib.import_module(f"{OPS}.lora_kernel_metadata").LoRAKernelMeta,
        shrink_module=shrink,
        expand_module=expand,
        settings_module=importlib.import_module(f"{OPS}.utils"),
        envs=sys.modules["vllm.envs"],
    )


def _put_stand_ins(folder: Path) -> None:
    import triton  # type: ignore[import-untyped] # Triton has no types
    import triton.language  # type: ignore[import-untyped] # Triton has no types

    for name in ("vllm", "vllm.utils", "vllm.lora", "vllm.lora.ops", OPS):  # packages without vLLM's own __init__
        _put(name, __path__=[str(folder / name.replace(".", "/"))], scute_stand_in=True)
    _put(
        "vllm.envs",
        VLLM_BATCH_INVARIANT=False,
        VLLM_LORA_ENABLE_DUAL_STREAM=False,
        VLLM_LORA_DISABLE_PDL=False,
        VLLM_TUNED_CONFIG_FOLDER=os.environ.get("VLLM_TUNED_CONFIG_FOLDER"),
    )
    _put("vllm.triton_utils", tl=triton.language, triton=triton)
    _put("vllm.platforms", current_platform=_Platform())
    _put("vllm.logger", init_logger=lambda _name: _Logger())
    _put("vllm.utils.math_utils", next_power_of_2=lambda n: 1 if n < 1 else 1 << (n - 1).bit_length())
    _put("vllm.utils.torch_utils", async_tensor_h2d=_to_device, direct_register_custom_op=_no_custom_op)


def _put(name: str, **contents: object) -> None:
    module = ModuleType(name)
    vars(module).update(contents)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)


class _Platform:
    """Replaces vllm.platforms.current_platform; a capability is given as an int, 90 for 9.0."""

    def is_cuda(self) -> bool:
        return torch.cuda.is_available()

    def is_device_capability(self, capability: int) -> bool:
        return self.is_cuda() and torch.cuda.get_device_capability() == divmod(capability, 10)

    def has_device_capability(self, capability: int) -> bool:
        return self.is_cuda() and torch.cuda.get_device_capability() >= divmod(capability, 10)


class _Logger:
    """Replaces vLLM's logger, without output."""

    def _silent(self, *_args: object) -> None:
        pass

    warning_once = info_once = _silent


def _to_device(data: Sequence[int], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(data, dtype=dtype).to(device)


def _no_custom_op(**_kwargs: object) -> None:
    raise AttributeError("no custom ops: the kernels fall back to plain functions")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmLayer:
    """The LoRA part of one fused GEMM as vLLM holds it, all adapter indices filled at the full rank.

    Attributes:
        a: one [max_loras, 1, rank, inputs] per slice.
        b: one [max_loras, 1, width, rank] per slice.
        tables: keeps the device tables of addresses alive for as long as the layer (graphs read them).
    """

    ops: VllmOps
    a: tuple[torch.Tensor, ...]
    b: tuple[torch.Tensor, ...]
    tables: tuple[object, ...] = field(repr=False)

    @classmethod
    def random(
        cls,
        ops: VllmOps,
        *,
        widths: Sequence[int],
        inputs: int,
        max_loras: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        seed: int = 0,
    ) -> VllmLayer:
        """Return a layer of random factors for `len(widths)` slices of one GEMM over `inputs` columns.

        Both are scaled so that the buffer and what is added to y have entries of about the size of x's.
        """
        source = torch.Generator(device).manual_seed(seed)

        def normal(rows: int, columns: int) -> torch.Tensor:
            shape = (max_loras, 1, rows, columns)
            drawn = torch.randn(shape, generator=source, dtype=dtype, device=device)
            return drawn.mul_(1 / math.sqrt(columns))

        a = tuple(normal(rank, inputs) for _ in widths)
        b = tuple(normal(width, rank) for width in widths)
        settings = vars(ops.settings_module)
        settings["_LORA_A_PTR_DICT"].pop(tuple(part.data_ptr() for part in a), None)
        settings["_LORA_B_PTR_DICT"].pop(tuple(part.data_ptr() for part in b), None)
        tables = (settings["_get_lora_a_ptr"](a, device), settings["_get_lora_b_ptr"](b, 0, device))
        return cls(ops=ops, a=a, b=b, tables=tables)

    def buffer(self, tokens: int) -> torch.Tensor:
        """Return the empty float32 buffer [slices, tokens, rank] between the kernels."""
        shape = (len(self.a), tokens, self.a[0].shape[2])
        return torch.empty(shape, dtype=torch.float32, device=self.a[0].device)

    def run(self, x: torch.Tensor, y: torch.Tensor, meta: Meta) -> None:
        """Add the adapters' part for x [T, inputs] to y [T, sum of widths] in place; both contiguous, in the dtype."""
        buffer = self.buffer(len(x))
        self.ops.lora_shrink(x, self.a, buffer, *meta, 1.0)
        self.ops.lora_expand(buffer, self.b, y, *meta, offset_start=0, add_inputs=True)

    def expected(self, x: torch.Tensor, y: torch.Tensor, mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `run` should leave in y, in float64, and the largest error that each entry may have.

        The kernels round three times to the dtype (the buffer, the delta, the sum) and sum in float32 otherwise.
        """
        unit = torch.finfo(self.a[0].dtype).eps / 2
        single = (x.shape[1] + self.a[0].shape[2]) * torch.finfo(torch.float32).eps
        want, room = y.double(), torch.zeros_like(y, dtype=torch.float64)
        for index in sorted(set(mapping.tolist()) - {-1}):
            rows = mapping == index
            x_rows, first = x[rows].double(), 0
            for a, b in zip(self.a, self.b, strict=True):
                A, B = a[index, 0].double().T, b[index, 0].double().T
                there = slice(first, first + B.shape[1])
                delta = x_rows @ A @ B
                want[rows, there] += delta
                room[rows, there] = unit * ((x_rows @ A).abs() @ B.abs() + delta.abs() + want[rows, there].abs())
                room[rows, there] += single * (x_rows.abs() @ A.abs() @ B.abs())
                first = there.stop
        return want, room * (1 + 4 * unit)  # products of two roundings

    def check(self, x: torch.Tensor, y: torch.Tensor, mapping: torch.Tensor, *, graph: bool = False) -> float:
        """Run on a copy of y and return the largest error as a share of what is allowed; above 1 it raises.

        With `graph` the run is a replay of a CUDA graph. Rows without an adapter must keep their bits.

        Raises:
            ArithmeticError: An entry is off by more than the roundings explain.
        """
        meta = self.ops.meta(mapping, self.a[0].shape[0])
        got = y.clone()
        if graph:
            replay = captured(lambda: self.run(x, got, meta))
            got.copy_(y)
            replay()
        else:
            self.run(x, got, meta)
        want, room = self.expected(x, y, mapping)
        error = (got.double() - want).abs()
        if not bool((error <= room).all()):
            raise ArithmeticError(f"off by {float((error - room).max())} more than the roundings allow")
        return float((error / room.clamp_min(1e-300)).max())


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """Run `call` once (compiles its kernels), capture it in a CUDA graph, and return the graph's replay."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch leaves it unannotated
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    replay: Callable[[], None] = graph.replay
    return replay


def check(folder: Path = FOLDER) -> None:
    """Compare the kernels with plain torch on small shapes, on CUDA (with graphs too) or else in the interpreter."""
    ops = load(folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_cuda = device.type == "cuda"
    source = torch.Generator(device).manual_seed(1)
    mapping = torch.tensor([2, -1, 0, 0, 2, 1, -1], device=device)
    for dtype in (torch.float16, torch.bfloat16) if on_cuda else (torch.float16,):
        for widths, rank in (((64,), 16), ((96, 32, 32), 8), ((48, 48), 32)):
            layer = VllmLayer.random(ops, widths=widths, inputs=192, max_loras=3, rank=rank, dtype=dtype, device=device)
            x = torch.randn(len(mapping), 192, generator=source, device=device).to(dtype)
            y = torch.randn(len(mapping), sum(widths), generator=source, device=device).to(dtype)
            shares = [layer.check(x, y, mapping), layer.check(x, y, torch.full_like(mapping, -1))]
            if on_cuda:
                shares += [layer.check(x, y, rows, graph=True) for rows in (mapping, mapping.clamp_min(1))]
            print(f"{dtype} slices {widths} rank {rank}: largest error {max(shares):.2f} of what is allowed")


if __name__ == "__main__":
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    check(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)

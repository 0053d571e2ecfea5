"""Loads the Triton LoRA kernels of vLLM 0.33.0, the baseline of the benchmarks, with default or tuned settings.

    benchmarks/unpack_vllm_ops.sh .vllm_ops     # once: five files of vLLM's wheel; git ignores them
    python benchmarks/vllm_baseline.py          # compares the kernels with plain torch

Only torch and Triton are needed: stand-ins replace the parts of vLLM that the five files import. Without CUDA the
kernels run in Triton's interpreter, in float16 only, since its `tl.dot` treats bfloat16 as integers. A layer does what
vLLM's PunicaWrapperGPU.add_lora_linear does: an empty float32 buffer, one shrink (which zeroes the buffer first), one
expand that adds to the output. vLLM calls both through a custom op, and this module calls plain functions. Compare
replays of CUDA graphs only, which is how vLLM runs decode steps.
"""

from __future__ import annotations

import argparse
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
from step_timing import capture, warm_up

FOLDER = Path(__file__).resolve().parent.parent / ".vllm_ops"
OPS = "vllm.lora.ops.triton_ops"

Meta: TypeAlias = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOps:
    """The loaded kernels.

    Attributes:
        lora_shrink: `(x [T, K], A's, buffer [slices, T, r] float32, *meta, scale)`; zeroes the buffer, then fills it.
        lora_expand: `(buffer, B's, y [T, sum of widths], *meta, offset_start=0, add_inputs=False)`.
        LoRAKernelMeta: the class that sorts rows by adapter; `meta` calls it.
        shrink_module, expand_module, settings_module, envs: the modules of these functions; the methods change their
            caches and settings.
    """

    lora_shrink: Callable[..., None]
    lora_expand: Callable[..., None]
    LoRAKernelMeta: Any
    shrink_module: ModuleType
    expand_module: ModuleType
    settings_module: ModuleType
    envs: ModuleType

    def meta(self, mapping: torch.Tensor, max_loras: int, *, specialize: bool = False) -> Meta:
        """Return the seven tensors that both kernels take. Must not run while a graph is captured.

        Args:
            mapping: Adapter index of each row, [T]; -1: no adapter.
            max_loras: Number of adapters that the layers have.
            specialize: vLLM's `specialize_active_lora`: the grid then has one layer per adapter in the batch (rounded
                up to a power of two) instead of `max_loras + 1`.
        """
        counts = [n for n in range(1, max_loras + 2) if n & (n - 1) == 0 or n == max_loras + 1]
        made = self.LoRAKernelMeta.make(max_loras, len(mapping), mapping.device, counts if specialize else None)
        made.prepare_tensors(mapping)
        meta: Meta = made.meta_args(len(mapping), specialize)
        return meta

    def use_folder(self, folder: Path | None) -> None:
        """Take the kernels' settings from vLLM's tuned files in `folder`; None: the defaults."""
        vars(self.envs)["VLLM_TUNED_CONFIG_FOLDER"] = None if folder is None else str(folder)
        self.settings_module.load_lora_op_config.cache_clear()
        self.settings_module.get_lora_op_configs.cache_clear()

    def clear_pointers(self) -> None:
        """Clear the tables of addresses and strides of all layers, to free their memory.

        vLLM keys them by address, so entries become stale when memory is reused. A VllmLayer replaces the entries of
        its addresses when it is created, and keeps their tensors alive for graphs.
        """
        vars(self.settings_module)["_LORA_A_PTR_DICT"].clear()
        vars(self.settings_module)["_LORA_B_PTR_DICT"].clear()

    @contextmanager
    def forced(self, *, shrink: dict[str, int] | None = None, expand: dict[str, int] | None = None) -> Iterator[None]:
        """Run both kernels with the given settings for all shapes; None: the settings of `use_folder`."""
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
    """Load the kernels that `unpack_vllm_ops.sh` unpacked into `folder`, with the settings of VLLM_TUNED_CONFIG_FOLDER.

    Raises:
        FileNotFoundError: The folder does not contain the files.
        RuntimeError: vLLM has been imported in this process, or there is neither CUDA nor Triton's interpreter.
    """
    ops_folder = folder / "vllm/lora/ops/triton_ops"
    if not (ops_folder / "lora_shrink_op.py").is_file():
        raise FileNotFoundError(f"no vLLM kernels in {folder}; run: benchmarks/unpack_vllm_ops.sh {folder}")
    if "vllm" in sys.modules and not hasattr(sys.modules["vllm"], "scute_stand_in"):
        raise RuntimeError("vLLM is imported in this process; load the baseline in a separate process")
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

    for name in ("vllm", "vllm.utils", "vllm.lora", "vllm.lora.ops", OPS):  # packages without vLLM's __init__
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
    """Stand-in for vllm.platforms.current_platform; a capability is an int, 90 for 9.0."""

    def is_cuda(self) -> bool:
        return torch.cuda.is_available()

    def is_device_capability(self, capability: int) -> bool:
        return self.is_cuda() and torch.cuda.get_device_capability() == divmod(capability, 10)

    def has_device_capability(self, capability: int) -> bool:
        return self.is_cuda() and torch.cuda.get_device_capability() >= divmod(capability, 10)


class _Logger:
    """Stand-in for vLLM's logger, without output."""

    def _silent(self, *_args: object) -> None:
        pass

    warning_once = info_once = _silent


def _to_device(data: Sequence[int], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(data, dtype=dtype).to(device)


def _no_custom_op(**_kwargs: object) -> None:
    raise AttributeError("no custom ops: the kernels fall back to plain functions")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmLayer:
    """The LoRA factors of one fused GEMM as vLLM stores them, all `max_loras` adapters at the full rank.

    Attributes:
        a: one [max_loras, 1, rank, inputs] per slice.
        b: one [max_loras, 1, width, rank] per slice.
        tables: the device tables of addresses, kept alive because graphs read them.
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
        """Return a layer of random factors for a GEMM of `inputs` columns and slices of the given widths.

        The factors are scaled so that the entries of the buffer and of the sum added to y are about as large as x's.
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
        """Add the adapters' terms for x [T, inputs] to y [T, sum of widths], both contiguous, of the factors' dtype."""
        buffer = self.buffer(len(x))
        self.ops.lora_shrink(x, self.a, buffer, *meta, 1.0)
        self.ops.lora_expand(buffer, self.b, y, *meta, offset_start=0, add_inputs=True)

    def expected(self, x: torch.Tensor, y: torch.Tensor, mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the value of y after `run`, in float64, and a bound on the error of each entry.

        The kernels round three times to the dtype (the buffer, the delta, the sum) and accumulate in float32.
        """
        unit = torch.finfo(self.a[0].dtype).eps / 2
        single = (x.shape[1] + self.a[0].shape[2]) * torch.finfo(torch.float32).eps
        want, bound = y.double(), torch.zeros_like(y, dtype=torch.float64)
        for adapter in sorted(set(mapping.tolist()) - {-1}):
            rows = mapping == adapter
            x_rows, first = x[rows].double(), 0
            for a, b in zip(self.a, self.b, strict=True):
                A, B = a[adapter, 0].double().T, b[adapter, 0].double().T
                columns = slice(first, first + B.shape[1])
                delta = x_rows @ A @ B
                want[rows, columns] += delta
                bound[rows, columns] = unit * ((x_rows @ A).abs() @ B.abs() + delta.abs() + want[rows, columns].abs())
                bound[rows, columns] += single * (x_rows.abs() @ A.abs() @ B.abs())
                first = columns.stop
        return want, bound * (1 + 4 * unit)  # for products of two roundings

    def check(self, x: torch.Tensor, y: torch.Tensor, mapping: torch.Tensor, *, graph: bool = False) -> float:
        """Run on a copy of y and return the largest error over its bound; rows without an adapter must not change.

        Args:
            x: Inputs [T, inputs].
            y: Outputs [T, sum of widths] before the run.
            mapping: Adapter index of each row, [T]; -1: no adapter.
            graph: Whether the run is a replay of a CUDA graph.

        Raises:
            ArithmeticError: The error of an entry exceeds its bound.
        """
        meta = self.ops.meta(mapping, self.a[0].shape[0])
        got = y.clone()
        if graph:
            replay = captured(lambda: self.run(x, got, meta))
            got.copy_(y)
            replay()
        else:
            self.run(x, got, meta)
        want, bound = self.expected(x, y, mapping)
        error = (got.double() - want).abs()
        if not bool((error <= bound).all()):
            raise ArithmeticError(f"an error exceeds the bound of its roundings by {float((error - bound).max())}")
        return float((error / bound.clamp_min(1e-300)).max())


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """Make a call once, capture it in a CUDA graph, and return the graph's replay."""
    warm_up(call)
    replay: Callable[[], None] = capture(call).replay
    return replay


def check(folder: Path = FOLDER) -> None:
    """Compare the kernels with plain torch on small shapes: on CUDA, also in graphs, or in Triton's interpreter."""
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
            print(f"{dtype} slices {widths} rank {rank}: largest error {max(shares):.2f} of its bound")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help="folder with the unpacked kernels")
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    check(parser.parse_args().folder)

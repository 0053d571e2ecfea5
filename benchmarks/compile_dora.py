"""Times the compilation of a DoRA adapter for a base of the shape of Llama 3.2 1B, and measures its memory.

    PYTHONPATH=. python benchmarks/compile_dora.py --work FOLDER

The first run writes the base (2.5 GB, random weights in bfloat16, five files) and the adapter (rank 16, all seven
projections) into FOLDER. All measurements read from the page cache, in one process, in turn; figures are medians. They
are compared with `cat` of the base's files to /dev/null, which also reads the embedding, and with PEFT's column norms,
whole matrices at a time. PEFT computes B A in two ways, and both are timed: `forward` multiplies an identity matrix
by A and B; `update_layer`, which runs when an adapter is created or loaded, multiplies B by A.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from scute_compile.base.shapes import SHAPES
from tests.support.sparse_base import layer_weights, llama_config

MODEL = SHAPES["llama-3.2-1b"]
HIDDEN, LAYERS, VOCABULARY = MODEL.projection("q_proj").inputs, MODEL.layers, 128256
RANK, ALPHA = 16, 32
LAYERS_PER_FILE = 4
PROJECTIONS = layer_weights(MODEL)
CONFIG = llama_config(
    MODEL, head_dim=64, vocabulary=VOCABULARY, max_position_embeddings=131072, tie_word_embeddings=True
)
AIMS = {
    "compile / cat": (4.0, "at most"),
    "PEFT forward / compile": (6.0, "at least"),
    "PEFT update_layer / norms": (6.0, "at least"),
    "peak MB": (1000.0, "at most"),
}
"""Bound of a figure, and its direction."""


def write_case(work: Path) -> tuple[Path, Path]:
    """Write the base and the adapter unless they exist, and return their folders."""
    base, adapter = work / "base", work / "adapter"
    if not (adapter / "adapter_config.json").is_file():
        shutil.rmtree(base, ignore_errors=True)
        shutil.rmtree(adapter, ignore_errors=True)
        base.mkdir(parents=True)
        adapter.mkdir()
        generator = torch.Generator().manual_seed(0)
        write_adapter(adapter, write_base(base, generator), generator)
    return base, adapter


def write_base(folder: Path, generator: torch.Generator) -> Mapping[str, torch.Tensor]:
    """Write the base, one shard in memory at a time, and return every projection's column norms."""
    outside: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    files = [outside]
    for first in range(0, LAYERS, LAYERS_PER_FILE):
        files.append({})
        for layer in range(first, first + LAYERS_PER_FILE):
            for name in ("input_layernorm", "post_attention_layernorm"):
                files[-1][f"model.layers.{layer}.{name}.weight"] = (HIDDEN,)
            files[-1] |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in PROJECTIONS.items()}
    norms: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}
    for number, shapes in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        weight_map |= dict.fromkeys(shapes, name)
        weights = {key: _weight(shape, generator) for key, shape in shapes.items()}
        save_file(weights, folder / name, metadata={"format": "pt"})
        projections = {key: weight for key, weight in weights.items() if key.endswith("_proj.weight")}
        norms |= {key.removesuffix(".weight"): weight.float().norm(dim=1) for key, weight in projections.items()}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return norms


def _weight(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)


def write_adapter(folder: Path, norms: Mapping[str, torch.Tensor], generator: torch.Generator) -> None:
    """Write a PEFT folder in float32; magnitudes deviate from the base's column norms by 30%."""
    tensors: dict[str, torch.Tensor] = {}
    for name, norm in norms.items():
        outputs, inputs = PROJECTIONS[name.split(".", 3)[3]]
        stem = f"base_model.model.{name}.lora_"
        tensors[f"{stem}A.weight"] = torch.randn(RANK, inputs, generator=generator) / inputs**0.5
        tensors[f"{stem}B.weight"] = 0.02 * torch.randn(outputs, RANK, generator=generator)
        tensors[f"{stem}magnitude_vector"] = norm * (1 + 0.3 * torch.randn(outputs, generator=generator))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "peft_version": "0.21.2",
        "task_type": "CAUSAL_LM",
        "use_dora": True,
        "bias": "none",
        "base_model_name_or_path": "base",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": sorted(name.rsplit(".", 1)[1] for name in PROJECTIONS),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def cat(base: Path) -> None:
    """Read all files of the base and discard their content."""
    with Path("/dev/null").open("wb") as sink:
        subprocess.run(["cat", *sorted(map(str, base.glob("*.safetensors")))], stdout=sink, check=True)


def compile_once(base: Path, adapter: Path) -> None:
    """Compile into a new store, as `scute compile` does after its imports."""
    from scute_compile.driver.bases import open_model
    from scute_compile.driver.packing import compile_planned
    from scute_compile.ir.target import Target
    from scute_compile.pipeline import plan

    with tempfile.TemporaryDirectory(dir=base.parent) as store:
        opened = open_model(str(base), weights=True)
        planned = plan(str(adapter), opened, Target(), hash_files=True)
        (result,) = compile_planned((planned,), opened, Path(store), lambda *_: None)
        if not isinstance(result, Path):
            raise result


def norms_alone(base: Path, adapter: Path) -> Callable[[], object]:
    """Return a call that computes all column norms with the compiler; the base is open and the adapter planned."""
    from scute_compile.driver.bases import open_model
    from scute_compile.ir.dtypes import DType
    from scute_compile.ir.target import Target
    from scute_compile.pack.pack import Package, read_norms
    from scute_compile.pipeline import plan

    opened = open_model(str(base), weights=True)
    planned = plan(str(adapter), opened, Target(), hash_files=True)
    if planned.program is None or planned.adapter is None or planned.scan is None:
        raise AssertionError(planned.findings)
    package = Package(
        name="dora",
        program=planned.program,
        adapter=planned.adapter,
        base={},
        sources={},
        tensor_sha256=planned.scan.tensor_sha256,
        dtypes=(DType.BFLOAT16,),
        tool="",
    )
    return lambda: read_norms((package,), opened.checkpoint, lambda *_: None)


def peft_norms(base: Path, adapter: Path, *, identity: bool) -> None:
    """Compute all column norms with PEFT's code; each weight is read whole and converted to float32.

    Args:
        base: The base's folder.
        adapter: The adapter's folder.
        identity: Whether B A is computed as in `forward`, not as in `update_layer`.
    """
    from peft.tuners.lora.dora import DoraLinearLayer

    dora, factors = DoraLinearLayer(fan_in_fan_out=False), load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name, weight in _projections(base):
            a, b = (factors[f"base_model.model.{name}.lora_{slot}.weight"] for slot in "AB")
            delta = dora.get_lora_weight(_linear(a), _linear(b)) if identity else b @ a
            dora.get_weight_norm(weight.float(), delta, ALPHA / RANK)


def _linear(weight: torch.Tensor) -> torch.nn.Linear:
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return layer


def _projections(base: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(base.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                if key.endswith("_proj.weight"):
                    yield key.removesuffix(".weight"), file.get_tensor(key)


PEAK = """
import sys, torch
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import compile_dora, scute_compile.pack.pack, scute_compile.pipeline
def peak():  # ru_maxrss would start from the parent's peak
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
before = peak()
compile_dora.compile_once(Path(sys.argv[2]), Path(sys.argv[3]))
print(before, peak())
"""


def peak_memory(base: Path, adapter: Path) -> tuple[float, float]:
    """Return the peak resident memory of a compiling process in MB: after its imports, and at its end."""
    command = [sys.executable, "-c", PEAK, str(Path(__file__).parent), str(base), str(adapter)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return float(printed[0]), float(printed[1])


def _seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure(base: Path, adapter: Path, repeats: int) -> dict[str, float]:
    """Return medians in seconds, their ratios, and peak memory in MB; the measurements alternate."""
    actions: dict[str, Callable[[], object]] = {
        "cat": lambda: cat(base),
        "compile": lambda: compile_once(base, adapter),
        "norms": norms_alone(base, adapter),
        "PEFT forward": lambda: peft_norms(base, adapter, identity=True),
        "PEFT update_layer": lambda: peft_norms(base, adapter, identity=False),
    }
    cat(base)  # warms the page cache
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(repeats):
        for name, action in actions.items():
            times[name].append(_seconds(action))
    figures = {f"{name} s": statistics.median(each) for name, each in times.items()}
    for above, below in (
        ("compile", "cat"),
        ("norms", "cat"),
        ("PEFT forward", "norms"),
        ("PEFT forward", "compile"),
        ("PEFT update_layer", "norms"),
        ("PEFT update_layer", "compile"),
    ):
        figures[f"{above} / {below}"] = figures[f"{above} s"] / figures[f"{below} s"]
    before, after = peak_memory(base, adapter)
    return {**figures, "imports MB": before, "peak MB": after - before}


def main() -> None:
    """Write base and adapter, measure, and print a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="folder for base and adapter, kept (default: a temporary folder)")
    parser.add_argument("--repeats", type=int, default=5, help="repetitions of each measurement")
    options = parser.parse_args()
    work = options.work or Path(tempfile.mkdtemp(prefix="compile-dora-"))
    try:
        base, adapter = write_case(work)
        size = sum(path.stat().st_size for path in base.glob("*.safetensors"))
        figures = measure(base, adapter, options.repeats)
    finally:
        if options.work is None:
            shutil.rmtree(work, ignore_errors=True)
    print(f"base {size / 1e9:.2f} GB, torch {torch.__version__}, {torch.get_num_threads()} threads")
    for name, value in figures.items():
        bound, word = AIMS.get(name, (None, ""))
        print(f"{name:<28}{value:>10.3f}" + (f"   (aim: {word} {bound:g})" if bound is not None else ""))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

"""The rooms import in one direction and without circles, and only some of them import torch."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("passes", "pack", "formats", "runtime_min", "runtime_vllm")
RUNTIME = ("batching", "model", "step", "pool", "ranks", "base_model layers reference")
LAYERS = [
    *("cli", "runtime_vllm", "driver", "pipeline pack", "passes"),
    *(" ".join(f"runtime_min.{name}" for name in names.split()) for names in RUNTIME),
    *("formats", "base", "ir", "diagnostics"),
]
"""From the top down: a module imports from its own room and from lower ones."""
APART = {
    "passes": {"runtime_min"},
    "runtime_min": {"passes", "pack", "pipeline", "driver"},
    "pack": {"pipeline"},
    "pipeline": {"pack", "formats.artifact", "runtime_min"},
    "runtime_min.oracle": {f"runtime_min.{name}" for name in RUNTIME[:5]},
}
"""Room -> other rooms that it must not import, in addition to the order above."""
TORCH = ("pack", "runtime_min", "runtime_vllm", "formats.artifact_tensors", "cli.demo", "cli.run")


def modules() -> dict[str, Path]:
    folders = [ROOT / "scute_compile", *(ROOT / room for room in ROOMS)]
    files = [file for folder in folders for file in folder.rglob("*.py") if file.resolve() == file]
    parts = {file: file.relative_to(ROOT).with_suffix("").parts for file in files}
    return {".".join(p for p in parts[file] if p not in {"scute_compile", "__init__"}): file for file in files}


def imports(source: str, *, late: bool = True) -> Iterator[str]:
    """Yield the names that a module imports; without `late`, only those that it imports at once."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    guarded = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    skipped = {id(node) for part in ([] if late else functions) + guarded for node in ast.walk(part)}
    for node in ast.walk(tree):
        if id(node) not in skipped and isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}".removeprefix("scute_compile.") for alias in node.names)
        elif id(node) not in skipped and isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def inside(name: str, rooms: Iterable[str]) -> bool:
    return any(f"{name}.".startswith(f"{room}.") for room in rooms)


def faults(sources: dict[str, str]) -> list[str]:
    """Return every forbidden import: of a higher room, of a room in `APART`, or of torch outside `TORCH`."""
    found = []
    for name, source in sources.items():
        height = next((i for i, rooms in enumerate(LAYERS) if inside(name, rooms.split())), 0)
        barred = {room for rooms in LAYERS[:height] for room in rooms.split()} if name.count(".") or height else set()
        barred |= {other for room, others in APART.items() if inside(name, room) for other in others}
        barred = set() if name in {"", "__main__"} else {room for room in barred if not inside(name, room)}
        found += [f"{name} -> {target}" for target in imports(source) if inside(target, barred)]
        if not inside(name, TORCH):
            found += [f"{name} -> {t}" for t in imports(source, late=False) if inside(t, ("torch", "transformers"))]
    return found


def test_rooms_import_downwards_and_torch_stays_in_its_rooms() -> None:
    sources = {name: file.read_text() for name, file in modules().items()}
    assert faults(sources) == []
    planted = sources["ir.linear"] + "\nfrom scute_compile.cli.app import main\nimport torch\n"
    assert faults({"ir.linear": planted}) == ["ir.linear -> cli.app.main", "ir.linear -> torch"]


def test_no_modules_import_each_other_in_a_circle() -> None:
    files = modules()
    graph = {
        name: {t.rpartition(".")[0] for t in imports(file.read_text(), late=False)} for name, file in files.items()
    }
    assert set(files) <= set(TopologicalSorter({n: targets - {n} for n, targets in graph.items()}).static_order())

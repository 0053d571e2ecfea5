"""Checks on a checkpoint's tensors that need no method: numbers, shapes, and modules that are never sites."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from scute_compile.base.structure import ModelStructure
from scute_compile.diagnostics import Code, Findings
from scute_compile.ir.expressions import Ref
from scute_compile.ir.linear import Linear
from scute_compile.passes.parse.front_end import FrontEnd, Tensors
from scute_compile.passes.parse.keys import SortedKeys, module_path
from scute_compile.passes.parse.targets import EMBEDDINGS, HEADS, some
from scute_compile.passes.scan import TensorFacts

EXAMPLES = 3
NUMBERS = frozenset({"F32", "F16", "BF16", "F64"})


def check_tensors(
    keys: SortedKeys, refs: Mapping[str, Ref], facts: Mapping[str, TensorFacts], front_end: FrontEnd, findings: Findings
) -> bool:
    """Record tensors that are empty, not finite, or no floating-point numbers. Returns whether shapes are usable."""
    empty = []
    slots = {key: slot for tensors in keys.modules.values() for slot, key in tensors.items()}
    for key, ref in refs.items():
        if 0 in ref.shape and slots.get(key) not in front_end.may_be_empty:
            empty.append(key)
        if (key in slots or key in keys.shared.values()) and ref.dtype not in NUMBERS:
            findings.error(
                Code.SC110,
                where=key,
                found=f"dtype {ref.dtype}",
                expected="F32, BF16, F16 or F64",
                next="save the adapter in a floating-point dtype",
            )
        if not facts[key].finite:
            findings.error(
                Code.SC309,
                where=key,
                found=f"`{key}` holds NaN or infinity: its values are not finite",
                expected="finite numbers",
                next="the training run diverged or the save went wrong; use an earlier checkpoint",
            )
    if empty:
        findings.error(
            Code.SC308,
            where=empty[0],
            found=f"{len(empty)} of {len(refs)} tensors have a dimension of 0: {some(empty)}",
            expected="whole tensors",
            next="gather the sharded weights before saving (under ZeRO-3 or FSDP, save through the trainer)",
        )
    return not empty


def drop_unserved(raw_paths: Iterable[str], structure: ModelStructure, findings: Findings) -> tuple[str, ...]:
    """Return the raw module paths that may be linear sites; record heads, embeddings and experts."""
    kept = []
    for raw in raw_paths:
        segments = raw.split(".")
        path = module_path(raw)
        if "experts" in segments or segments[-1] == "base_layer":
            findings.error(
                Code.SC212,
                where=raw,
                found="low-rank factors on stacked experts",
                expected="linear layers",
                next="train with target_modules on linear layers only",
            )
        elif segments[-1] in HEADS | EMBEDDINGS or path in structure.embeddings:
            findings.error(
                Code.SC317,
                where=raw,
                found=f"`{segments[-1]}` is an output head or an embedding, which is not served",
                expected="linear layers between the embedding and the head",
                next=f"train without `{segments[-1]}` among the targets",
            )
        else:
            kept.append(raw)
    return tuple(kept)


def check_shapes(
    front_end: FrontEnd, modules: Mapping[str, Tensors], structure: ModelStructure, findings: Findings
) -> bool:
    """Hold the tensors' sizes against the base's layers; return whether all fit. Most of them wrong is another base."""
    wrong = []
    for path, tensors in modules.items():
        linear = structure.linears[path]
        told = front_end.dimensions(tensors)
        if any(size and size != own for size, own in zip(told, _size(linear), strict=True)):
            wrong.append((path, told, _size(linear)))
    texts = [f"{path}: adapter {_words(told)}, base {own[0]} in, {own[1]} out" for path, told, own in wrong]
    if 2 * len(wrong) > len(modules):
        findings.error(
            Code.SC402,
            where=structure.model_type,
            found=f"{len(wrong)} of {len(modules)} modules have other shapes; " + "; ".join(texts[:EXAMPLES]),
            expected="the base that the adapter was trained on",
            next="pass that base with --base",
        )
    else:
        for (path, _, _), text in zip(wrong, texts, strict=True):
            findings.error(
                Code.SC307,
                where=path,
                found=text,
                expected="tensors that fit the layer",
                next="check that the base is the one the adapter was trained on",
            )
    return not wrong


def _size(linear: Linear) -> tuple[int, int]:
    return linear.in_features, linear.out_features


def _words(told: tuple[int, int]) -> str:
    return ", ".join(f"{size} {axis}" for size, axis in zip(told, ("in", "out"), strict=True) if size)

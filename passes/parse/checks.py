"""Checks of a checkpoint's tensors that are the same for every method: dtypes, values, shapes, unserved modules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from scute_compile.base.heads import is_embedding, is_output_head
from scute_compile.base.structure import ModelStructure
from scute_compile.diagnostics import Code, Findings
from scute_compile.ir.dtypes import FORMATS
from scute_compile.ir.expressions import Ref
from scute_compile.ir.linear import Linear
from scute_compile.passes.parse.front_end import FrontEnd, Tensors
from scute_compile.passes.parse.keys import SortedKeys, module_path
from scute_compile.passes.parse.targets import some
from scute_compile.passes.scan import Facts

EXAMPLES = 3
"""The number of layers that a message lists."""


def check_tensors(
    keys: SortedKeys, refs: Mapping[str, Ref], facts: Facts, front_end: FrontEnd, findings: Findings
) -> bool:
    """Record faults that every method has in common; return whether the front end can read the shapes.

    Records SC110 (not floating-point numbers), SC307 (another number of dimensions), SC308 (empty) and SC309 (not
    finite).
    """
    empty, usable = [], True
    by_name = {parameter.name: parameter for parameter in (*front_end.parameters, *front_end.shared)}
    parameters = {key: name for tensors in keys.modules.values() for name, key in tensors.items()}
    parameters |= {key: name for name, key in keys.shared.items()}
    for key, ref in refs.items():
        if 0 in ref.shape and parameters.get(key) not in front_end.may_be_empty:
            empty.append(key)
        elif key in parameters and len(ref.shape) != len(axes := by_name[parameters[key]].axes):
            usable = False
            findings.error(
                Code.SC307,
                where=key,
                found=f"`{key}` of shape {ref.shape}: {_dimensions(len(ref.shape))}",
                expected=f"{_dimensions(len(axes))}: ({', '.join(axes)})",
                next="save the adapter again; PEFT refuses this tensor as well",
            )
        if key in parameters and ref.dtype not in FORMATS:
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
            expected="no dimension of 0",
        )
    return usable and not empty


def _dimensions(count: int) -> str:
    return "1 dimension" if count == 1 else f"{count} dimensions"


def drop_unserved(raw_paths: Iterable[str], structure: ModelStructure | None, findings: Findings) -> tuple[str, ...]:
    """Return the raw module paths that may be linear sites; record heads, embeddings (SC317) and experts (SC212)."""
    embeddings = frozenset() if structure is None else structure.embeddings
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
            )
        elif is_output_head(path) or is_embedding(path) or path in embeddings:
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
    """Compare the tensors' sizes with the base's layers; return whether all fit.

    Records SC402, another base, when more than half of the modules don't fit, and otherwise SC307 for each.
    """
    wrong: list[tuple[str, str]] = []
    axes = {parameter.name: parameter.axes for parameter in front_end.parameters}
    for path, tensors in modules.items():
        linear, found = structure.linears[path], front_end.dimensions(tensors)
        expected = (linear.in_features, linear.out_features)
        other = next((ref for name, ref in tensors.items() if _is_of_other_size(ref, axes[name], linear)), None)
        if any(size and size != of_base for size, of_base in zip(found, expected, strict=True)):
            wrong.append((path, f"{path}: adapter {_words(found)}, base {expected[0]} in, {expected[1]} out"))
        elif other is not None:
            wrong.append((path, f"`{other.key}` of shape {other.shape}, base {expected[0]} in, {expected[1]} out"))
    texts = [text for _, text in wrong]
    if 2 * len(wrong) > len(modules):
        findings.error(
            Code.SC402,
            where=structure.model_type,
            found=f"{len(wrong)} of {len(modules)} modules have other shapes; " + "; ".join(texts[:EXAMPLES]),
            expected="the base that the adapter was trained on",
            next="pass that base with --base",
        )
    else:
        for path, text in wrong:
            findings.error(Code.SC307, where=path, found=text, expected="tensors that fit the layer")
    return not wrong


def _is_of_other_size(ref: Ref, axes: tuple[str, ...], linear: Linear) -> bool:
    """Return whether an axis of the layer has another size than the layer's, where that is known."""
    sizes = {"in": linear.in_features, "out": linear.out_features}
    return any(sizes.get(axis, 0) not in (0, size) for axis, size in zip(axes, ref.shape, strict=True))


def _words(sizes: tuple[int, int]) -> str:
    return ", ".join(f"{size} {axis}" for size, axis in zip(sizes, ("in", "out"), strict=True) if size)

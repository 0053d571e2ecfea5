"""Opens base models for planning, packing and serving."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scute_compile.base.scopes import model_type_of
from scute_compile.base.structure import ModelStructure, build_structure
from scute_compile.diagnostics import Code, fail
from scute_compile.formats.base_checkpoint import BaseCheckpoint, open_base
from scute_compile.formats.fingerprint import structure_hash
from scute_compile.formats.peft_folder import AdapterFolder
from scute_compile.formats.safetensors import read_blocks
from scute_compile.ir.dtypes import FORMATS
from scute_compile.ir.expressions import Ref, Source

LONGEST_MODEL_TYPE = 200
BLOCK_VALUES = 1 << 20
"""Values per block in which two tensors are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenBase:
    """An opened base model: its files and its structure."""

    checkpoint: BaseCheckpoint
    structure: ModelStructure

    @property
    def has_tensors(self) -> bool:
        """Whether the base has weights, and not only a configuration."""
        return bool(self.checkpoint.tensors)

    def structure_hash(self) -> str:
        """Return the hash of tensor names, shapes and the configuration fields that matter."""
        tensors = {key: (ref.dtype, ref.shape) for key, ref in self.structure.tensors.items()}
        return structure_hash(self.structure.model_type, self.structure.parameters, tensors)

    def same_values(self, adapter: AdapterFolder, adapter_tensor: Ref, base_tensor: Ref) -> bool | None:
        """Compare an adapter's tensor with one of the base, as numbers, block by block.

        Returns:
            Whether all values are equal; None where the base's weights are absent or either dtype is not read.
        """
        stored = self.checkpoint.tensors.get(base_tensor.key)
        if stored is None or stored.file is None or not {adapter_tensor.dtype, base_tensor.dtype} <= FORMATS.keys():
            return None
        entry = adapter.tensors[adapter_tensor.key]
        blocks = zip(
            read_blocks(adapter.weights, entry, BLOCK_VALUES * (entry.nbytes // max(1, entry.size))),
            read_blocks(stored.file, stored.entry, BLOCK_VALUES * (stored.entry.nbytes // max(1, stored.entry.size))),
            strict=True,
        )
        return all(np.array_equal(copy, original) for copy, original in blocks)


def open_model(source: str, *, weights: bool) -> OpenBase:
    """Open a base model and derive its structure. No weights are read.

    Args:
        source: A folder or a Hub id.
        weights: Whether to download the weights of a base on the Hub (for compiling), or only their headers.

    Raises:
        ScuteError: SC401 for an empty name, SC404 for a quantized base, and what `open_base` raises.
    """
    if not source:
        fail(
            Code.SC401,
            where="--base",
            found="an empty name",
            expected="a folder or a Hub id",
            next="name the base, or leave --base out to use the adapter's",
        )
    checkpoint = open_base(source, weights=weights)
    if len(model_type := model_type_of(checkpoint.config)) > LONGEST_MODEL_TYPE:
        fail(
            Code.SC112,
            where=source,
            found=f"a model_type of {len(model_type)} characters",
            expected=f"at most {LONGEST_MODEL_TYPE}",
        )
    if checkpoint.quantized:
        fail(
            Code.SC404,
            where=source,
            found=f"quantization_config: {checkpoint.quantized}",
            expected="weights in float32, bfloat16 or float16",
        )
    if checkpoint.tensors:
        tensors = {
            key: Ref(Source.BASE, key, stored.entry.shape, stored.entry.dtype)
            for key, stored in checkpoint.tensors.items()
        }
    else:
        from scute_compile.base.config_only import check_counts, structure_tensors

        if checkpoint.path is None:
            raise AssertionError(source)
        check_counts(checkpoint.config, source)
        tensors = dict(structure_tensors(checkpoint.path / "config.json"))
    return OpenBase(checkpoint=checkpoint, structure=build_structure(checkpoint.config, tensors))

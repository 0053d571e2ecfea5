"""Claims the keys that are not parameters of the method: trained biases and copies of base weights; or refuses them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from scute_compile.base.heads import is_output_head, tied_embedding
from scute_compile.base.structure import ModelStructure
from scute_compile.diagnostics import Code, Findings
from scute_compile.ir.dtypes import FORMATS
from scute_compile.ir.expressions import Add, Ref, Scale
from scute_compile.ir.program import Site
from scute_compile.passes.context import SameValues

FOREIGN = re.compile(r"\.lora_[ab](\.weight)?$|\.lora\.(up|down)\.|\.lora_(up|down)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """The inputs of `claim_rest`, beside the keys."""

    config: Mapping[str, object]
    structure: ModelStructure
    adapted: frozenset[str]
    """Base module paths that the method adapts."""
    to_base: Callable[[str], str]
    """Translates a raw path of the checkpoint into the base's."""
    same_values: SameValues
    inert_keys: tuple[str, ...]
    """Words in the keys of training-time buffers."""
    findings: Findings


def claim_rest(refs: Mapping[str, Ref], rest: Rest) -> Mapping[str, Ref]:
    """Claim every remaining key, or record why it can't be claimed.

    Returns:
        The trained biases, by base module path.
    """
    biases: dict[str, Ref] = {}
    for key, ref in refs.items():
        if any(word in key for word in rest.inert_keys):
            rest.findings.note(Code.SC321, where=key, found=f"`{key}` {ref.shape}")
        elif key.endswith(".bias"):
            _claim_bias(ref, rest, biases)
        elif not _is_known_fault(key, rest):
            _claim_copy(ref, rest)
    return biases


def with_biases(sites: tuple[Site, ...], biases: Mapping[str, Ref], structure: ModelStructure) -> tuple[Site, ...]:
    """Return the sites with trained biases in place of the base's; layers with only a trained bias become sites."""
    by_name = {site.name: site for site in sites}
    for path, bias in biases.items():
        site = by_name.get(path) or Site(linear=structure.linears[path])
        extra = site.beta.y if isinstance(site.beta, Add) and isinstance(site.beta.y, Scale) else None
        by_name[path] = replace(site, beta=Add(bias, extra) if extra is not None else bias)
    return tuple(by_name[path] for path in structure.linears if path in by_name)


def _claim_bias(ref: Ref, rest: Rest, biases: dict[str, Ref]) -> None:
    old_spelling = not ref.key.endswith(".base_layer.bias")
    path = rest.to_base(ref.key.removesuffix(".bias").removesuffix(".base_layer"))
    base_bias = rest.structure.tensors.get(f"{path}.bias")
    linear = rest.structure.linears.get(path)
    if rest.config.get("bias", "none") == "none" or linear is None:
        _claim_copy(ref, rest)
        return
    if base_bias is None or base_bias.shape != ref.shape:
        rest.findings.error(
            Code.SC307,
            where=path,
            found=f"`{ref.key}` {ref.shape}",
            expected=f"a bias of shape {base_bias.shape}" if base_bias else "no bias: the base's layer has none",
        )
        return
    if old_spelling and path in rest.adapted:
        rest.findings.note(
            Code.SC318,
            where=path,
            found=f"`{ref.key}`, the spelling of PEFT 0.6 and older: read as the trained bias",
            expected="`.base_layer.bias`",
            next="the current PEFT ignores this key silently",
        )
    if path in biases:
        rest.findings.error(
            Code.SC306,
            where=path,
            found=f"`{biases[path].key}` and `{ref.key}`",
            expected="one trained bias",
        )
    biases[path] = ref


def _is_known_fault(key: str, rest: Rest) -> bool:
    if FOREIGN.search(key):
        rest.findings.error(
            Code.SC311,
            where=key,
            found=f"`{key}`",
            expected="`.lora_A.weight` (rank, in) and `.lora_B.weight` (out, rank)",
        )
        return True
    if "trainable_tokens" in key or "token_adapter" in key:
        rest.findings.error(
            Code.SC211,
            where=key,
            found="trainable tokens: rows that replace the embedding's",
            expected="tensors of linear layers",
            next="train without trainable tokens",
        )
        return True
    if "lora_embedding_" in key:
        rest.findings.error(
            Code.SC317,
            where=key,
            found="low-rank factors of an embedding",
            expected="tensors of linear layers",
        )
        return True
    return False


def base_key(path: str, parameter: str, structure: ModelStructure) -> str | None:
    """Return the base's key for a copy of one of its tensors; a tied head's weight is the token embedding's."""
    if f"{path}.{parameter}" in structure.tensors:
        return f"{path}.{parameter}"
    if is_output_head(path) and parameter == "weight":
        embedding = tied_embedding(structure.embeddings)
        return None if embedding is None else f"{embedding}.weight"
    return None


def _why_incomparable(ref: Ref, rest: Rest, key: str) -> str:
    coded = [tensor.dtype for tensor in (ref, rest.structure.tensors[key]) if tensor.dtype not in FORMATS]
    return f"it is stored as {coded[0]}" if coded else "the base's weights are absent"


def _refuse_other_shape(ref: Ref, original: Ref, rest: Rest) -> None:
    vocabulary = original.key.removesuffix(".weight") in rest.structure.embeddings
    resized = vocabulary and ref.shape[1:] == original.shape[1:]
    rest.findings.error(
        Code.SC312,
        where=ref.key,
        found=f"a dense weight {ref.shape}, the base's `{original.key}` is {original.shape}"
        + (": the vocabulary was resized" if resized else ""),
        expected="tensors of the method alone, or an identical copy",
        next="serve the adapter on the model whose vocabulary was resized, saved with its new size"
        if resized
        else "check that the base is the one the adapter was trained on",
    )


def _claim_copy(ref: Ref, rest: Rest) -> None:
    path, _, parameter = ref.key.rpartition(".")
    key = base_key(rest.to_base(path.removesuffix(".base_layer")), parameter, rest.structure)
    if key is not None and rest.structure.tensors[key].shape != ref.shape:
        _refuse_other_shape(ref, rest.structure.tensors[key], rest)
        return
    if key is None:
        rest.findings.error(
            Code.SC301,
            where=ref.key,
            found=f"`{ref.key}` {ref.shape} belongs to no slot of the method",
            expected="every tensor to be claimed",
            next="remove the tensor if it is a leftover of training",
        )
        return
    same = rest.same_values(ref, rest.structure.tensors[key])
    if same:
        rest.findings.note(Code.SC313, where=ref.key, found=f"identical to the base's `{key}`; dropped")
    elif same is None:
        rest.findings.error(
            Code.SC403,
            where=ref.key,
            found=f"a copy of `{key}`, which can't be compared: {_why_incomparable(ref, rest, key)}",
            expected="a base folder with weights",
            next="pass --base with the weights, or remove the copy",
        )
    elif not (saved := rest.config.get("modules_to_save")):  # otherwise SC211 refuses the field
        rest.findings.error(
            Code.SC312,
            where=ref.key,
            found=f"a dense weight {ref.shape} that differs from the base's `{key}`; modules_to_save = {saved}",
            expected="tensors of the method alone, or an identical copy",
            next="train without it: a trained head, embedding, norm or bias can't be served beside other tenants",
        )

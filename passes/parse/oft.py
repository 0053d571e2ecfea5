"""OFT (`peft_type` OFT; arXiv:2306.07280, PEFT `tuners/oft/layer.py`), in its input-rotating generations.

F = ((x R) W) * s + b0 with a block-diagonal R. PEFT >= 0.16 saves the upper triangle of each skew block as
`oft_R.weight`; 0.14 and 0.15 saved square blocks `oft_r` with a scale `oft_s`. Files of 0.13 and older rotate the
output and are refused. The series' last coefficient changed at 0.18, when `peft_version` began to be written.
"""

from __future__ import annotations

import math
from typing import cast

from scute_compile.diagnostics import Code
from scute_compile.ir.expressions import Expression, Ref, Reshape, RotationBlocks, RotationForm
from scute_compile.ir.method import Method
from scute_compile.ir.program import Rotation, RotationKind, Site
from scute_compile.passes.parse.front_end import Checkpoint, FrontEnd, Reading, Tensors
from scute_compile.passes.parse.keys import Parameter
from scute_compile.passes.parse.settings import Bias, Settings, written_before

SERIES_SINCE = (0, 18)


class OftSettings(Settings):
    """The fields of an OFT configuration that change what it computes."""

    r: int | None = None
    oft_block_size: int | None = None
    use_cayley_neumann: bool = True
    num_cayley_neumann_terms: int = 5
    coft: bool = False
    eps: float = 6e-5
    block_share: bool = False
    bias: Bias = "none"


def dimensions(tensors: Tensors) -> tuple[int, int]:
    """Return `(blocks * size, out)`; the input is 0 (unknown) for a single block, which may be shared."""
    vector, square, scale = tensors.get("oft_R"), tensors.get("oft_r"), tensors.get("oft_s")
    out = scale.shape[0] if scale else 0
    if vector and len(vector.shape) == 2 and vector.shape[0] > 1:
        return vector.shape[0] * block_size(vector.shape[1]), out
    if square and scale and len(square.shape) == 3 and square.shape[0] > 1:
        return square.shape[0] * square.shape[1], out
    return 0, out


def block_size(entries: int) -> int:
    """Return the block size whose strict upper triangle has `entries` entries; 0 when there is none.

    >>> block_size(28), block_size(0), block_size(5)
    (8, 1, 0)
    """
    size = (1 + math.isqrt(1 + 8 * entries)) // 2
    return size if size * (size - 1) // 2 == entries else 0


def build(checkpoint: Checkpoint, settings: Settings) -> Reading:
    """Rewrite OFT modules into sites."""
    oft = cast("OftSettings", settings)
    if any("oft_r" in tensors and "oft_s" not in tensors for tensors in checkpoint.modules.values()):
        first = next(t["oft_r"].key for t in checkpoint.modules.values() if "oft_r" in t)
        checkpoint.findings.error(
            Code.SC210,
            where=first,
            found="`oft_r` without `oft_s`: written by PEFT 0.13 or older, which rotates the output",
            expected="`oft_R.weight` (PEFT 0.16 or newer), or `oft_r` with `oft_s` (0.14 and 0.15)",
            next="train again with a current PEFT; the current PEFT loads this file as the identity",
        )
        return Reading(method=Method.OFT, sites=())
    form = _form(checkpoint, oft)
    sites = [site for path in checkpoint.modules if (site := _site(checkpoint, path, oft, form)) is not None]
    sizes = sorted({site.rotation.block for site in sites if site.rotation})
    return Reading(method=Method.OFT, sites=tuple(sites), settings=_shown(oft, form, sizes))


def _shown(oft: OftSettings, form: RotationForm, sizes: list[int]) -> tuple[tuple[str, str], ...]:
    terms = "" if form is RotationForm.CAYLEY else f", {oft.num_cayley_neumann_terms} terms"
    return (("block", " ".join(map(str, sizes))), ("rotation", f"{form.value}{terms}"))


def _form(checkpoint: Checkpoint, oft: OftSettings) -> RotationForm:
    square = any("oft_r" in tensors for tensors in checkpoint.modules.values())
    if square or not oft.use_cayley_neumann:
        return RotationForm.CAYLEY
    if written_before(checkpoint.config, SERIES_SINCE):
        version = checkpoint.config.get("peft_version") or "no peft_version"
        checkpoint.findings.note(
            Code.SC210,
            where="peft_version",
            found=f"{version}: the older series of PEFT 0.16 and 0.17, whose last coefficient is doubled",
            expected="peft_version, which exists since 0.18",
            next="computed as it was trained; a current PEFT would compute the newer series",
        )
        return RotationForm.SERIES_DOUBLED
    return RotationForm.SERIES


def _site(checkpoint: Checkpoint, path: str, oft: OftSettings, form: RotationForm) -> Site | None:
    tensors, linear = checkpoint.modules[path], checkpoint.linear(path)
    saved = tensors.get("oft_R") or tensors.get("oft_r")
    if saved is None or (size := _size(saved)) == 0:
        found = f"`{saved.key}` of shape {saved.shape}" if saved else "no rotation"
        checkpoint.findings.error(
            Code.SC307,
            where=path,
            found=found,
            expected="(blocks, size (size - 1) / 2)",
            next="save the adapter again",
        )
        return None
    if not _covers(checkpoint, path, oft, saved, size):
        return None
    _check_block_size(checkpoint, path, oft, size)
    limit = oft.eps / math.sqrt(saved.shape[0]) if oft.coft else None
    delta = RotationBlocks(x=saved, size=size, form=form, terms=oft.num_cayley_neumann_terms, norm_limit=limit)
    rotation = Rotation(kind=RotationKind.BLOCKS, delta=delta) if size > 1 else None
    scale: Expression | None = None
    if "oft_s" in tensors:
        scale = Reshape(tensors["oft_s"], (linear.out_features,))
    return Site(linear=linear, rotation=rotation, s=scale)


def _size(saved: Ref) -> int:
    if len(saved.shape) == 3:
        return saved.shape[1] if saved.shape[1] == saved.shape[2] else 0
    return block_size(saved.shape[1]) if len(saved.shape) == 2 else 0


def _covers(checkpoint: Checkpoint, path: str, oft: OftSettings, saved: Ref, size: int) -> bool:
    blocks, width = saved.shape[0], checkpoint.linear(path).in_features
    shared = blocks == 1 and (width == 0 or width != size)
    if (width and (width % size if shared else blocks * size != width)) or (shared and not oft.block_share):
        checkpoint.findings.error(
            Code.SC307,
            where=path,
            found=f"{blocks} block(s) of {size}, block_share = {oft.block_share}, on {width} inputs",
            expected="blocks that cover the input, or one shared block that divides it",
        )
        return False
    return True


def _check_block_size(checkpoint: Checkpoint, path: str, oft: OftSettings, size: int) -> None:
    if oft.oft_block_size is None and not oft.r:
        checkpoint.findings.note(
            Code.SC315,
            where="oft_block_size",
            found=f"no oft_block_size; block size {size} follows from the tensor's shape at `{path}`",
            expected="oft_block_size",
        )
    elif oft.oft_block_size and oft.oft_block_size != size:
        checkpoint.findings.note(
            Code.SC315,
            where="oft_block_size",
            found=f"oft_block_size = {oft.oft_block_size}, block size {size} in the tensor at `{path}`",
            expected="equal sizes; PEFT saves the number before it adjusts it to the layer",
        )


OFT = FrontEnd(
    method=Method.OFT,
    parameters=(
        Parameter(name="oft_R", spellings=("oft_R.weight",), axes=("blocks", "size (size - 1) / 2")),
        Parameter(name="oft_r", spellings=("oft_r",), axes=("blocks", "size", "size")),
        Parameter(name="oft_s", spellings=("oft_s",), axes=("out", "1")),
    ),
    settings=OftSettings,
    inert=frozenset({"module_dropout", "init_weights", "rank_pattern", "alpha_pattern"}),
    may_be_empty=frozenset({"oft_R"}),
    dimensions=dimensions,
    build=build,
)

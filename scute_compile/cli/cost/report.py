"""The report of `scute cost`: bytes and predicted time per decode step of each method and of pools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scute_compile.base.shapes import SHAPES, ModelShape, named_shape, shape_of
from scute_compile.cli.cost.step_cost import (
    gemm_bytes,
    ia3_bytes,
    launches,
    lora_bytes,
    oft_bytes,
    padded_bytes,
    predicted_seconds,
    scale_bytes,
    vera_pair_bytes,
    vera_vector_bytes,
)
from scute_compile.diagnostics import Code, Findings
from scute_compile.driver.arguments import MOST, shown
from scute_compile.driver.bases import open_model
from scute_compile.driver.reports import envelope
from scute_compile.ir.dtypes import DType
from scute_compile.ir.method import Method
from scute_compile.ir.target import Workload

_MIXED = (Method.LORA, Method.DORA, Method.IA3, Method.VERA, Method.OFT)
_FLOAT32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of the adapters of a pool."""

    rank: int = 16
    """The rank of LoRA, DoRA and AdaLoRA."""
    vera_rank: int = 256
    """The rank of VeRA's shared pair."""
    oft_block: int = 32
    """The inputs per rotation block of OFT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """What one pool adds to the base's decode step. Units: bytes, milliseconds."""

    pool: str
    tenants: int
    shared_bytes: int
    """Bytes of shared factors, read once for all tenants."""
    tenant_bytes: int
    """Bytes that tenants own, all tenants together."""
    activation_bytes: int
    """Bytes of activations that the additional kernels read and write."""
    launches: int
    """Kernels beyond the base's."""
    memory_ms: float
    """Time to read the adapters' bytes."""
    predicted_ms: float
    """Time to move all bytes, and to launch the kernels."""

    @property
    def adapter_bytes(self) -> int:
        """The bytes of the adapters, read in one step."""
        return self.shared_bytes + self.tenant_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CostReport:
    """The predictions, with their inputs."""

    shape: ModelShape
    workload: Workload
    dtype: DType
    sizes: Sizes
    base_bytes: int
    base_ms: float
    rows: tuple[CostRow, ...]

    def to_json(self) -> dict[str, object]:
        """Return the report as plain JSON values."""
        return envelope(
            "cost",
            model=self.shape.name,
            layers=self.shape.layers,
            dtype=self.dtype.value,
            tenants=self.workload.tenants,
            tokens=self.workload.tokens,
            bandwidth=self.workload.bandwidth,
            launch=self.workload.launch,
            rank=self.sizes.rank,
            vera_rank=self.sizes.vera_rank,
            oft_block=self.sizes.oft_block,
            base={"bytes": self.base_bytes, "predicted_ms": self.base_ms},
            pools=[
                {
                    "pool": row.pool,
                    "tenants": row.tenants,
                    "bytes": row.adapter_bytes,
                    "shared_bytes": row.shared_bytes,
                    "tenant_bytes": row.tenant_bytes,
                    "activation_bytes": row.activation_bytes,
                    "launches": row.launches,
                    "memory_ms": row.memory_ms,
                    "predicted_ms": row.predicted_ms,
                }
                for row in self.rows
            ],
        )


def cost_of_model(model: str, *, workload: Workload, dtype: DType, sizes: Sizes) -> CostReport:
    """Predict the costs for a known model shape, or for a base.

    Args:
        model: A name of the table of shapes, a folder or a Hub id.
        workload: The decode step.
        dtype: The dtype of base and adapters.
        sizes: The sizes of the adapters.

    Raises:
        ScuteError: SC703 for an unknown name and for every number that is out of range, SC4xx for a base that can't be
            opened.
    """
    known = model in SHAPES or not (Path(model).exists() or "/" in model)
    shape = named_shape(model) if known else shape_of(open_model(model, weights=False).structure)
    return cost_table(shape, workload=workload, dtype=dtype, sizes=sizes)


def cost_table(
    shape: ModelShape,
    *,
    workload: Workload | None = None,
    dtype: DType = DType.FLOAT16,
    sizes: Sizes | None = None,
    mix: Mapping[Method, int] | None = None,
) -> CostReport:
    """Return what pools of adapters on every projection of `shape` add to one decode step.

    The pools: each method alone with all tenants, the mix, and a pool of LoRA adapters that are padded to the larger of
    the two ranks.

    Args:
        shape: The model's projections.
        workload: The decode step.
        dtype: The dtype of base and adapters.
        sizes: The sizes of the adapters.
        mix: Tenants per method; None: LoRA, DoRA, IA3, VeRA and OFT in equal parts.

    Raises:
        ScuteError: SC703 for every number that is out of range.
    """
    workload, sizes = workload or Workload(), sizes or Sizes()
    mix = _equal_parts(workload.tenants) if mix is None else mix
    _require_in_range(workload, sizes, mix)
    rows = [
        _row(
            pool=method.value,
            tenants={method: workload.tenants},
            shape=shape,
            workload=workload,
            dtype=dtype,
            sizes=sizes,
        )
        for method in Method
    ]
    named = ", ".join(f"{count} {method}" for method, count in mix.items())
    rows.append(_row(pool=f"mix: {named}", tenants=mix, shape=shape, workload=workload, dtype=dtype, sizes=sizes))
    rows.append(_padded_row(shape, workload, dtype, max(sizes.rank, sizes.vera_rank)))
    base = gemm_bytes(shape, width=dtype.itemsize)
    return CostReport(
        shape=shape,
        workload=workload,
        dtype=dtype,
        sizes=sizes,
        base_bytes=base,
        base_ms=1e3 * predicted_seconds(base, bandwidth=workload.bandwidth),
        rows=tuple(rows),
    )


def _equal_parts(tenants: int) -> Mapping[Method, int]:
    share, rest = divmod(max(tenants, 0), len(_MIXED))
    parts = {method: share + (position < rest) for position, method in enumerate(_MIXED)}
    return {method: count for method, count in parts.items() if count}


def _require_in_range(workload: Workload, sizes: Sizes, mix: Mapping[Method, int]) -> None:
    findings = Findings()
    positive = (
        ("--tenants", workload.tenants),
        ("--tokens", workload.tokens),
        ("--rank", sizes.rank),
        ("--vera-rank", sizes.vera_rank),
        ("--oft-block", sizes.oft_block),
    )
    for where, value in positive:
        if not 1 <= value <= MOST:
            _out_of_range(findings, where, value, f"1 to {MOST}")
    if not 0 < workload.bandwidth < float("inf"):
        _out_of_range(findings, "--bandwidth", workload.bandwidth / 1e9, "GB/s above 0")
    if not 0 <= workload.launch < float("inf"):
        _out_of_range(findings, "--launch", workload.launch * 1e6, "microseconds, 0 or more")
    for method, count in mix.items():
        if not 0 <= count <= MOST:
            _out_of_range(findings, f"--mix {method}", count, f"0 to {MOST}")
    findings.raise_if_errors()


def _out_of_range(findings: Findings, where: str, value: float, expected: str) -> None:
    findings.error(Code.SC703, where=where, found=shown(value), expected=expected, next="give a number in that range")


def _row(
    *, pool: str, shape: ModelShape, tenants: Mapping[Method, int], workload: Workload, dtype: DType, sizes: Sizes
) -> CostRow:
    present = {method: count for method, count in tenants.items() if count}
    width = dtype.itemsize
    shared = vera_pair_bytes(shape, rank=sizes.vera_rank, width=width) if Method.VERA in present else 0
    owned = sum(_tenant_bytes(method, shape, count, width, sizes) for method, count in present.items())
    total = sum(present.values())
    # Each method has tokens in proportion to its tenants, rounded up.
    moved = sum(
        _activation_bytes(method, shape, -(-workload.tokens * count // total), workload.activation_bytes, sizes)
        for method, count in present.items()
    )
    return _priced(
        pool=pool,
        tenants=total,
        shared=shared,
        owned=owned,
        activations=moved,
        count=launches(shape, present),
        workload=workload,
    )


def _padded_row(shape: ModelShape, workload: Workload, dtype: DType, rank: int) -> CostRow:
    moved = padded_bytes(shape, ranks=[rank] * workload.tenants, width=dtype.itemsize)
    activations = _activation_bytes(Method.LORA, shape, workload.tokens, workload.activation_bytes, Sizes(rank=rank))
    count = launches(shape, [Method.LORA])
    return _priced(
        pool=f"lora padded to rank {rank}",
        tenants=workload.tenants,
        shared=0,
        owned=moved,
        activations=activations,
        count=count,
        workload=workload,
    )


def _priced(
    *, pool: str, tenants: int, shared: int, owned: int, activations: int, count: int, workload: Workload
) -> CostRow:
    memory = predicted_seconds(shared + owned, bandwidth=workload.bandwidth)
    total = predicted_seconds(
        shared + owned + activations, bandwidth=workload.bandwidth, launches=count, launch=workload.launch
    )
    return CostRow(
        pool=pool,
        tenants=tenants,
        shared_bytes=shared,
        tenant_bytes=owned,
        activation_bytes=activations,
        launches=count,
        memory_ms=1e3 * memory,
        predicted_ms=1e3 * total,
    )


def _tenant_bytes(method: Method, shape: ModelShape, tenants: int, width: int, sizes: Sizes) -> int:
    match method:
        case Method.LORA | Method.ADALORA:
            return lora_bytes(shape, rank=sizes.rank, tenants=tenants, width=width)
        case Method.DORA:
            scales = scale_bytes(shape, tenants=tenants, width=width)
            return lora_bytes(shape, rank=sizes.rank, tenants=tenants, width=width) + scales
        case Method.IA3:
            return ia3_bytes(shape, tenants=tenants, width=width)
        case Method.VERA:
            return vera_vector_bytes(shape, rank=sizes.vera_rank, tenants=tenants, width=width)
        case Method.OFT:
            return oft_bytes(shape, block=sizes.oft_block, tenants=tenants, width=width)


def _activation_bytes(method: Method, shape: ModelShape, tokens: int, width: int, sizes: Sizes) -> int:
    """Return activation bytes: x read once per fused site, float32 products written and read, y read and written."""
    inputs = shape.layers * sum({p.gemm: p.inputs for p in shape.projections}.values())
    outputs = 2 * shape.outputs * width
    sites = shape.layers * len(shape.projections)
    match method:
        case Method.LORA | Method.ADALORA | Method.DORA:
            per_token = inputs * width + 2 * sites * sizes.rank * _FLOAT32 + outputs
        case Method.VERA:
            per_token = inputs * width + 2 * sites * sizes.vera_rank * _FLOAT32 + outputs
        case Method.IA3:
            per_token = 2 * shape.layers * sum(length for _, length in shape.ia3_vectors) * width
        case Method.OFT:
            # x read; delta rows written and read for every site, and their products in float32
            per_token = 3 * shape.inputs * width + 2 * shape.outputs * _FLOAT32 + outputs
    return tokens * per_token

"""What `scute cost` shows: bytes per step and predicted time of each method, of a mixed pool and of a padded one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scute_compile.base.shapes import ModelShape
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
from scute_compile.ir.dtypes import DType
from scute_compile.ir.method import Method
from scute_compile.ir.target import Workload

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA_VERSION = "1.0"

_MIXED = (Method.LORA, Method.DORA, Method.IA3, Method.VERA, Method.OFT)
_FLOAT32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large the adapters of a pool are."""

    rank: int = 16
    """Of LoRA, DoRA and AdaLoRA."""
    vera_rank: int = 256
    oft_block: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """One pool and what it adds to the base's step."""

    pool: str
    tenants: int
    shared_bytes: int
    """Read once, for all tenants."""
    tenant_bytes: int
    """Read for each tenant, all together."""
    activation_bytes: int
    """Read and written for the step's tokens by the launches below."""
    launches: int
    memory_ms: float
    """The adapters' bytes alone, at the bandwidth."""
    predicted_ms: float
    """All bytes at the bandwidth, and the launches."""

    @property
    def adapter_bytes(self) -> int:
        """What the adapters themselves move in one step."""
        return self.shared_bytes + self.tenant_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CostReport:
    """The table, with everything that it was computed from."""

    shape: ModelShape
    workload: Workload
    dtype: DType
    sizes: Sizes
    base_bytes: int
    base_ms: float
    rows: tuple[CostRow, ...]

    def to_json(self) -> dict[str, object]:
        """Return the report as plain JSON values."""
        return {
            "schema_version": SCHEMA_VERSION,
            "command": "cost",
            "model": self.shape.name,
            "layers": self.shape.layers,
            "dtype": self.dtype.value,
            "tenants": self.workload.tenants,
            "tokens": self.workload.tokens,
            "bandwidth": self.workload.bandwidth,
            "launch": self.workload.launch,
            "rank": self.sizes.rank,
            "vera_rank": self.sizes.vera_rank,
            "oft_block": self.sizes.oft_block,
            "base": {"bytes": self.base_bytes, "predicted_ms": self.base_ms},
            "pools": [
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
        }

    def render(self, console: Console) -> None:
        """Print the table."""
        from rich.table import Table

        work = self.workload
        table = Table(
            title=f"{self.shape.name}, {self.dtype}: one step of {work.tenants} tenants, {work.tokens} tokens",
            caption=f"{work.bandwidth / 1e9:,.0f} GB/s, {work.launch * 1e6:g} us a launch; times add to the base's",
        )
        table.add_column("pool")
        for heading in ("adapters", "activations", "launches", "memory ms", "predicted ms"):
            table.add_column(heading, justify="right")
        table.add_row(
            "base GEMMs alone", readable(self.base_bytes), "", "", f"{self.base_ms:.3f}", f"{self.base_ms:.3f}"
        )
        table.add_section()
        for row in self.rows:
            table.add_row(
                row.pool,
                readable(row.adapter_bytes),
                readable(row.activation_bytes),
                str(row.launches),
                f"{row.memory_ms:.3f}",
                f"{row.predicted_ms:.3f}",
            )
        console.print(table)


def readable(count: int) -> str:
    """Return a byte count with four digits and a decimal unit.

    >>> readable(1342177280)
    '1.342 GB'
    >>> readable(812)
    '812 B'
    """
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:#.4g} {unit}".replace(". ", " ")
    return f"{count} B"


def cost_table(
    shape: ModelShape,
    *,
    workload: Workload | None = None,
    dtype: DType = DType.FLOAT16,
    sizes: Sizes | None = None,
    mix: Mapping[Method, int] | None = None,
) -> CostReport:
    """Return what pools of adapters on every projection of `shape` add to one step.

    Rows: each method alone with all tenants, the `mix` (None: the five methods in equal parts), and a pool of LoRA in
    which everyone is padded to the largest rank of the pool.

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
    parts = {method: share + (place < rest) for place, method in enumerate(_MIXED)}
    return {method: count for method, count in parts.items() if count}


def _require_in_range(workload: Workload, sizes: Sizes, mix: Mapping[Method, int]) -> None:
    findings = Findings()
    least_one = (
        ("--tenants", workload.tenants),
        ("--tokens", workload.tokens),
        ("--rank", sizes.rank),
        ("--vera-rank", sizes.vera_rank),
        ("--oft-block", sizes.oft_block),
    )
    for where, value in least_one:
        if value < 1:
            _out_of_range(findings, where, value, "at least 1")
    if not 0 < workload.bandwidth < float("inf"):
        _out_of_range(findings, "--bandwidth", workload.bandwidth / 1e9, "GB/s above 0")
    if not 0 <= workload.launch < float("inf"):
        _out_of_range(findings, "--launch", workload.launch * 1e6, "microseconds, 0 or more")
    for method, count in mix.items():
        if count < 0:
            _out_of_range(findings, f"--mix {method}", count, "0 or more")
    findings.raise_if_errors()


def _out_of_range(findings: Findings, where: str, value: float, expected: str) -> None:
    findings.error(Code.SC703, where=where, found=f"{value:g}", expected=expected, next="give a number in that range")


def _row(
    *, pool: str, shape: ModelShape, tenants: Mapping[Method, int], workload: Workload, dtype: DType, sizes: Sizes
) -> CostRow:
    held = {method: count for method, count in tenants.items() if count}
    width = dtype.itemsize
    shared = vera_pair_bytes(shape, rank=sizes.vera_rank, width=width) if Method.VERA in held else 0
    owned = sum(_tenant_bytes(method, shape, count, width, sizes) for method, count in held.items())
    total = sum(held.values())
    # Tokens are dealt to the methods as their tenants are; a remainder of a token is rounded up.
    moved = sum(
        _activation_bytes(method, shape, -(-workload.tokens * count // total), workload.activation_bytes, sizes)
        for method, count in held.items()
    )
    return _priced(
        pool=pool,
        tenants=total,
        shared=shared,
        owned=owned,
        activations=moved,
        count=launches(shape, held),
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
    adapters = predicted_seconds(shared + owned, bandwidth=workload.bandwidth)
    everything = predicted_seconds(
        shared + owned + activations, bandwidth=workload.bandwidth, launches=count, launch=workload.launch
    )
    return CostRow(
        pool=pool,
        tenants=tenants,
        shared_bytes=shared,
        tenant_bytes=owned,
        activation_bytes=activations,
        launches=count,
        memory_ms=1e3 * adapters,
        predicted_ms=1e3 * everything,
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
    """Count x read by a fused site's shrink, its products in float32 out and in, and y read and written again."""
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
            # x read, delta rows out and in for every site, their products in float32 out and in
            per_token = 3 * shape.inputs * width + 2 * shape.outputs * _FLOAT32 + outputs
    return tokens * per_token

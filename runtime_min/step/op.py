"""The adapted layer as one PyTorch operator, `scute::adapted_linear`, with its fake, CPU and CUDA implementations.

The operator takes tensors and plain numbers only, so that `torch.compile` and CUDA graphs see one opaque call. The
adapter of each row is data in a tensor, so the mix may change between calls and replays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType

import torch

from scute_compile.diagnostics import Code, fail
from scute_compile.ir.program import RotationKind
from scute_compile.runtime_min.pool.directory import Field
from scute_compile.runtime_min.pool.read_back import read_field
from scute_compile.runtime_min.ranks.exchange import TermExchange
from scute_compile.runtime_min.reference import SiteTensors, TermTensors, apply_site, expand, rotate, shrink, wide
from scute_compile.runtime_min.step.arguments import Features, Gemm, PoolTensors, Product, capacity_of
from scute_compile.runtime_min.step.plan import StepRegions


@torch.library.custom_op("scute::adapted_linear", mutates_args=(), device_types="cpu")
def adapted_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pages: torch.Tensor,
    page_map: torch.Tensor,
    directory: torch.Tensor,
    shared: torch.Tensor,
    step: torch.Tensor,
    first_site: int,
    widths: Sequence[int],
    capacity: Sequence[int],
    features: Sequence[int],
) -> torch.Tensor:
    """Return the output of one fused GEMM, each row with its adapter's tensors.

    **Semantics**: rows without an adapter are `x @ weight.T + bias`; the others are `apply_site` of each slice.

    Args:
        x: Inputs `(T, K)`.
        weight: `(N, K)`, of any strides.
        bias: `(N,)` or None.
        pages: The resident pool's pages; this and the next three as `DeviceMemory` holds them.
        page_map: int32.
        directory: int32 `(adapters, sites, 16)`.
        shared: Shared factors.
        step: The step's metadata, int32: `StepBuffers.device_copy`.
        first_site: Index of the first slice's site in the directory.
        widths: Output columns of each slice; they add up to N.
        capacity: `arguments.capacity_numbers` of the step's buffers.
        features: `Features.numbers` of the step, for launches on a GPU. The reference reads the tensors instead.

    Returns:
        `(T, N)` in the dtype of `x`.
    """
    del features
    arguments = _arguments(pages, page_map, directory, shared, step, first_site, widths, capacity)
    return adapted_output(x, _product(weight, bias), *arguments)


def _arguments(
    pages: torch.Tensor,
    page_map: torch.Tensor,
    directory: torch.Tensor,
    shared: torch.Tensor,
    step: torch.Tensor,
    first_site: int,
    widths: Sequence[int],
    capacity: Sequence[int],
) -> tuple[PoolTensors, StepRegions, Gemm]:
    """Return the structures that the operator's tensors and numbers stand for."""
    tables = PoolTensors(pages=pages, page_map=page_map, directory=directory, shared=shared)
    return tables, StepRegions(capacity_of(capacity), step), Gemm(first_site=first_site, widths=tuple(widths))


def _product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    def multiply(rows: torch.Tensor, *, biased: bool) -> torch.Tensor:
        dtype = rows.dtype  # delta rows come in the wide dtype
        added = bias.to(dtype) if biased and bias is not None else None
        return torch.nn.functional.linear(rows, weight.to(dtype), added)

    return multiply


def adapted_output(
    x: torch.Tensor,
    multiply: Product,
    tables: PoolTensors,
    step: StepRegions,
    gemm: Gemm,
    exchange: TermExchange | None = None,
) -> torch.Tensor:
    """Return the adapted output `(T, N)` of one fused GEMM, by the reference; the caller supplies the base's product.

    Args:
        x: Inputs `(T, K)`.
        multiply: The base's product; called with the bias for `x`, and without it for delta rows.
        tables: Resident adapters.
        step: This step's metadata.
        gemm: The layer's sites.
        exchange: How ranks complete the intermediates of fully sharded terms; None in the default layout.
    """
    y = multiply(x, biased=True)
    row_adapter = step.region("row_adapter")[: len(x)]
    found: list[tuple[torch.Tensor, slice, SiteTensors]] = []
    # in the order of rows, which is the same on all ranks; adapter indices may differ
    for adapter in dict.fromkeys(row_adapter[row_adapter >= 0].tolist()):
        rows = (row_adapter == adapter).nonzero().flatten()
        start = 0
        for site, width in enumerate(gemm.widths, gemm.first_site):
            tensors = read_site(tables, adapter, site, (x.shape[1], width), shares=exchange.shares if exchange else 1)
            if tensors is not None:
                found.append((rows, slice(start, start + width), tensors))
            start += width
    hs = [shrink(x[rows], term.a, term.d) for rows, _, tensors in found for term in tensors.terms]
    whole = iter(exchange.complete(hs) if exchange else hs)
    for rows, part, tensors in found:
        delta_y = _delta(x[rows], multiply, tensors)
        delta_y = None if delta_y is None else delta_y[:, part]
        vectors = replace(tensors, terms=())
        out = apply_site(y[rows, part], x[rows], delta_y, vectors, out_dtype=wide(y, x))
        for term in tensors.terms:
            out = out + expand(next(whole), term.b, term.e)
        y[rows, part] = out.to(y.dtype)
    return y


@adapted_linear.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pages: torch.Tensor,
    page_map: torch.Tensor,
    directory: torch.Tensor,
    shared: torch.Tensor,
    step: torch.Tensor,
    first_site: int,
    widths: Sequence[int],
    capacity: Sequence[int],
    features: Sequence[int],
) -> torch.Tensor:
    del bias, pages, page_map, directory, shared, step, first_site, widths, capacity, features
    return x.new_empty((x.shape[0], weight.shape[0]))


@adapted_linear.register_kernel("cuda")
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pages: torch.Tensor,
    page_map: torch.Tensor,
    directory: torch.Tensor,
    shared: torch.Tensor,
    step: torch.Tensor,
    first_site: int,
    widths: Sequence[int],
    capacity: Sequence[int],
    features: Sequence[int],
) -> torch.Tensor:
    arguments = _arguments(pages, page_map, directory, shared, step, first_site, widths, capacity)
    out: torch.Tensor = _kernels().adapted_linear(
        x.contiguous(), weight, bias, *arguments, Features.of_numbers(features)
    )
    return out


def _kernels() -> ModuleType:
    try:
        from scute_compile.runtime_min.step import launch
    except ModuleNotFoundError as error:
        fail(
            Code.SC701,
            where="the runtime on a GPU",
            found=f"no module named {error.name!r}",
            expected="triton",
            next="`pip install 'scute-compile[runtime]'`, or serve on the CPU",
        )
    return launch


@torch.compiler.disable  # type: ignore[untyped-decorator] # PyTorch does not annotate it
def exchanged_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pages: torch.Tensor,
    page_map: torch.Tensor,
    directory: torch.Tensor,
    shared: torch.Tensor,
    step: torch.Tensor,
    first_site: int,
    widths: Sequence[int],
    capacity: Sequence[int],
    features: Sequence[int],
    exchange: TermExchange,
) -> torch.Tensor:
    """Return the output of one layer whose terms are fully sharded; arguments as for `adapted_linear`.

    Not an operator, since it contains collectives: `torch.compile` breaks the graph here. All ranks call it for the
    same batch.
    """
    arguments = _arguments(pages, page_map, directory, shared, step, first_site, widths, capacity)
    if x.device.type == "cpu":
        return adapted_output(x, _product(weight, bias), *arguments, exchange)
    out: torch.Tensor = _kernels().adapted_linear(
        x.contiguous(), weight, bias, *arguments, Features.of_numbers(features), exchange
    )
    return out


def read_site(
    tables: PoolTensors, adapter: int, site: int, size: tuple[int, int], *, shares: int = 1
) -> SiteTensors | None:
    """Return an adapter's tensors at one site by way of the directory; None where it does not change the site.

    Args:
        tables: The pool's tensors.
        adapter: The adapter index.
        site: The layer's index.
        size: The layer's inputs and outputs.
        shares: Number of ranks among which the rows of A and entries of d are divided.
    """
    fields: list[int] = tables.directory[adapter, site].tolist()
    inputs, outputs = size

    def read(field: Field, *shape: int) -> torch.Tensor | None:
        return read_field(tables, adapter, site, field, shape) if fields[field] >= 0 else None

    rank, block = fields[Field.RANK], fields[Field.R_BLOCK]
    terms: tuple[TermTensors, ...] = ()
    if rank > 0:
        a, b = (
            read_field(tables, adapter, site, field, shape)
            for field, shape in ((Field.A_OFFSET, (rank // shares, inputs)), (Field.B_OFFSET, (rank, outputs)))
        )
        terms = (TermTensors(a=a, b=b, d=read(Field.D_OFFSET, rank // shares), e=read(Field.E_OFFSET, outputs)),)
    delta, rotation = None, None
    if fields[Field.R_OFFSET] >= 0:
        blocks = 1 if fields[Field.R_SHARED] else inputs // block
        rotation = RotationKind.DIAGONAL if block == 1 else RotationKind.BLOCKS
        delta = read(Field.R_OFFSET, *((inputs,) if block == 1 else (blocks, block, block)))
    tensors = SiteTensors(
        rotation=rotation,
        delta=delta,
        ds=read(Field.DS_OFFSET, outputs),
        b=read(Field.SHIFT_OFFSET, outputs),
        terms=terms,
    )
    return tensors if terms or any(value is not None for value in (delta, tensors.ds, tensors.b)) else None


def _delta(x: torch.Tensor, multiply: Product, tensors: SiteTensors) -> torch.Tensor | None:
    if tensors.rotation is None or tensors.delta is None:
        return None
    return multiply(rotate(x, tensors.delta, tensors.rotation), biased=False)

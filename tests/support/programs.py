"""Programs written by hand and taken through the passes after parsing: a few layers of one method each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from scute_compile.base.structure import ModelStructure
from scute_compile.ir.dtypes import DType
from scute_compile.ir.expressions import (
    ColumnNorm,
    Divide,
    Expression,
    Fill,
    Multiply,
    Ref,
    RotationBlocks,
    RotationForm,
    Source,
    Subtract,
    Take,
)
from scute_compile.ir.linear import Linear, Part, Product, Split
from scute_compile.ir.method import Method
from scute_compile.ir.program import Factor, Owner, Program, Rotation, RotationKind, Site, Stage, Term
from scute_compile.ir.spec import verify
from scute_compile.ir.target import Target
from scute_compile.passes.context import Context
from scute_compile.passes.parse.checkpoint import parse
from scute_compile.passes.scan import TensorFacts
from scute_compile.pipeline import PIPELINE

ORDINARY = TensorFacts(finite=True, zero=False, largest=1.0, smallest=0.1, not_one=1, ones=False, size=1)


def value(key: str, *shape: int) -> Expression:
    return Ref(Source.ADAPTER, key, shape, "F32")


def linear(name: str, inputs: int, outputs: int, *, row: bool = False, gemm: str = "", up: str = "") -> Linear:
    """Return a layer, with a bias when its name ends with `k_proj`."""
    bias = Ref(Source.BASE, f"{name}.bias", (outputs,), "BF16") if name.endswith("k_proj") else None
    return Linear(
        name=name,
        in_features=inputs,
        out_features=outputs,
        weight=Ref(Source.BASE, f"{name}.weight", (outputs, inputs), "BF16"),
        bias=bias,
        split=Split.ROW if row else Split.COLUMN,
        parts=(Part(name="all", size=inputs if row else outputs),),
        gemm=gemm,
        input_product=Product(site=up) if up else None,
    )


def context(linears: Iterable[Linear]) -> Context:
    """Return a context over a base of these layers, in which every tensor has ordinary values."""
    structure = ModelStructure(
        model_type="made", linears={linear.name: linear for linear in linears}, tensors={}, dtype=DType.BFLOAT16
    )
    return Context(facts=defaultdict(lambda: ORDINARY), structure=structure)


def planned(method: Method, sites: Sequence[Site], *, also: Sequence[Linear] = (), tp: int = 1) -> Program:
    """Run every pass after `parse`; `also` are layers of the base that the adapter doesn't touch."""
    settings = (("made", "by hand"),)
    program = Program(method=method, stage=Stage.PARSED, sites=tuple(sites), target=Target(tp=tp), settings=settings)
    given = context([*(site.linear for site in sites), *also])
    for step in PIPELINE:
        program = program if step is parse else verify(step(program, given))
    given.findings.raise_if_errors()
    return program


def dora(layers: Sequence[int] = range(4), *, tp: int = 1) -> Program:
    """Return a program of DoRA on q_proj and o_proj, with c = 2."""
    sites = []
    for layer in layers:
        for short, row in (("q_proj", False), ("o_proj", True)):
            name = f"model.layers.{layer}.self_attn.{short}"
            base = linear(name, 64, 64, row=row)
            a, b = value(f"{name}.A", 8, 64), value(f"{name}.B", 8, 64)
            norm = ColumnNorm(weight=base.weight, transposed=False, a=a, b=b, c=2.0)
            s = Divide(value(f"{name}.m", 64), norm)
            sites.append(Site(linear=base, s=s, terms=(Term(a=Factor(value=a), b=Factor(value=b), e=s, c=2.0),)))
    return planned(Method.DORA, sites, tp=tp)


def vera(layers: Sequence[int] = (0, 1, 3), *, tp: int = 1) -> Program:
    """Return a program of VeRA on q_proj and v_proj, over one shared pair of rank 16."""
    whole_a, whole_b = value("vera_A", 16, 96), value("vera_B", 16, 96)
    sites = []
    for layer in layers:
        for short, outputs in (("q_proj", 64), ("v_proj", 32)):
            name = f"model.layers.{layer}.self_attn.{short}"
            a = Factor(value=Take(whole_a, 1, ((0, 64),)), owner=Owner.SHARED, shared=whole_a)
            b = Factor(value=Take(whole_b, 1, ((0, outputs),)), owner=Owner.SHARED, shared=whole_b)
            term = Term(a=a, b=b, d=value(f"{name}.d", 16), e=value(f"{name}.e", outputs))
            sites.append(Site(linear=linear(name, 64, outputs), terms=(term,)))
    return planned(Method.VERA, sites, tp=tp)


def ia3(layers: Sequence[int] = range(3), *, tp: int = 1) -> Program:
    """Return a program of IA3 on k_proj, which has a bias, and on the input of down_proj, which moves to up_proj."""
    sites, ups = [], []
    for layer in layers:
        key = linear(f"model.layers.{layer}.self_attn.k_proj", 64, 32)
        up = linear(f"model.layers.{layer}.mlp.up_proj", 64, 96)
        down = linear(f"model.layers.{layer}.mlp.down_proj", 96, 64, row=True, up=up.name)
        ups.append(up)
        l_k, l_ff = value(f"{key.name}.l", 32), value(f"{down.name}.l", 96)
        assert key.bias is not None
        sites.append(Site(linear=key, s=l_k, beta=Multiply(l_k, key.bias)))
        delta = Subtract(l_ff, Fill(1.0, (96,)))
        sites.append(Site(linear=down, rotation=Rotation(kind=RotationKind.DIAGONAL, delta=delta)))
    return planned(Method.IA3, sites, also=ups, tp=tp)


def oft(layers: Sequence[int] = range(2), *, tp: int = 1) -> Program:
    """Return a program of OFT on the fused q_proj and v_proj: blocks of 8, and one block that repeats."""
    sites = []
    for layer in layers:
        for short, blocks in (("q_proj", 8), ("v_proj", 1)):
            name = f"model.layers.{layer}.self_attn.{short}"
            base = linear(name, 64, 64, gemm=f"model.layers.{layer}.self_attn.qkv")
            delta = RotationBlocks(x=value(f"{name}.R", blocks, 28), size=8, form=RotationForm.CAYLEY)
            sites.append(Site(linear=base, rotation=Rotation(kind=RotationKind.BLOCKS, delta=delta)))
    return planned(Method.OFT, sites, tp=tp)


METHODS: Mapping[str, Callable[[], Program]] = {
    Method.DORA: dora,
    Method.VERA: vera,
    Method.IA3: ia3,
    Method.OFT: oft,
}

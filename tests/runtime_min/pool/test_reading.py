"""Reading artifacts into packed adapters: tensors read back bit for bit, and bad artifacts are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from scute_compile.diagnostics import ScuteError
from scute_compile.formats.artifact import Artifact, open_artifact
from scute_compile.formats.artifact_tensors import load_factor, load_rank
from scute_compile.formats.layout import rank_layout
from scute_compile.ir.dtypes import torch_dtype
from scute_compile.ir.expressions import width
from scute_compile.runtime_min.pool.directory import DirectoryEntry, Field
from scute_compile.runtime_min.pool.packed_adapter import PackedAdapter, PackedFactor
from scute_compile.runtime_min.pool.reading import read_adapter
from scute_compile.runtime_min.pool.resident_pool import ResidentPool
from tests.runtime_min.pool.small_adapters import code_of, load, read_back
from tests.support.artifact_files import rank_file
from tests.support.artifacts import Written, write_artifact
from tests.support.commands import compiled

Pair = Callable[[str, str], tuple[Path, Path]]
FIELDS = {
    "A": Field.A_OFFSET,
    "B": Field.B_OFFSET,
    "d": Field.D_OFFSET,
    "e": Field.E_OFFSET,
    "ds": Field.DS_OFFSET,
    "b": Field.SHIFT_OFFSET,
    "dR": Field.R_OFFSET,
}


def sites_of(artifact: Artifact, rank: int = 0) -> tuple[DirectoryEntry, ...]:
    """Return directory entries for the sites of an artifact, as a rank holds them."""
    return tuple(
        DirectoryEntry(
            name=site.name, in_features=width(site.inputs[rank]), out_features=width(site.outputs[rank]), gemm=site.gemm
        )
        for site in artifact.manifest.sites
    )


def pool_for(artifact: Artifact, *, rank: int = 0) -> ResidentPool:
    """Return an empty pool for the sites of an artifact, in its dtype."""
    return ResidentPool(
        sites_of(artifact, rank),
        num_pages=2048,
        max_adapters=2,
        dtype=torch_dtype(artifact.manifest.dtype.value),
        device=torch.device("cpu"),
    )


def read(
    artifact: Artifact,
    pool: ResidentPool,
    *,
    tp: int = 1,
    rank: int = 0,
    factors: dict[str, PackedFactor] | None = None,
    convert: bool = False,
) -> PackedAdapter:
    """Read a rank's part of an artifact for a pool."""
    return read_adapter(artifact, pool.sites, pool.dtype, tp=tp, rank=rank, factors=factors, convert=convert)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "recipe", ["lora-patterns", "lora-base-bias", "dora", "ia3-inputs", "vera", "oft", "oft-shared", "adalora"]
)
def test_every_slot_of_a_compiled_adapter_reads_back(recipe: str, dtype: str, pair: Pair, tmp_path: Path) -> None:
    artifact = open_artifact(compiled(*pair(recipe, "qwen2"), tmp_path / "store", "--dtype", dtype))
    pool = pool_for(artifact)
    index = load(pool, "tenant", read(artifact, pool))
    tensors = load_rank(artifact, 0)
    compared = 0
    for site in artifact.manifest.sites:
        for name in rank_layout(site, 0, artifact.manifest.dtype):
            tensor = tensors[name]
            found = read_back(pool, index, site.name, FIELDS[name.rsplit(".", 1)[1]], tuple(tensor.shape))
            assert torch.equal(found, tensor), name
            compared += 1
        for term in site.terms:
            for letter, window in (("A", term.a), ("B", term.b)):
                if window is not None:
                    whole = load_factor(artifact, window.factor)[:, : window.features]
                    assert torch.equal(read_back(pool, index, site.name, FIELDS[letter], tuple(whole.shape)), whole)
    assert compared == len(tensors)
    assert pool.stats().pages.payload == sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_reads_its_part(rank: int, pair: Pair, tmp_path: Path) -> None:
    artifact = open_artifact(compiled(*pair("dora", "qwen2"), tmp_path / "store", "--tp", 2))
    pool = pool_for(artifact, rank=rank)
    index, tensors = load(pool, "tenant", read(artifact, pool, tp=2, rank=rank)), load_rank(artifact, rank)
    for site in artifact.manifest.sites:
        shape = (site.terms[0].rank, width(site.inputs[rank]))
        a = read_back(pool, index, site.name, Field.A_OFFSET, shape)
        assert torch.equal(a, tensors[f"{site.name}.terms.0.A"])
        entry = [known.name for known in pool.sites].index(site.name)
        shifted = int(pool.memory.directory[index, entry, Field.SHIFT_OFFSET]) >= 0
        assert shifted == (site.shift and site.shift_rank in (-1, rank))


def test_a_shared_factor_has_the_columns_of_the_rank(pair: Pair, tmp_path: Path) -> None:
    """One interval that starts at a granule is an offset into the whole factor; other columns are packed apart."""
    generator = torch.Generator().manual_seed(2)
    slots = {
        "A0": torch.randn(4, 48, generator=generator),
        "B0": torch.randn(4, 48, generator=generator),
        "d0": torch.randn(4, generator=generator),
        "e0": torch.randn(20, generator=generator),
    }
    outputs = [[[0, 8]], [[8, 18], [19, 20], [18, 19]]]
    written = Written(
        name="q", in_features=48, out_features=20, slots=slots, shared=frozenset({"A0", "B0"}), outputs=outputs
    )
    artifact = open_artifact(write_artifact(tmp_path / "store", [written], tp=2))
    for rank in (0, 1):
        packed = read(artifact, pool_for(artifact, rank=rank), tp=2, rank=rank)
        (window,) = packed.pairs
        columns = torch.cat([torch.arange(start, stop) for start, stop in outputs[rank]])
        stored = window.b.factor.buffer.view(torch.float32)[window.b.offset * 4 :]
        rows = torch.stack([stored[row * window.b.stride * 4 :][: len(columns)] for row in range(4)])
        assert torch.equal(rows, slots["B0"][:, columns])
        assert (":" in window.b.factor.key) == (rank == 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_sites_of_a_rank_use_other_columns_of_the_same_shared_pair(rank: int, pair: Pair, tmp_path: Path) -> None:
    artifact = open_artifact(compiled(*pair("vera", "llama"), tmp_path / "store", "--tp", 2))
    pool = pool_for(artifact, rank=rank)
    first, second = (load(pool, name, read(artifact, pool, tp=2, rank=rank)) for name in ("first", "second"))
    assert (len({window.key for window in pool.packed_adapters["first"].pairs}) > 1) == (rank == 1)
    assert pool.facts[first].pair == pool.facts[second].pair >= 0
    assert sum(row[0] > 0 for row in pool.pairs) == 1
    for site in artifact.manifest.sites:
        for letter, window, ranges in (("A", site.terms[0].a, site.inputs), ("B", site.terms[0].b, site.outputs)):
            assert window is not None
            columns = torch.cat([torch.arange(*span) for span in ranges[rank]])
            whole = load_factor(artifact, window.factor)[:, columns]
            for index in (first, second):
                assert torch.equal(read_back(pool, index, site.name, FIELDS[letter], tuple(whole.shape)), whole)


def test_a_shared_pair_is_read_once(pair: Pair, tmp_path: Path) -> None:
    artifact = open_artifact(compiled(*pair("vera", "qwen2"), tmp_path / "store"))
    pool, factors = pool_for(artifact), dict[str, PackedFactor]()
    first, second = (read(artifact, pool, factors=factors) for _ in range(2))
    assert [a is b for a, b in zip(first.factors, second.factors, strict=True)] == [True, True]


@pytest.mark.parametrize("act", ["load", "replace"])
@pytest.mark.parametrize("fault", ["damaged", "dtype", "tp", "base"])
def test_a_bad_artifact_leaves_the_pool_as_it_was(act: str, fault: str, pair: Pair, tmp_path: Path) -> None:
    adapter, base = pair("dora", "qwen2")
    good = open_artifact(compiled(adapter, base, tmp_path / "good"))
    options = {"dtype": ("--dtype", "bfloat16"), "tp": ("--tp", 2)}.get(fault, ())
    bad = compiled(adapter, base, tmp_path / "bad", *options)
    pool = pool_for(good)
    if fault == "damaged":
        file = rank_file(bad)
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(bytes(data))
    if fault == "base":
        wide = Written(name=pool.sites[0].name, in_features=32, out_features=64, slots={"ds": torch.ones(64)})
        bad = write_artifact(tmp_path / "other", [wide])
    opened = open_artifact(bad, verify_hashes=False)
    index = load(pool, "tenant", read(good, pool))
    before = (pool.stats(), pool.memory.pages.clone(), pool.memory.directory.clone(), pool.memory.page_map.clone())
    with pytest.raises(ScuteError) as refused:
        load(pool, "new", read(opened, pool)) if act == "load" else pool.replace("tenant", read(opened, pool))
    assert code_of(refused) == {"damaged": "SC603", "dtype": "SC801", "tp": "SC801", "base": "SC402"}[fault]
    assert pool.stats() == before[0]
    assert pool.names == ("tenant",)
    assert pool.ensure(["tenant"])["tenant"] == index
    for old, new in zip(before[1:], (pool.memory.pages, pool.memory.directory, pool.memory.page_map), strict=True):
        assert torch.equal(old, new)


def test_an_adapter_packed_for_another_pool_is_refused(pair: Pair, tmp_path: Path) -> None:
    artifact = open_artifact(compiled(*pair("lora", "qwen2"), tmp_path / "store", "--dtype", "float32"))
    packed, pool = read(artifact, pool_for(artifact)), pool_for(artifact)
    for other in (
        ResidentPool(pool.sites[1:], num_pages=8, max_adapters=1, dtype=pool.dtype, device=pool.device),
        ResidentPool(pool.sites, num_pages=8, max_adapters=1, dtype=torch.bfloat16, device=pool.device),
    ):
        with pytest.raises(ScuteError, match="an adapter packed in") as refused:
            other.add("tenant", packed)
        assert code_of(refused) == "SC801"
        assert other.names == ()


def test_a_file_damaged_after_it_was_opened_is_refused(pair: Pair, tmp_path: Path) -> None:
    artifact = open_artifact(compiled(*pair("lora", "qwen2"), tmp_path / "store"))
    artifact.rank_path(0).write_bytes(artifact.rank_path(0).read_bytes()[:100])
    with pytest.raises(ScuteError) as refused:
        read(artifact, pool_for(artifact))
    assert code_of(refused) == "SC603"


def test_conversion_rounds_to_the_pools_dtype_except_for_the_shift(pair: Pair, tmp_path: Path) -> None:
    artifact = open_artifact(compiled(*pair("dora", "qwen2"), tmp_path / "store", "--dtype", "float32"))
    sites, tensors = sites_of(artifact), load_file(artifact.rank_path(0))
    pool = ResidentPool(sites, num_pages=2048, max_adapters=1, dtype=torch.bfloat16, device=torch.device("cpu"))
    index = load(pool, "tenant", read(artifact, pool, convert=True))
    site = next(site for site in artifact.manifest.sites if site.shift and site.scale)
    for name, field, dtype in (("ds", Field.DS_OFFSET, torch.bfloat16), ("b", Field.SHIFT_OFFSET, torch.float32)):
        found = read_back(pool, index, site.name, field, (site.out_features,))
        assert torch.equal(found, tensors[f"{site.name}.{name}"].to(dtype))


def test_values_beyond_the_pools_dtype_are_refused(tmp_path: Path) -> None:
    written = Written(name="q", in_features=8, out_features=8, slots={"ds": torch.full((8,), 1e5)})
    artifact = open_artifact(write_artifact(tmp_path / "store", [written]))
    with pytest.raises(ScuteError) as refused:
        read_adapter(artifact, sites_of(artifact), torch.float16, convert=True)
    assert code_of(refused) == "SC320"


@pytest.mark.parametrize("shared", [{"A0"}, {"A0", "B0", "A1", "B1"}])
def test_terms_that_no_kernel_computes_are_refused(shared: set[str], tmp_path: Path) -> None:
    slots = {f"{letter}{number}": torch.randn(4, 16) for letter in "AB" for number in (0, 1)}
    written = Written(name="q", in_features=16, out_features=16, slots=slots, shared=frozenset(shared))
    artifact = open_artifact(write_artifact(tmp_path / "store", [written]))
    with pytest.raises(ScuteError) as refused:
        read(artifact, pool_for(artifact))
    assert code_of(refused) == "SC803"

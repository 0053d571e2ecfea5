"""One captured graph serves every mix of adapters: its replays equal single launches. Needs a GPU."""

from __future__ import annotations

import pytest
import torch

from scute_compile.base.shapes import gated_shape
from scute_compile.runtime_min.pool.resident_pool import ResidentPool
from scute_compile.runtime_min.step.arguments import Gemm, PoolTensors, fixed_features
from scute_compile.runtime_min.step.plan import Capacity, StepBuffers, plan_step
from tests.support.drawn_adapters import pair_of, sites_of, tenant

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs"),
]
SHAPE = gated_shape("small", layers=1, hidden=512, kv=128, mlp=1024)
ROWS, DTYPE = 12, torch.bfloat16
GEMMS = (
    (Gemm(first_site=0, widths=(512, 128, 128)), 512),
    (Gemm(first_site=3, widths=(512,)), 512),
    (Gemm(first_site=4, widths=(1024, 1024)), 512),
    (Gemm(first_site=6, widths=(512,)), 1024),
)


@pytest.mark.parametrize("gemm", GEMMS, ids=("qkv", "o", "gate_up", "down"))
@pytest.mark.parametrize("methods", [("lora", "dora", "ia3"), ("lora", "dora", "ia3", "vera", "oft")], ids=len)
def test_replays_with_other_mixes_match_launches(methods: tuple[str, ...], gemm: tuple[Gemm, int]) -> None:
    from scute_compile.runtime_min.step import launch

    device, (sites_of_gemm, inputs) = torch.device("cuda"), gemm
    sites = sites_of(SHAPE)
    pool = ResidentPool(sites, num_pages=20000, max_adapters=len(methods), dtype=DTYPE, device=device, pairs=1)
    for method in methods:
        pair = pair_of(sites, 64, DTYPE, pin=True) if method == "vera" else None
        pool.add(method, tenant(method, sites, DTYPE, pair=pair, pin=True))
    pool.ensure(methods)
    pool.memory.wait()
    tensors = PoolTensors.of(pool.memory)
    capacity = Capacity(tokens=ROWS, ranks=16 * ROWS, pairs=1, pair_ranks=64, rotated=ROWS)
    features = fixed_features(capacity, max_adapters=len(methods), whole_granules=True, plain="vera" not in methods)
    buffers, x = StepBuffers(capacity, device), torch.randn(ROWS, inputs, device=device).to(DTYPE)
    weight = (torch.randn(sum(sites_of_gemm.widths), inputs, device=device) * inputs**-0.5).to(DTYPE)

    def run() -> torch.Tensor:
        return launch.adapted_linear(x, weight, None, tensors, buffers, sites_of_gemm, features)

    def write(rows: list[int]) -> None:
        buffers.fill(plan_step(rows, pool.facts, pool.pairs, capacity))

    adapters = [*pool.resident.values(), -1]
    generator = torch.Generator().manual_seed(7)

    def drawn() -> list[int]:
        return [adapters[index] for index in torch.randint(len(adapters), (ROWS,), generator=generator).tolist()]

    write(drawn())
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call] # PyTorch does not annotate it
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    for _ in range(6):
        rows = drawn()
        write(rows)
        y.fill_(float("nan"))
        graph.replay()
        replayed = y.clone()
        assert torch.equal(replayed, run())
        write([rows[5]] + [-1] * (ROWS - 1))  # the row alone, at another position
        first = x[0].clone()
        x[0] = x[5]
        graph.replay()
        assert torch.equal(y[0], replayed[5])
        x[0] = first

"""DoRA's scale, computed from the shards that ranks hold, equals the compiled scale."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from scute_compile.formats.artifact import open_artifact
from scute_compile.ir.linear import Split
from scute_compile.runtime_min.base_model import load_model
from scute_compile.runtime_min.layers import weight_and_bias
from scute_compile.runtime_min.ranks.group import RankGroup
from scute_compile.runtime_min.ranks.load_time_norms import shard_scale
from scute_compile.runtime_min.reference import take
from tests.support.artifact_files import manifest_of
from tests.support.commands import compiled
from tests.support.rank_processes import Answer, on_ranks
from tests.support.served import Pair


def scales(base: Path, adapter: Path, artifact: Path, c: float) -> Answer:
    """Return DoRA's s of every site, computed from this rank's shards and read from its file of the artifact."""
    ranks, model = RankGroup(), load_model(base)
    tensors = load_file(adapter / "adapter_model.safetensors")
    file = load_file(artifact / manifest_of(artifact)["ranks"][ranks.rank]["file"])
    found: Answer = {}
    for record in open_artifact(artifact).manifest.sites:
        inputs, outputs = record.inputs[ranks.rank], record.outputs[ranks.rank]
        weight = weight_and_bias(model.get_submodule(record.name))[0].detach()
        a, b = (tensors[f"base_model.model.{record.name}.lora_{letter}.weight"] for letter in "AB")
        magnitude = tensors[f"base_model.model.{record.name}.lora_magnitude_vector"].flatten()
        found[f"computed {record.name}"] = shard_scale(
            take(take(weight, 0, outputs), 1, inputs),
            take(a, 1, inputs),
            take(b, 0, outputs).T,
            c,
            take(magnitude, 0, outputs),
            split=record.split,
            ranks=ranks,
        )
        found[f"compiled {record.name}"] = file[f"{record.name}.ds"].double()
        found[f"row {record.name}"] = torch.tensor(record.split is Split.ROW)
    return found


@pytest.mark.parametrize(("base", "tp"), [("llama-bf16", 2), ("gpt2", 2), ("llama-nine", 3)])
def test_scales_from_the_shards_of_ranks_match_the_compiled_scales(
    base: str, tp: int, pair: Pair, tmp_path: Path
) -> None:
    adapter, where = pair("dora", base)
    artifact = compiled(adapter, where, tmp_path / "store", "--tp", tp, "--dtype", "float32")
    ranks = on_ranks(tp, scales, where, adapter, artifact, 6 / 4)
    rows = 0
    for found in ranks:
        for name, computed in found.items():
            if name.startswith("computed "):
                site = name.removeprefix("computed ")
                stored = found[f"compiled {site}"]  # s - 1, rounded to float32: coarse beside an s near zero
                allowed = 1e-6 * computed.abs() + 2.0**-24 * stored.abs()
                assert ((computed - 1 - stored).abs() <= allowed).all(), site
                rows += bool(found[f"row {site}"])
    assert rows == 4 * tp, "two row-parallel sites in each of two layers"
    row = next(name.removeprefix("row ") for name, split in ranks[0].items() if name.startswith("row ") and bool(split))
    assert all(torch.equal(rank[f"computed {row}"], ranks[0][f"computed {row}"]) for rank in ranks)

"""Ranks as processes over gloo: each runs one function of a test, and returns its tensors through a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from multiprocessing import set_forkserver_preload
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.multiprocessing.spawn import start_processes

PRELOADED = [
    "scute_compile.runtime_min.model.served_model",
    "transformers",
    "transformers.models.llama.modeling_llama",
]
ROOT = str(Path(__file__).parents[2])
Answer = dict[str, torch.Tensor]
Work = Callable[..., Answer]


def on_ranks(count: int, work: Work, *arguments: object) -> list[Answer]:
    """Run `work(*arguments)` on `count` ranks of a process group and return every rank's tensors.

    `work` must be importable. The processes find each other through a file, so that no port is used.
    """
    if ROOT not in sys.path:  # ranks inherit it; `pytest` alone doesn't put the root on it
        sys.path.append(ROOT)
    with TemporaryDirectory() as name:
        folder = Path(name)
        # the server imports these modules once, and forks ranks before it starts threads
        set_forkserver_preload(PRELOADED)
        start_processes(  # type: ignore[no-untyped-call] # torch leaves it unannotated
            _begin, (count, folder, work, arguments), nprocs=count, start_method="forkserver"
        )
        return [load_file(folder / f"{rank}.safetensors") for rank in range(count)]


def _begin(rank: int, count: int, folder: Path, work: Work, arguments: tuple[object, ...]) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=count)
    try:
        answer = work(*arguments)
    finally:
        dist.destroy_process_group()
    save_file({name: tensor.contiguous() for name, tensor in answer.items()}, folder / f"{rank}.safetensors")

"""Serves requests that join and leave one batch, each with an adapter, from artifacts compiled for one rank.

scute demo -o example
scute compile example/adapters/dora example/adapters/vera --base example/base --out single
python examples/changing_batch.py example/base single
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers

from scute_compile.runtime_min import ContinuousBatch, Policy, Request, ServedModel


def main(base: Path, store: Path) -> None:
    """Print the tokens of each request as they arrive; the second request joins after two tokens of the first."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    served = ServedModel(model, max_adapters=2, pool_bytes="8MiB", shared_bytes="512KiB")
    for name in ("dora", "vera"):
        served.load_adapter(store / name, adapter_name=name)
    with ContinuousBatch(served, cache_tokens=2048, policy=Policy(patience=2.0)) as batch:
        first = batch.submit(Request(prompt=(5, 6, 7), adapter_name="dora", max_new_tokens=8))
        for event in batch.run():
            print(event.ticket.request.adapter_name, event.tokens)
            if event.ticket is first and len(first.tokens) == 2:
                batch.submit(Request(prompt=(8, 9), adapter_name="vera", max_new_tokens=4))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))

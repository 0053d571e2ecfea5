"""Compiles the demo's adapters for one rank and serves one batch in which every row has a different one.

scute demo -o example
python examples/mixed_batch.py example
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers

import scute_compile as scute
from scute_compile.runtime_min import ServedModel


def main(folder: Path) -> None:
    """Print the most likely next token of each row."""
    report = scute.compile(sorted((folder / "adapters").iterdir()), base=folder / "base", store=folder / "single")
    report.raise_if_refused()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32).eval()
    served = ServedModel(model, max_adapters=len(report.adapters), pool_bytes="16MiB")
    for outcome in report.adapters:
        served.load_adapter(folder / "single" / outcome.name, adapter_name=outcome.name)
    rows = [None, *served.adapters]
    ids = torch.arange(8).repeat(len(rows), 1)  # eight tokens, equal in all rows
    logits = served(ids, adapter_names=rows).logits
    for row, adapter in enumerate(rows):
        print(f"{adapter or 'base':<8} next token {int(logits[row, -1].argmax())}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))

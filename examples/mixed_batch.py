"""Computes one batch in which every row has a different adapter, from artifacts that `scute demo` compiled.

scute demo -o example
python examples/mixed_batch.py example
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers

from scute_compile.runtime_min.oracle.adapted_model import AdaptedModel


def main(folder: Path) -> None:
    """Print the most likely next token of each row."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32).eval()
    artifacts = {path.name: path for path in sorted((folder / "store").iterdir()) if (path / "manifest.json").exists()}
    rows = [None, *artifacts]
    ids = torch.arange(8).repeat(len(rows), 1)  # eight tokens, equal in all rows
    with AdaptedModel(model, artifacts) as adapted, torch.no_grad():
        logits = adapted(input_ids=ids, adapter_names=rows).logits
    for row, adapter in enumerate(rows):
        print(f"{adapter or 'base':<8} next token {int(logits[row, -1].argmax())}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))

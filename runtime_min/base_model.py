"""Loading of base models with transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from scute_compile.diagnostics import Code, fail


def load_model(base: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Load a base on the CPU as the class that its configuration names, with eager attention.

    Args:
        base: A folder with configuration and weights.
        dtype: The dtype that weights are converted to.

    Raises:
        ScuteError: SC402 when transformers can't load it.
    """
    import transformers

    with _quiet():
        try:
            config = transformers.AutoConfig.from_pretrained(base)
            named = [getattr(transformers, name, None) for name in config.architectures or ()]
            kind = next(filter(None, named), transformers.AutoModelForCausalLM)
            loaded = kind.from_pretrained(base, dtype=dtype, attn_implementation="eager")
        except Exception as error:  # noqa: BLE001 - a damaged configuration can raise anything
            fail(
                Code.SC402,
                where=str(base),
                found=f"transformers can't load it: {' '.join(str(error).split())[:300]}",
                expected="a model folder with weights",
                next="check that the folder holds the whole base",
            )
    model: torch.nn.Module = loaded.eval()
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress transformers' progress bars and warnings inside the block."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()

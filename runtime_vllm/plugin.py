"""The plugin's entry point: vLLM calls `register` in each of its processes before it builds a model."""

from __future__ import annotations

import logging

from scute_compile.diagnostics import ScuteError
from scute_compile.runtime_vllm.hooks import install

logger = logging.getLogger("vllm.scute")
TESTED = ("0.26.0", "0.32.0")
"""Versions of vLLM that the tests ran against; the hooks have the same signatures in all from 0.20 to 0.33."""
_registered = False


def register() -> None:
    """Install the plugin, once per process; where vLLM lacks a hook, log which and change nothing.

    Raises:
        ValueError: An environment variable of the plugin has a value of the wrong kind (SC703).
    """
    global _registered  # noqa: PLW0603 - vLLM may call this several times in a process
    if _registered:
        return
    _registered = True
    try:
        missing = install()
    except ImportError as error:
        missing = (str(error),)
    if missing:
        logger.error(
            "scute: this vLLM lacks what the plugin needs (%s); compiled adapters will not be served. Tested: %s",
            "; ".join(missing),
            ", ".join(TESTED),
        )
        return
    _configure()


def _configure() -> None:
    from scute_compile.runtime_vllm.adapter_manager import AdapterManager
    from scute_compile.runtime_vllm.layers import AdaptedLinear
    from scute_compile.runtime_vllm.options import Options

    try:
        options = Options.read()
    except ScuteError as error:
        raise ValueError(str(error)) from None
    AdapterManager.options, AdaptedLinear.stock_kernels = options, options.stock_kernels

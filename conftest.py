"""Leaves out what the environment can't import: the plugin's modules and tests, where vLLM is not installed."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["scute_compile/runtime_vllm/*", "tests/runtime_vllm*"]

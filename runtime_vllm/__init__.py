"""The vLLM plugin: compiled adapters of every method served by vLLM, beside each other and beside stock LoRA."""

if __name__ != "scute_compile.runtime_vllm":
    raise ImportError(
        f"import this room as `scute_compile.runtime_vllm`, not as `{__name__}`: a second copy would shadow the first"
    )

"""The vLLM plugin: serves compiled adapters of every method in one batch with stock LoRA and the base alone."""

if __name__ != "scute_compile.runtime_vllm":
    raise ImportError(
        f"import this room as `scute_compile.runtime_vllm`, not as `{__name__}`: a second copy would shadow the first"
    )

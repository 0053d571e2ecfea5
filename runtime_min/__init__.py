"""The minimal runtime: executes artifacts on a transformers model, with no serving engine."""

if __name__ != "scute_compile.runtime_min":
    raise ImportError(
        f"import this room as `scute_compile.runtime_min`, not as `{__name__}`: a second copy would shadow the first"
    )

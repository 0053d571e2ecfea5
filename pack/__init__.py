"""Packing: reads tensors, evaluates expressions in float32 or wider, rounds once and writes artifacts."""

if __name__ != "scute_compile.pack":
    raise ImportError(
        f"import this room as `scute_compile.pack`, not as `{__name__}`: a second copy would shadow the first"
    )

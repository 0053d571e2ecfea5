"""The passes: one rewrite of the frozen program per file."""

if __name__ != "scute_compile.passes":
    raise ImportError(
        f"import this room as `scute_compile.passes`, not as `{__name__}`: a second copy would shadow the first"
    )

"""The passes, each a function from a frozen program to a rewritten one, and the tables that they use."""

if __name__ != "scute_compile.passes":
    raise ImportError(
        f"import this room as `scute_compile.passes`, not as `{__name__}`: a second copy would shadow the first"
    )

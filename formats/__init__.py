"""Reads and writes files: PEFT folders, base checkpoints, artifacts and stores."""

if __name__ != "scute_compile.formats":
    raise ImportError(
        f"import this room as `scute_compile.formats`, not as `{__name__}`: a second copy would shadow the first"
    )

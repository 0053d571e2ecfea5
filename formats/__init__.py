"""What is on disk: PEFT folders, base checkpoints, artifacts and stores. Knows files, not algebra."""

if __name__ != "scute_compile.formats":
    raise ImportError(
        f"import this room as `scute_compile.formats`, not as `{__name__}`: a second copy would shadow the first"
    )

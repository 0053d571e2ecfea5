"""Triton kernels of the runtime. Each has a reference of the same name in `scute_compile.runtime_min.reference`."""

"""One step of a batch: its plan, the buffers that kernels read, the custom op and its launches."""

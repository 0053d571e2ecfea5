"""The resident pool: packed adapters in host memory and in pages of device memory."""

"""Adapters in pages of device memory and in host memory."""

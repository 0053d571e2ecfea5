"""Tensor-parallel ranks: their group, how they cut a model, and what they exchange."""

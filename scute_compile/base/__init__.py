"""What a base model is: its layers, their shapes, and how tensor-parallel ranks cut them. No weights are read."""

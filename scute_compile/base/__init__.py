"""What a base model is: its layers, their shapes, and how tensor-parallel ranks divide them. Reads no weights."""

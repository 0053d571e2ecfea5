"""`scute inspect`."""

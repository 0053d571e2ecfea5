"""`scute run`."""

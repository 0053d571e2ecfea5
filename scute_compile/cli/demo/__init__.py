"""`scute demo`."""

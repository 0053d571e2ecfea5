"""`scute cost`."""

"""`scute verify`."""

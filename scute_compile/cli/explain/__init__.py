"""`scute explain-folds`."""

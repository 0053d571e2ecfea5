"""Continuous batching: requests join and leave between steps."""

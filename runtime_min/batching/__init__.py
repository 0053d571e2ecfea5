"""Continuous batching: admission, deadlines and steps of requests that join and leave between steps."""

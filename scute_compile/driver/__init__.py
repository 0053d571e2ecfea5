"""Plans the adapters of a call by base, packs them, and compares artifacts with a request. Returns data."""

"""Opens bases, plans and packs the adapters of a call, compares artifacts with a request, and returns reports."""

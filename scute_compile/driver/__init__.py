"""Opens bases, groups adapters by base, packs them, and checks artifacts against a request. Returns data, prints nothing."""

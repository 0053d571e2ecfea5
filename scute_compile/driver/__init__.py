"""Opens bases, groups adapters by base, packs, and checks artifacts against what was asked."""

"""A transformers model that serves adapters, on one rank or several."""

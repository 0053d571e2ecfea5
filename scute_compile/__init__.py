"""Scute: an adapter compiler for PEFT checkpoints.

Importing this package imports neither torch nor transformers; the command line starts at once.
"""

__version__ = "0.1.0"

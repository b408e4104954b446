"""The library behind the study: the training-inference mismatch, and what pruning the tail changes."""

__version__ = "0.1.0"

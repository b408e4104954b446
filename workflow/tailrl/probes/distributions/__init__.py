"""Compares the trainer's and an engine's distributions over the whole vocabulary at the same states."""

"""Curves alone: a run's logged metrics without tokens, and what their size and their shape say of the mismatch."""

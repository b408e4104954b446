"""Intervals, tests and power: arrays in, numbers out. Knows nothing of studies."""

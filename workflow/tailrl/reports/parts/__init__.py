"""A study's parts together."""

FIGURES = {"pooled": ("comparisons", "measures")}
"""The figures, each with the tables behind it."""

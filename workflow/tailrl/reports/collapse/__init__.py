"""Which runs collapse, and when."""

FIGURES = {"survival": ("survival",)}
"""The figures of a study's page, each with the tables behind it."""

TABLES = ("collapses.csv",)
"""The other tables."""

SECTION = "Held-out score"
"""The section of the summary that the figures belong to."""

"""Held-out scores: of each arm and policy, and differences between arms."""

FIGURES = {"evaluation": ("evaluation", "policies"), "score_by_k3": ("score_by_k3",)}
"""The figures of a study's page, each with the tables behind it."""

TABLES = ("differences.csv", "problems.csv.gz")
"""The other tables."""

SECTION = "Held-out score"
"""The section of the summary that the figures belong to."""

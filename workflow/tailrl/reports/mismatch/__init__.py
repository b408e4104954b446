"""The mismatch of sampler and trainer: k3, weights, Δ by probability, and the mass outside the safe set."""

FIGURES = {"mismatch": ("mismatch",), "delta": ("delta",), "kept": ("kept",)}
"""The figures of a study's page, each with the tables behind it."""

TABLES = ("first_k3.csv", "k3_ratios.csv")
"""The other tables."""

SECTION = "Training"
"""The section of the summary that the figures belong to."""

"""Engines' whole distributions against the trainer's."""

TABLES = ("distributions.csv", "safe_sets.csv", "probability.csv", "histograms.csv", "signature.csv", "claims.csv")
"""The tables of its page."""

FLIP_TABLES = ("flips_by_layer.csv", "flips_by_margin.csv", "flips_by_problem.csv.gz")
"""Those of engines that say which experts they chose."""

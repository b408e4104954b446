"""Engines' whole distributions against the trainer's."""

FIGURES = {"distributions": ("distributions", "safe_sets", "probability", "signature", "histograms")}
"""The figures, each with the tables behind it."""

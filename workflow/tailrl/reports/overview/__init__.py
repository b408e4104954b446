"""The pages of a study and of all studies, and a study's verdicts."""

TABLES = ("claims.csv", "arms.csv", "made_by.csv", "trained.csv")
"""The tables of a study's page."""

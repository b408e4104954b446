"""How training went: reward, entropy and length over the steps, scores on the way, the time of a step."""

FIGURES = {"training": ("training",), "time": ("time",)}
"""The figures of a study's page, each with the tables behind it."""

SNAPSHOT_FIGURES = {"figure1": ("figure1",)}
"""Those of a study that keeps policies on the way."""

TABLES = ("flips.csv", "responses.csv", "course.csv", "rewards.csv.gz")
"""The other tables."""

SECTION = "Training"
"""The section of the summary that the figures belong to."""

"""The figures of all topics: the tables behind them and their captions. Nothing here draws: the workflow reads it."""

from pathlib import Path

from tailrl.reports import collapse, course, mismatch, overview, scores

TOPICS = (scores, collapse, mismatch, course)
"""The topics that have a figure on a study's page."""

FIRST = ("evaluation", "survival", "training", "mismatch")
"""The figures that come first on every page, in this order."""

FIGURES = {name: tables for topic in TOPICS for name, tables in topic.FIGURES.items()}
"""The figures of every study's page, each with the tables behind it."""

SNAPSHOT_FIGURES = course.SNAPSHOT_FIGURES
"""Those of a study that keeps policies on the way."""

SECTION_OF = {name: topic.SECTION for topic in TOPICS for name in topic.FIGURES}
"""The section of a study's summary that a figure belongs to, if not to `Training`."""

TABLES = (
    *(f"{table}.csv" for tables in FIGURES.values() for table in tables),
    *(table for topic in (*TOPICS, overview) for table in topic.TABLES),
)
"""The tables of every study's page, by their files' names."""


def place_of(name: str) -> int:
    """Where a figure comes on a page; those that have no place of their own come last, as they are."""
    return FIRST.index(name) if name in FIRST else len(FIRST)


def caption_file(name: str) -> Path | None:
    """The caption of a figure, a table or a page, which Snakemake's report shows too; it lies in the topic's folder."""
    return next((path for path in Path(__file__).parent.glob("*/*.rst") if path.stem == name), None)


def caption(name: str) -> str:
    """A figure's caption by its name; empty if it has none."""
    file = caption_file(name)
    return file.read_text(encoding="utf-8") if file else ""

"""Snakemake's report, made to open on a study's page: by itself it opens on the graph of the rules."""

import json
from pathlib import Path

from tailrl.artifacts.files import read_text
from tailrl.report.page import render
from tailrl.runtime.errors import StudyError

BODY = '<div id="app">'
"""Where Snakemake's report puts its content."""


def open_on(report: Path, page: str) -> None:
    """Make a report of Snakemake open on one of its pages, named by its path as the report has it.

    Raises:
        StudyError: the report was not made by Snakemake, or does not hold the page.
    """
    begin, body, rest = read_text(report).partition(BODY)
    if not body or f"{json.dumps(page)}: {{" not in rest:
        raise StudyError(f"{report}: is no report of Snakemake with the page {page}")
    report.write_text(f"{begin}{render('opening.html.j2', page=page)}{body}{rest}", encoding="utf-8")

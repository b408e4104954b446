"""Figures of published studies are drawn from the published tables."""

import csv
import gzip
from pathlib import Path

import pytest
from matplotlib.collections import PathCollection
from pages_fixture import DOCS

import published_figures
from docsite.drawn import with_figures
from table_records import records_of
from tailrl.artifacts.published import read_published, write_table
from tailrl.reports.axes import save_svg, svg_of
from tailrl.runtime.errors import StudyError
from tailrl.stats.intervals import Interval

TABLES = DOCS / "results/tables"
FIGURES = published_figures.every_figure()
KINDS = {place.name: place for place in FIGURES}


@pytest.mark.parametrize("name", KINDS)
def test_one_of_each_kind_is_drawn(name: str) -> None:
    assert svg_of(FIGURES[KINDS[name]]()).count("<path") > 20


@pytest.mark.long  # the site's build draws them
def test_every_figure_is_drawn() -> None:
    assert len(FIGURES) > 90
    for draw in FIGURES.values():
        draw()


def test_a_figure_has_the_numbers_of_its_table() -> None:
    figure = FIGURES[published_figures.SHOWN["collapse-scores"]]()
    dots = [
        place for dot in figure.axes[0].collections if isinstance(dot, PathCollection) for place in dot.get_offsets()
    ]
    with (TABLES / "policies.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["study"] == "collapse" and row["arm"] != "base"]
    assert len(rows) == 40 and sorted(x for x, _ in dots) == sorted(float(row["avg_mean"]) for row in rows)


def test_the_figures_that_pages_show_are_those_of_the_tables(tmp_path: Path) -> None:
    """Where it fails: `make pages`."""
    for name in ("causes-parts", "collapse-scores"):
        save_svg(FIGURES[published_figures.SHOWN[name]](), tmp_path / "one.svg")
        assert (tmp_path / "one.svg").read_bytes() == (DOCS / f"figures/{name}.svg").read_bytes()
    assert all((DOCS / f"figures/{name}.svg").is_file() for name in published_figures.SHOWN)


def test_a_page_of_results_gets_its_figures() -> None:
    page = with_figures("# collapse\n", "results/collapse/summary.md")
    assert page.startswith("# collapse\n") and "![evaluation of collapse](summary-evaluation.svg)" in page
    assert with_figures("# x\n", "results/README.md") == "# x\n"


def test_every_row_says_whose_it_is() -> None:
    """Each study with rows has a page, but for searches; no table has a column without a name."""
    for path in sorted(TABLES.glob("*.csv*")):
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            reader = csv.DictReader(file)
            named = {(row["study"], row["page"]) for row in reader}
        assert list(reader.fieldnames or ())[:2] == ["study", "page"] and all(reader.fieldnames or ()), path.name
        lacking = {(study, page) for study, page in named if not (DOCS / f"results/{study}/{page}.md").is_file()}
        assert all(study.startswith("search_") for study, _ in lacking), (path.name, lacking)


def test_records_are_read_back(tmp_path: Path) -> None:
    row = {"page": "summary", "mean": "0.5", "low": "", "high": "1e-3", "n": "7"}
    write_table(tmp_path, "course", {"b": [row], "a": [row | {"more": "x"}]})
    studies = read_published(tmp_path, "course")
    assert list(studies) == ["a", "b"] and studies["b"] == [row | {"more": ""}]
    (record,) = records_of(studies["b"], Interval)
    assert (record.mean, record.high, record.n) == (0.5, 0.001, 7) and record.low != record.low
    with pytest.raises(StudyError, match="mean of a row of Interval is 'x'"):
        records_of([row | {"mean": "x"}], Interval)
    with pytest.raises(StudyError, match="a row of Interval has no n"):
        records_of([{"mean": "1", "low": "1", "high": "1"}], Interval)

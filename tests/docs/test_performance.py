"""docs/performance.md is made from the published files."""

import shutil
from pathlib import Path

import pytest

import performance
import performance_figures


def test_the_page_is_made_from_the_published_files() -> None:
    """Where it fails: `make pages`."""
    assert performance.PAGE.read_text(encoding="utf-8") == performance.page()


def test_another_file_makes_another_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in performance.RESULTS.glob("*.csv"):
        shutil.copy(file, tmp_path)
    shutil.copytree(performance.RESULTS / "tables", tmp_path / "tables")
    monkeypatch.setattr(performance, "RESULTS", tmp_path)
    step = tmp_path / "step.csv"
    head, line, *others = step.read_text(encoding="utf-8").splitlines()
    changed = line.replace(line.split(",")[2], "76.54", 1)
    step.write_text("\n".join([head, changed, *others]), encoding="utf-8")
    assert performance.page().count("| 76.54 |") == performance.PAGE.read_text(encoding="utf-8").count("| 76.54 |") + 1
    step.write_text("case\n", encoding="utf-8")
    with pytest.raises(performance.MissingRowError, match=r"step\.csv: 0 rows"):
        performance.value("step.csv", "cpu_seconds", case="TRL")


def test_the_figures_are_drawn_from_the_published_files(tmp_path: Path) -> None:
    """Where it fails: `make pages`."""
    performance_figures.draw(tmp_path)
    drawn = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert drawn == {file.name: file.read_bytes() for file in performance_figures.FIGURES.glob("performance-*.svg")}
    assert all(f"figures/{name}" in performance.PAGE.read_text(encoding="utf-8") for name in drawn)

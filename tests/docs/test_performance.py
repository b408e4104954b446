"""Numbers of docs/performance.md and of the concepts are those of the published files."""

import csv
import re
import sys
from pathlib import Path

import pytest
from pages_fixture import DOCS

sys.path.insert(0, str(DOCS / "code/performance"))
import performance


def test_the_page_is_made_from_the_published_files() -> None:
    """Where it fails: `python docs/code/performance/performance.py`."""
    assert performance.PAGE.read_text(encoding="utf-8") == performance.page()


def test_another_file_makes_another_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in performance.RESULTS.glob("*.csv"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(performance, "RESULTS", tmp_path)
    step = tmp_path / "step.csv"
    step.write_text(step.read_text(encoding="utf-8").replace("1.202,", "1.302,"), encoding="utf-8")
    assert performance.page().count("| 1.30 |") == performance.PAGE.read_text(encoding="utf-8").count("| 1.30 |") + 1
    step.write_text("case\n", encoding="utf-8")
    with pytest.raises(performance.MissingRowError, match=r"step\.csv: 0 rows"):
        performance.value("step.csv", "cpu_seconds", case="TRL")


def test_the_shape_of_the_mismatch_is_that_of_the_published_distributions() -> None:
    """|Δ| of vLLM in bfloat16: above 90 %, and the least and most below 60 %."""
    with (DOCS / "results/distributions/probability.csv").open(newline="", encoding="utf-8") as file:
        found = [row for row in csv.DictReader(file) if row["engine"] == "vllm_bf16"]
    sure, below = found[0], [float(row["size_mean"]) for row in found if float(row["nats_from"]) >= 0.5]
    assert float(sure["nats_to"]) == 0.1  # exp(-0.1) is 0.90, exp(-0.5) is 0.61
    text = f"{float(sure['size_mean']):.5f} nats for tokens above 90 %, and {min(below):.3f} to {max(below):.3f} nats"
    page = (DOCS / "concepts/mismatch.md").read_text(encoding="utf-8")
    assert text in re.sub(r"\s+", " ", page)


def test_a_clean_response_weighs_more_than_two_from_ten_tokens_on() -> None:
    """The arithmetic of docs/concepts/mis.md."""
    assert 0.93**-9 < 2 < 0.93**-10

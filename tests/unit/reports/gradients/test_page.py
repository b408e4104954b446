"""Medians, ranges and the comparison with the first arm, from a file written by hand."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
from artifacts_fixture import RAN, vouch_again

from tailrl.artifacts.manifest import MANIFEST, files_in, write_manifest
from tailrl.artifacts.probes import GradientsRecord, read_quality
from tailrl.artifacts.records import write_record
from tailrl.config.gradients import GradientQuality, Gradients
from tailrl.reports.gradients.numbers import summarise
from tailrl.reports.gradients.page import LOWEST, _together, gradient_figure, trade_figure, write_gradients
from tailrl.runtime.errors import StudyError

ERRORS = {"naive": [1.0, 2.0, 4.0], "dvp": [0.5, 3.0, 3.0]}
DOSES = (("none", 0.0), ("noise", 0.1), ("floor", 0.01))


def line(model: int, mismatch: str, dose: float, arm: str, **values: float | None) -> dict[str, Any]:
    names = ("divergence", "bias", "bias_constrained", "deviation", "error", "direction", "cosine", "cosine_half_width")
    numbers = dict.fromkeys(names, 0.25) | {"lacking": 0.0}
    return {"model": model, "mismatch": mismatch, "dose": dose, "arm": arm, **numbers, **values}


LINES = [
    line(m, *dose, arm, error=ERRORS[arm][m], direction=None if arm == "dvp" and m == 0 else 0.5, bias=0.0)
    for m in range(3)
    for dose in DOSES
    for arm in ERRORS
]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    (tmp_path / "quality.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LINES), encoding="utf-8")
    quality = GradientQuality(draws=7, seed=0, vocabulary_size=5, length=2, prompts=3, group_size=4)
    settings = Gradients(arms={}, quality=quality).model_dump(mode="json")
    write_record(tmp_path, GradientsRecord.model_validate(RAN | {"settings": settings}))
    write_manifest(tmp_path / MANIFEST, files_in(tmp_path))
    return tmp_path


def test_a_summary_is_the_median_and_range_over_models(results: Path) -> None:
    found = summarise(read_quality(results))
    assert [(s.mismatch, s.dose, s.arm) for s in found] == [(*dose, arm) for dose in DOSES for arm in ERRORS]
    naive, dvp = found[:2]
    assert (naive.error.median, naive.error.low, naive.error.high) == (2, 1, 4)
    assert (dvp.models, dvp.less_error, naive.less_error) == (3, 2, 0)
    ratio = dvp.error_ratio
    assert (ratio.median, ratio.low, ratio.high) == (0.75, 0.5, 1.5), "each model by its own reference"
    assert (dvp.direction.median, dvp.direction.low) == (0.5, 0.5), "a missing value is left out"


def test_the_bias_where_the_sets_are_nested(results: Path) -> None:
    rows = read_quality(results)
    apart = [row.model_copy(update={"lacking": 0.1 * row.model, "bias_constrained": 0.1 + row.model}) for row in rows]
    assert {(s.nested, s.nested_bias, s.bias_constrained.high) for s in summarise(apart)} == {(1, 0.1, 2.1)}
    none = summarise([row.model_copy(update={"lacking": 0.1}) for row in rows])
    assert all(s.nested == 0 and math.isnan(s.nested_bias) for s in none)


def test_equal_but_for_rounding_is_not_less(results: Path) -> None:
    rows = read_quality(results)
    close = [row.model_copy(update={"error": 1.0 if row.arm == "naive" else 1.0 - 1e-12}) for row in rows]
    assert [s.less_error for s in summarise(close)] == [0] * 6


def test_nothing_known_is_nan(results: Path) -> None:
    rows = [row.model_copy(update={"direction": math.nan}) for row in read_quality(results)]
    assert math.isnan(summarise(rows)[0].direction.median)


def test_what_is_written(results: Path) -> None:
    write_gradients(results, results / "out")
    with (results / "out" / "gradient_quality.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["error_median"] for row in rows] == ["2", "3"] * 3
    with (results / "out" / "models.csv").open(encoding="utf-8") as file:
        models = [(row["mismatch"], float(row["dose"]), int(row["model"]), row["arm"], float(row["error"]))
                  for row in csv.DictReader(file)]  # fmt: skip
    assert models == [tuple(row[name] for name in ("mismatch", "dose", "model", "arm", "error")) for row in LINES]
    page = (results / "out" / "gradient_quality.md").read_text(encoding="utf-8")
    assert "3 random models (seed 0): 5 tokens, responses of 2, steps of 3 prompts with 4 responses" in page
    assert "## Noise σ on every logit (nats): 0.1" in page
    assert "| dvp | 0 | 0.25 | 0.25 | 3 (0.5 to 3) | 0.5 | 0.25 | 2 of 3 |" in page
    assert (results / "out" / "gradient_quality.svg").read_text(encoding="utf-8").startswith("<?xml")


def test_the_figure_has_a_column_for_each_mismatch_and_starts_without_any(results: Path) -> None:
    figure = gradient_figure(summarise(read_quality(results)))
    assert len(figure.axes) == 4 * 2
    assert [label.get_text() for label in figure.axes[-2].get_xticklabels()] == ["0", "0.1"]
    assert [label.get_text() for label in figure.axes[-1].get_xticklabels()] == ["0", "0.01"]
    drawn = figure.axes[0].get_lines()[0].get_ydata()
    assert list(drawn) == [LOWEST["bias"]] * 2, "a bias of 0 has its place on a log axis"
    error = figure.axes[4]
    assert list(error.get_lines()[1].get_ydata()) == [0.75, 0.75]


def test_without_any_mismatch_there_is_one_column(results: Path) -> None:
    rows = [row for row in read_quality(results) if row.mismatch == "none"]
    assert len(gradient_figure(summarise(rows)).axes) == 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no line"),
        ("{\n", "line 1: not valid JSON"),
        ("[1]\n", "line 1: holds list, not a JSON object"),
        (json.dumps(LINES[0]) + "\n" + json.dumps({"model": 1}) + "\n", "line 2: mismatch is missing"),
        (json.dumps(LINES[0] | {"error": "small"}) + "\n", "line 1: error: Input should be a valid number"),
    ],
)
def test_what_cannot_be_used_is_named(results: Path, text: str, words: str) -> None:
    (results / "quality.jsonl").write_text(text, encoding="utf-8")
    vouch_again(results / "quality.jsonl")
    with pytest.raises(StudyError, match=words) as caught:
        write_gradients(results, results / "out")
    assert str(caught.value).startswith(str(results / "quality.jsonl"))


def test_causes_at_equal_k3_are_titled_and_drawn_by_k3(results: Path) -> None:
    """A number an arm in each panel, at its bias and its standard deviation; close ones share a text."""
    record = json.loads((results / "run.json").read_text(encoding="utf-8"))
    record["settings"]["quality"]["nats"] = [0.01]
    (results / "run.json").write_text(json.dumps(record), encoding="utf-8")
    equal = [row | {"dose": 0.01} if row["mismatch"] != "none" else row for row in LINES]
    (results / "quality.jsonl").write_text("".join(json.dumps(row) + "\n" for row in equal), encoding="utf-8")
    write_manifest(results / MANIFEST, files_in(results))
    write_gradients(results, results / "out")
    page = (results / "out" / "gradient_quality.md").read_text(encoding="utf-8")
    assert "## Noise at a k3 of 0.01\n" in page and "## Floor at a k3 of 0.01\n" in page
    figure = trade_figure(summarise(read_quality(results)))
    assert [[text.get_text() for text in ax.texts] for ax in figure.axes] == [["1-2"], ["1-2"]]
    assert _together([(0.0, 1.0), (0.01, 1.0), (1.0, 2.0), (0.0, 1.01)]) == [((0.0, 1.0), "1-2, 4"), ((1.0, 2.0), "3")]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["1 naive", "2 dvp"]

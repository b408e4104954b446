"""Studies with the same arms, held against one another."""

import csv
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from tailrl.analysis.across import QUANTITIES, arm_quantities
from tailrl.artifacts.results import read_results
from tailrl.claims.catalogue import named
from tailrl.claims.finding import CHANGES, UNDECIDED
from tailrl.config.study import Study
from tailrl.report.across import across_figure, write_across
from tailrl.runtime.errors import StudyError

Make = Callable[..., tuple[Study, Path]]


def made(make_study: Make, name: str, **changes: Any) -> tuple[Study, Path]:
    """A study and its results, in a folder that has its name."""
    study, folder = make_study(name=name, ablations={}, **changes)
    return study, folder.rename(folder.with_name(name))


def two(make_study: Make) -> tuple[list[Study], Path]:
    """The first has an arm that the second has not."""
    arms = {"naive": {}, "dvp": {"vocabulary": {"rule": "min_p", "rho": "e-5"}}}
    first, folder = made(make_study, "first", seeds=[0, 1, 2], training={"steps": 4})
    second, _ = made(make_study, "second", seeds=[0, 1, 2], training={"steps": 4}, arms=arms)
    return [first, second], folder.parent


def test_arms_side_by_side(make_study: Make, tmp_path: Path) -> None:
    studies, folder = two(make_study)
    write_across(studies, folder, tmp_path / "both")
    with (tmp_path / "both.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["quantity"], row["arm"], row["study"]) for row in rows] == [
        (name, arm, study) for name in QUANTITIES for arm in ("naive", "dvp") for study in ("first", "second")
    ]
    read = [read_results(study, folder / study.name, ["naive", "dvp"]) for study in studies]
    for row in rows:
        measure = QUANTITIES[row["quantity"]]
        value = {study.name: measure(results, row["arm"]) for study, results in zip(studies, read, strict=True)}
        if not np.isnan(value["first"]).any():
            assert float(row["value_mean"]) == pytest.approx(value[row["study"]].mean(), rel=1e-8)
        if row["study"] == "first":
            assert row["change_p"] == "" == row["change_p_holm"]
        elif np.ptp(value["first"]) > 0 and not np.isnan(value["first"]).any():
            test = stats.ttest_ind(value["second"], value["first"], equal_var=False)
            assert float(row["change_p"]) == pytest.approx(test.pvalue, rel=1e-6)
            assert float(row["change_p_holm"]) >= float(row["change_p"])
        elif np.ptp(np.concatenate(list(value.values()))) == 0:
            assert row["change_p"] == "", "no comparison, and none that Holm counts"
    with (tmp_path / "both_claims.csv").open(newline="", encoding="utf-8") as file:
        claims = list(csv.DictReader(file))
    compared = [row for row in rows if row["change_p_holm"]]
    assert compared and [(c["arms"], c["id"], c["p_holm"], c["effect"]) for c in claims] == [
        (row["arm"], named("across.*")[row["quantity"]].id, row["change_p_holm"], row["change_mean"])
        for row in compared
    ]
    for claim in claims:
        assert claim["verdict"] == (CHANGES if float(claim["p_holm"]) <= 0.05 else UNDECIDED)
        name = claim["claim"].removeprefix("across studies: ")
        assert name in QUANTITIES and claim["seen"].startswith(f"{name}, second less first: ")
    with (tmp_path / "both_k3_ratios.csv").open(newline="", encoding="utf-8") as file:
        ratios = [(row["first"], row["second"], row["n"]) for row in csv.DictReader(file)]
    assert ratios == [(f"second: {arm}", f"first: {arm}", "3") for arm in ("naive", "dvp")]
    text = (tmp_path / "both.md").read_text(encoding="utf-8")
    assert text.startswith("# first, second\n\n- first, 3 seeds: ") and text.count("\n| naive | ") == len(QUANTITIES)
    assert "mis" not in text, "the second study has no such arm"


def test_the_figure_draws_the_table(make_study: Make, tmp_path: Path) -> None:
    """A line an arm, at the studies in their order, named by what tells them apart."""
    studies, folder = two(make_study)
    read = [read_results(study, folder / study.name, ["naive", "dvp"]) for study in studies]
    measured = [one for name in QUANTITIES for one in arm_quantities(name, ["naive", "dvp"], studies, read)]
    panels = across_figure([replace(one, study=f"of_f_{one.study}") for one in measured], list(studies[0].arms)).axes
    for ax, name in zip(panels, QUANTITIES, strict=False):
        own = [one for one in measured if one.quantity == name]
        assert ax.get_title("left") == name and [label.get_text() for label in ax.get_xticklabels()] == [
            "first",
            "second",
        ]
        means = [one.value.mean for one in own]
        np.testing.assert_array_equal(np.concatenate([line.get_ydata() for line in ax.get_lines()]), means)
    write_across(studies, folder, tmp_path / "both")
    assert "<svg" in (tmp_path / "both.svg").read_text(encoding="utf-8")
    assert "| dvp | not recorded | not recorded |" in (tmp_path / "both.md").read_text(encoding="utf-8")


def test_kept_mass_is_that_of_the_metrics(make_study: Make) -> None:
    """Made with 1 - Z near 2e-3 where the arm prunes, and 0 where it does not."""
    studies, folder = two(make_study)
    results = read_results(studies[0], folder / "first", ["naive", "dvp"])
    lost = {arm: QUANTITIES["1 − Z"](results, arm) for arm in ("naive", "dvp")}
    assert (lost["naive"] == 0).all() and (abs(lost["dvp"] - 2e-3) < 1e-3).all()
    assert all(math.isnan(value) for value in QUANTITIES["1 − Z of a response, summed"](results, "dvp")), "not recorded"


def test_studies_made_with_other_seeds_than_their_files_say(make_study: Make, tmp_path: Path) -> None:
    """As `make ablate_length ARGS="--config 'seeds=[0,1,2]'"` makes them."""
    studies, folder = two(make_study)
    write_across(studies, folder, tmp_path / "same")
    in_files = [study.model_copy(update={"seeds": (7, 8)}) for study in studies]
    write_across(in_files, folder, tmp_path / "other")
    assert (tmp_path / "other.csv").read_bytes() == (tmp_path / "same.csv").read_bytes()
    assert (tmp_path / "other.md").read_bytes() == (tmp_path / "same.md").read_bytes()


def test_an_arm_with_its_own_seeds(make_study: Make, tmp_path: Path) -> None:
    arms = {"naive": {}, "dvp": {"vocabulary": {"rule": "min_p", "rho": "e-5"}, "seeds": [4, 5, 6]}}
    studies = [made(make_study, name, seeds=[0, 1], training={"steps": 2}, arms=arms)[0] for name in ("one", "two")]
    write_across(studies, tmp_path, tmp_path / "both")
    with (tmp_path / "both.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["study"] == "one"]
    assert {(row["arm"], row["value_n"]) for row in rows if row["value_mean"]} == {("naive", "2"), ("dvp", "3")}


def test_what_cannot_be_compared_is_named(make_study: Make, tmp_path: Path) -> None:
    first, folder = made(make_study, "first", seeds=[0], training={"steps": 2}, arms={"a": {}})
    other, _ = made(make_study, "other", seeds=[0], training={"steps": 2}, arms={"b": {}})
    with pytest.raises(StudyError, match=r"^the studies first, other have no arm in common$"):
        write_across([first, other], folder.parent, tmp_path / "x")
    with pytest.raises(StudyError, match=r"^a comparison needs at least two studies$"):
        write_across([first], folder.parent, tmp_path / "x")
    (folder / "eval" / "a.json").unlink()
    with pytest.raises(StudyError, match=r"eval/a\.json: is missing"):
        write_across([first, first], folder.parent, tmp_path / "x")

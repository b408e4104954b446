"""Verdicts of an ablation, from written scores and from points made by hand."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from artifacts_fixture import set_rewards
from csv_fixture import rows
from scipy import stats

from tailrl.claims.decide import Scope
from tailrl.claims.finding import CHANGES, NOT_SEEN, UNDECIDED, UNTESTABLE
from tailrl.config.study import Study
from tailrl.reports.ablation.endpoints import as_good
from tailrl.reports.ablation.numbers import Point
from tailrl.reports.ablation.page import write_ablation
from tailrl.stats.intervals import Interval
from tailrl.stats.survival import collapse_step
from tailrl.stats.tests import NO_DIFFERENCE, Difference, holm

NONE = Interval(math.nan, math.nan, math.nan, 0)


@pytest.mark.slow
def test_contrast_of_an_ablation(make_study: Callable[..., tuple[Study, Path]], tmp_path: Path) -> None:
    """How much a value moves one arm more than another, from the scores that were written."""
    dose = {
        "base": ["naive", "dvp", "mis"],
        "field": "disturbance.floor",
        "values": [0.0, 0.01, 0.02],
        "contrast": ["dvp", "naive"],
    }
    study, folder = make_study(seeds=[0, 1, 2], training={"steps": 2}, ablations={"dose": dose})

    def score(base: str, value: str) -> float:
        arm = base if value == "0.0" else f"{base}+dose={value}"
        policies = json.loads((folder / "eval" / f"{arm}.json").read_text())["policies"]
        return float(np.mean([problem["correct"] for policy in policies for problem in policy["per_problem"]]))

    write_ablation(study, "dose", folder, tmp_path)
    found = [row for row in rows(tmp_path / "ablations" / "dose_claims.csv") if row["id"].endswith(".contrast")]
    above = {value: score("dvp", value) - score("naive", value) for value in ("0.0", "0.01", "0.02")}
    expected = [above[value] - above["0.0"] for value in ("0.01", "0.02")]
    assert [float(row["effect"]) for row in found] == pytest.approx(expected)
    assert [row["seen"].partition(" points")[0].partition(":")[0] for row in found] == [
        "0.01 against 0.0",
        "0.02 against 0.0",
    ]
    assert {row["id"] for row in found} == {"ablation.disturbance.floor.contrast"}
    varied = [row["dose"].partition("; ")[2] for row in found]
    assert varied == [f"disturbance.floor: 0.0, {value}" for value in ("0.01", "0.02")]
    p, adjusted = ([float(row[name]) for row in found] for name in ("p", "p_holm"))
    assert adjusted == pytest.approx(list(holm(p)))
    text = (tmp_path / "ablations" / "dose.md").read_text()
    assert text.count("Held-out avg@k of dvp minus that of naive at a value, minus the same difference at 0.0") == 1
    assert text.count("\n- dvp, naive: 0.0") == 2


def test_a_line_over_several_rates_names_them(make_study: Callable[..., tuple[Study, Path]], tmp_path: Path) -> None:
    faster = {"base": ["naive", "dvp"], "field": "training.learning_rate", "values": [1e-4, 3e-4, 1e-3]}
    faster["contrast"] = ["dvp", "naive"]
    study, folder = make_study(seeds=[0, 1], training={"steps": 2, "learning_rate": 1e-4}, ablations={"faster": faster})
    write_ablation(study, "faster", folder, tmp_path)
    found = [(row["id"].rpartition(".")[2], row["rate"]) for row in rows(tmp_path / "ablations" / "faster_claims.csv")]
    contrasts = [("contrast", "1e-4, 3e-4"), ("contrast", "1e-4, 1e-3")]
    assert found == [*[("score", "1e-4, 3e-4, 1e-3")] * 2, *contrasts]


@pytest.mark.slow  # `../overview/test_study.py` has the collapses of an ablation
def test_values_that_shorten_runs(make_study: Callable[..., tuple[Study, Path]], tmp_path: Path) -> None:
    """Welch's tests on the steps that the runs were made to last, by Holm over those of all base arms; an arm of which
    none collapses is not tested."""
    dose = {"base": ["naive", "dvp", "mis"], "field": "disturbance.floor", "values": [0.0, 0.01, 0.02]}
    seeds, steps = [0, 1, 2, 3], 40
    study, folder = make_study(seeds=seeds, training={"steps": steps}, ablations={"dose": dose})
    ends = {
        "naive+dose=0.01": [30, steps, steps, steps],
        "naive+dose=0.02": [11, 14, 19, 12],
        "mis+dose=0.02": [20, 21, steps, 24],
    }
    set_ends(study, folder, ends)
    write_ablation(study, "dose", folder, tmp_path)
    found = [
        row for row in rows(tmp_path / "ablations" / "dose_claims.csv") if row["id"].endswith(".steps_before_collapse")
    ]
    naive, dvp, mis = found
    assert [(row["arms"], row["unit"]) for row in found] == [(base, "steps") for base in ("naive", "dvp", "mis")]
    assert (dvp["verdict"], dvp["seen"], dvp["p"]) == (NOT_SEEN, "no run collapsed", "")

    lasted = {arm: [collapsed_at(end, steps) for end in own] for arm, own in ends.items()}
    tests = [
        stats.ttest_ind_from_stats(np.mean(own), np.std(own, ddof=1), 4, steps, 0, 4, False) for own in lasted.values()
    ]
    p, adjusted = [test.pvalue for test in tests], holm([test.pvalue for test in tests])
    assert adjusted[1] < 0.05 < min(adjusted[0], adjusted[2]) and 0 < p[2] < adjusted[2], "one is decided"
    assert (naive["verdict"], mis["verdict"]) == (CHANGES, UNDECIDED)
    assert naive["seen"].startswith("0.02: -") and ";" not in naive["seen"], (
        "what is not decided is not named beside it"
    )
    for row, place in ((naive, 1), (mis, 2)):
        assert float(row["effect"]) == pytest.approx(np.mean([*lasted.values()][place]) - steps)
        assert [float(row["p"]), float(row["p_holm"])] == pytest.approx([p[place], adjusted[place]])


def test_runs_of_unequal_length_do_not_last_longer(
    make_study: Callable[..., tuple[Study, Path]], tmp_path: Path
) -> None:
    """What a run is planned for, and what a rule that ended it says, is no collapse."""
    longer = {"base": "naive", "field": "training.steps", "values": [20, 40]}
    study, folder = make_study(seeds=[0, 1, 2, 3], training={"steps": 20}, ablations={"longer": longer})
    set_ends(study, folder, {"longer=40": [30, 32, 34, 40]})
    write_ablation(study, "longer", folder, tmp_path)
    (found,) = [
        row
        for row in rows(tmp_path / "ablations" / "longer_claims.csv")
        if row["id"].endswith(".steps_before_collapse")
    ]
    assert (found["verdict"], found["seen"]) == (UNTESTABLE, "nothing to compare")


def reward_of(step: float, end: float) -> float:
    """Of a run that rises after five steps and collapses at its end."""
    return (0.5 if step < 5 else 1.0) if step < end else 0.0


def set_ends(study: Study, folder: Path, ends: Mapping[str, Sequence[int]]) -> None:
    """Rewards of 0.5, after five steps of 1 up to a step of each run, and of 0 from there on."""
    for arm in study.all_arms():
        for place, seed in enumerate(study.seeds):
            end = ends[arm][place] if arm in ends else math.inf
            set_rewards(folder / "train" / arm / f"seed{seed}", lambda step, end=end: reward_of(step, end))


def collapsed_at(end: int, steps: int) -> int:
    """The steps up to the collapse of such a run, or all."""
    place = collapse_step([reward_of(step, end) for step in range(steps)], 5)
    return steps if place is None else place + 1


def test_a_margin_adds_a_line_for_each_other_value(
    make_study: Callable[..., tuple[Study, Path]], tmp_path: Path
) -> None:
    dose = {"base": ["naive", "dvp"], "field": "disturbance.floor", "values": [0.0, 0.01, 0.02], "margin": 0.05}
    study, folder = make_study(seeds=[0, 1, 2], training={"steps": 2}, ablations={"dose": dose})
    write_ablation(study, "dose", folder, tmp_path)
    found = rows(tmp_path / "ablations" / "dose_claims.csv")
    arms = ["naive", "dvp", *(f"{base}+dose={value}" for base in ("naive", "dvp") for value in ("0.01", "0.02"))]
    assert [row["arms"] for row in found] == arms
    assert all(row["dose"].endswith("undisturbed; disturbance.floor: 0.0, 0.01, 0.02") for row in found[:2])
    assert [row["dose"].partition("floor of ")[2] for row in found[2:]] == ["0.01", "0.02"] * 2
    page = (tmp_path / "ablations" / "dose.md").read_text()
    assert page.count("as good where the 95 % interval over seeds and problems, each value's own, lies above -5") == 1
    assert page.count("\n- naive+dose=0.0") == page.count("\n- dvp+dose=0.0") == 2


def test_a_value_as_good_within_a_margin() -> None:
    """A value is as good where all of its interval lies above the margin, worse where all of it lies below."""
    changes = {
        "start": NO_DIFFERENCE,
        "good": Difference(-0.01, -0.049, 0.03, 0.5, 3),
        "open": Difference(-0.01, -0.051, 0.03, 0.5, 3),
        "worse": Difference(-0.2, -0.3, -0.06, 0.0, 3),
        "alone": Difference(0.2, math.nan, math.nan, math.nan, 1),
    }
    points = [
        Point("start", arm, f"value {arm}", NONE, NO_DIFFERENCE, change, 0.5, NONE, NONE, NONE, NONE, NONE, 3, 0)
        for arm, change in changes.items()
    ]
    found = as_good("it", points, [Scope("", "", "")] * len(points), 0.05)
    assert [(own.arms, own.verdict) for own in found] == [
        ("good", "reproduced"), ("open", "not decided"), ("worse", "contradicted"),
    ]  # fmt: skip
    assert {own.id for own in found} == {"ablation.it.as_good"}
    assert found[2].seen == "value worse minus value start: -20.0 [-30.0, -6.0] points"
    assert all(math.isnan(own.p) and math.isnan(own.p_holm) for own in found), "an interval decides"

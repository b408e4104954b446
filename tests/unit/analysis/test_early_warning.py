"""Early warnings: runs that are made to announce their collapse, thresholds judged on runs that did not choose them."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from artifacts_fixture import record_of, vouch_again
from early_warning_fixture import COLLAPSE, STEPS, case, write_run, write_runs

from tailrl.analysis.early_warning import (
    ALL,
    MISMATCHED,
    Case,
    Warned,
    ahead,
    distinct,
    judge_metrics,
    read_cases,
    thresholds,
    warned,
    with_p,
)
from tailrl.config.jobs import Run
from tailrl.report.study import write_early_warning
from tailrl.runtime.errors import StudyError
from tailrl.stats.clustered import clustered_median, clustered_share
from tailrl.stats.intervals import Interval, share_interval
from tailrl.tracking.alarm import SKEW
from tailrl.tracking.metrics import K3_UNMASKED as K3
from tailrl.tracking.metrics import REWARD


def without_mismatch(one: Case) -> Case:
    return replace(one, signals={**one.signals, K3: np.zeros(STEPS)})


def test_the_results_of_a_threshold() -> None:
    cases = [
        case(1, collapses=True, rise=20, arm="a"),  # mean over 5 above 3 at step 21: 1, 1, 1, 10, 10
        case(3, collapses=True, rise=30, arm="a"),
        case(1, collapses=True, arm="b"),  # no alarm
        case(3, collapses=True, rise=39, arm="b"),  # the alarm comes at step 40: too late
        case(1, collapses=False, rise=50, arm="c"),
        case(3, collapses=False, arm="c"),
        case(0, collapses=False, rise=10, arm="c"),  # of the other half
    ]
    found = warned(cases, "k3", 3.0, False)
    assert (found.collapsed, found.warned, found.others, found.alarmed) == (4, 2, 2, 1)
    assert found.sensitivity == clustered_share([1, 1, 0, 0], ["a", "a", "b", "b"])
    assert found.false_alarms == clustered_share([1, 0], ["c", "c"])
    assert found.lead == clustered_median([COLLAPSE - 21, COLLAPSE - 31], ["a", "a"])
    assert found.skill == pytest.approx(0)
    assert math.isnan(warned(cases, "k3", 3.0, True).skill) and math.isnan(found.p)
    assert math.isnan(with_p(found, cases).p), "no run that chooses collapses"


def test_the_lead_of_a_metric_over_another() -> None:
    """Over all judged collapses; a missing alarm counts as one at the collapse."""

    def falling(one: Case, step: int) -> Case:
        return replace(one, signals={**one.signals, REWARD: np.where(np.arange(STEPS) >= step, 0.0, 1.0)})

    cases = [
        falling(case(1, collapses=True, rise=20, arm="a"), 30),  # k3 at step 21, the reward at 32: three 0 of five
        falling(case(3, collapses=True, rise=20, arm="b"), 10),  # 21 and 12: it is behind
        case(5, collapses=True, rise=30, arm="c"),  # 31, and never: the collapse
        falling(case(7, collapses=True, rise=30, arm="d"), 39),  # 31, and 41: too late
        falling(case(1, collapses=True, arm="e"), 30),  # 40, the collapse, and 32: it has no alarm
        falling(case(1, collapses=False, rise=20, arm="f"), 30),  # no collapse
        falling(case(2, collapses=True, rise=20, arm="a"), 39),  # of the other half
    ]
    k3, reward = (warned(cases, name, factor, False) for name, factor in (("k3", 3.0), ("falling reward", 0.5)))
    steps = [32 - 21, 12 - 21, COLLAPSE - 31, COLLAPSE - 31, 32 - COLLAPSE]
    assert ahead(k3, reward, cases) == clustered_median(steps, ["a", "b", "c", "d", "e"])
    assert ahead(k3, k3, cases).mean == 0
    assert ahead(k3, reward, []).n == 0


def test_alarms_of_collapsing_arms_alone_are_significant() -> None:
    """Eight arms with a seed in each half: one permutation in 70 keeps all alarms with collapsing arms."""
    cases = [
        case(seed, collapses=arm < "e", rise=20 if arm < "e" else None, arm=arm)
        for arm in "abcdefgh"
        for seed in (1, 2)
    ]
    found = warned(cases, "k3", 3.0, False)
    assert with_p(found, cases).p == pytest.approx(2 / 70, abs=0.01)
    # p belongs to the chosen threshold, even if another threshold of the metric is given.
    assert with_p(replace(found, factor=10.0), cases).p == with_p(found, cases).p
    # Arms with other planned steps are not exchanged, nor are arms of other studies.
    assert with_p(found, [replace(one, steps=STEPS + (one.arm < "e")) for one in cases]).p == 1
    assert with_p(found, [replace(one, study=str(one.arm < "e")) for one in cases]).p == 1
    # An arm in two studies moves in both at once, and is exchanged with arms that both studies have.
    twice = [*cases, *(replace(one, study="t") for one in cases)]
    assert with_p(found, twice).p == with_p(found, cases).p
    assert with_p(found, [replace(one, settings=one.study + one.arm) for one in twice]).p < 2 / 1000
    assert math.isnan(with_p(warned(cases, "skew of C(r)", 3.0, False), cases).p), "no threshold has skill"
    assert math.isnan(with_p(warned(cases[:8], "k3", 3.0, False), cases[:8]).p), "all collapse"


def test_an_arm_of_two_studies_is_one() -> None:
    cases = [replace(case(seed, collapses=seed < 6), study=study) for study in "st" for seed in (1, 3, 5, 7)]
    assert warned(cases, "k3", 3.0, False).sensitivity.n == 1
    apart = [replace(one, settings=one.study) for one in cases]
    assert warned(apart, "k3", 3.0, False).sensitivity.n == 2


def test_runs_without_a_mismatch_are_counted_separately() -> None:
    """A k3 of 0 at every step is no mismatch, nor are NaN and infinities."""
    cases = [case(seed, collapses=seed < 5, rise=20 if seed < 5 else None) for seed in (1, 3, 5, 7)]
    cases[0], cases[3] = without_mismatch(cases[0]), without_mismatch(cases[3])
    cases[3].signals[K3][:2] = math.nan, math.inf
    assert [one.mismatched for one in cases] == [False, True, True, False]
    every, some = (warned(cases, "k3", 3.0, False, runs) for runs in (ALL, MISMATCHED))
    assert (every.runs, every.collapsed, every.warned, every.others) == ("all", 2, 1, 2)
    assert (some.runs, some.collapsed, some.warned, some.others) == ("with a mismatch", 1, 1, 1)


def all_of(cases: list[Case]) -> list[Warned]:
    """Every threshold of every metric on both halves."""
    return [warned(cases, name, factor, chooses) for name, factor in thresholds() for chooses in (True, False)]


def test_a_threshold_is_chosen_without_the_runs_that_judge_it() -> None:
    """k3 announces collapses in both halves, the entropy only in the half that chooses."""
    cases = [case(seed, collapses=seed % 4 < 2, rise=20 if seed % 4 < 2 else None) for seed in range(16)]
    for index, one in enumerate(cases):
        if one.chooses and one.collapse is not None:
            falling = np.where(np.arange(STEPS) >= 15, 0.01, 1.0)
            cases[index] = replace(one, signals={**one.signals, "policy/entropy": falling})
    judged = {one.metric: one for one in judge_metrics(all_of(cases))}
    assert list(judged) == ["k3", "falling entropy"]  # as good where thresholds are chosen: in the metrics' order
    assert judged["k3"].skill == 1 and judged["falling entropy"].skill == 0
    assert {one.half for one in judged.values()} == {"judged on"}
    silent = dict.fromkeys(cases[0].signals, np.ones(STEPS))
    other = [one if one.chooses else replace(one, signals=silent) for one in cases]
    assert [(one.metric, one.factor) for one in judge_metrics(all_of(other))] == [
        (one.metric, one.factor) for one in judged.values()
    ]


def test_skill_chooses_and_ties_go_to_the_farther_threshold() -> None:
    def one(metric: str, factor: float, warned: int) -> Warned:
        shares = share_interval(warned, 6), share_interval(1, 6)
        return Warned(
            metric, "", factor, "chosen on", ALL, 6, warned, shares[0], 6, 1, shares[1], Interval(10, 0, 9, 3)
        )

    made = [one("k3", 2.0, 3), one("k3", 5.0, 3), one("k3", 10.0, 2), one("falling reward", 0.5, 4)]
    made += [one("falling entropy", 0.5, 3), one("falling entropy", 0.8, 3)]
    judged = judge_metrics([*made, *(replace(other, half="judged on") for other in made)])
    assert [(other.metric, other.factor) for other in judged] == [
        *(("falling reward", 0.5), ("k3", 5.0), ("falling entropy", 0.5))
    ]
    assert judge_metrics([replace(made[0], false_alarms=Interval(math.nan, math.nan, math.nan, 0))]) == []
    useless = [replace(other, false_alarms=other.sensitivity) for other in made]
    assert judge_metrics([*useless, *(replace(other, half="judged on") for other in made)]) == [], "no skill to judge"


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return write_runs(tmp_path / "results" / "made")


def test_a_run_that_a_rule_ended_is_left_out(study: Path) -> None:
    """Whether it would have collapsed is unknown."""
    write_run(study, "ended", 200, collapses=False, stopped="step 31: reward/mean is below 0.5 times its start")
    assert {one.arm for one in read_cases(study)} == {"falls", "stays"}


def test_the_settings_that_make_an_arm(study: Path) -> None:
    """Not among them: its name, study, seed and steps."""
    first, *others = read_cases(study)
    assert {one.settings for one in others if one.arm == first.arm} == {first.settings}
    assert {one.settings for one in others if one.arm != first.arm}.isdisjoint({first.settings})
    job = study / "train" / "other" / "seed200"
    shutil.copytree(study / "train" / first.arm / "seed200", job)
    with (job / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"train/step": first.steps}) + "\n")
    run = Run.model_validate(json.loads((job / "run.json").read_text())["settings"])
    longer = run.training.model_copy(update={"steps": first.steps + 1})
    record = record_of(run.model_copy(update={"study": "another", "arm": "other", "training": longer}), 200)
    (job / "run.json").write_text(record.model_dump_json(), encoding="utf-8")
    vouch_again(job / "run.json", steps=first.steps + 1)
    assert {one.settings for one in read_cases(study) if one.arm == "other"} == {first.settings}


def test_runs_are_read_unchanged(study: Path) -> None:
    cases = read_cases(study)
    assert [c.seed for c in cases if c.chooses and c.arm == "falls"] == [200, 202, 204, 206]
    # The mean over 6 steps is below half of 0.8 from the fourth zero on.
    assert {(c.arm, c.collapse) for c in cases} == {("falls", 38), ("stays", None)}
    assert np.isnan(cases[0].signals["train/grad_norm"]).all() and np.isnan(cases[0].signals["policy/entropy"]).all()
    np.testing.assert_allclose(cases[0].signals[SKEW][[0, 1, 3]], [0.05, 0.0, 0.1])


def test_a_run_counts_once_however_many_studies_have_it(study: Path) -> None:
    """Another arm with the same training is the same run; another seed is always another run."""
    write_run(study, "again", 200, collapses=True)
    cases = read_cases(study)
    assert (len(cases), len(distinct([*cases, *cases]))) == (17, 16)
    assert {(c.arm, c.seed) for c in cases} - {(c.arm, c.seed) for c in distinct(cases)} == {("falls", 200)}
    lasting = replace(cases[0], seed=201)
    assert distinct([cases[0], lasting]) == [cases[0], lasting]
    begun = replace(cases[0], steps=30, signals={key: values[:30] for key, values in cases[0].signals.items()})
    assert distinct([begun, cases[0]]) == [cases[0]], "the same run, planned shorter"
    other = replace(begun, signals={**begun.signals, "reward/mean": begun.signals["reward/mean"] + 1})
    assert distinct([other, cases[0]]) == [other, cases[0]]
    normed = replace(begun, signals={**begun.signals, "train/grad_norm": np.ones(30)})
    assert distinct([normed, cases[0]]) == [normed, cases[0]]


def test_of_two_records_of_a_training_the_one_that_measures_the_mismatch_first_is_kept(study: Path) -> None:
    """Bypass measures k3 after the updates of a step: with the exact engine, they alone cause it."""
    write_run(study, "bypass", 300, collapses=False, mismatch=0.1, ratio="bypass")
    write_run(study, "recompute", 300, collapses=False, mismatch=0.0, ratio="recompute")
    after, before = (one for one in read_cases(study) if one.seed == 300)
    assert (after.arm, after.scored_first, before.scored_first) == ("bypass", False, True)
    assert distinct([after, before]) == distinct([before, after]) == [before]
    other = replace(after, arm="copy")
    assert distinct([after, other]) == [after] and distinct([other, after]) == [other], "else the first"
    begun = replace(before, signals={key: values[:30] for key, values in before.signals.items()})
    assert distinct([begun, after]) == [after], "else the longest"


def test_an_unusable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"nothing: holds no finished run, train/<arm>/seed<seed>/run.json"):
        write_early_warning([tmp_path / "nothing"], tmp_path / "out")
    write_run(tmp_path / "x", "a", 0, collapses=False)
    record = tmp_path / "x" / "train" / "a" / "seed0" / "run.json"
    record.write_text("{}")
    vouch_again(record)
    with pytest.raises(StudyError, match=r"run.json: settings is missing"):
        read_cases(tmp_path / "x")

"""Early warnings: runs that are made to announce their collapse, thresholds judged on runs that did not choose them."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from tailrl.alarm import SKEW
from tailrl.errors import StudyError
from tailrl.report import write_early_warning
from tailrl.report.early_warning import METRICS, Case, Warned, distinct, judge_metrics, read_cases, warned
from tailrl.report.early_warning_report import _verdicts
from tailrl.report.evidence import OPEN, answers, read_shown
from tailrl.report.findings import CONTRADICTED, REPRODUCED, UNDECIDED, UNTESTABLE
from tailrl.report.statements import STATEMENTS
from tailrl.report.statistics import Interval, share_interval

K3 = "rollout_corr_unmasked/k3_kl"
STEPS, COLLAPSE = 60, 40


def case(seed: int, *, collapses: bool, rise: int | None = None, size: float = 10.0, entropy: float = 1.0) -> Case:
    """A run whose k3 rises to `size` times its level at a step, and whose other signals stay as they are."""
    signals = {key: np.ones(STEPS) for key, _ in METRICS.values()}
    signals["policy/entropy"] = np.full(STEPS, entropy)
    if rise is not None:
        signals[K3] = np.where(np.arange(STEPS) >= rise, size, 1.0)
    return Case("s", "a", seed, seed % 2 == 0, STEPS, COLLAPSE if collapses else None, math.nan, signals)


def test_what_a_threshold_does() -> None:
    cases = [
        case(1, collapses=True, rise=20),  # mean over 5 above 3 at step 21: 1, 1, 1, 10, 10
        case(3, collapses=True, rise=30),
        case(5, collapses=True),  # no alarm
        case(7, collapses=True, rise=39),  # the alarm comes at step 40: too late
        case(9, collapses=False, rise=50),
        case(11, collapses=False),
        case(0, collapses=False, rise=10),  # of the other half
    ]
    found = warned(cases, "k3", 3.0, False)
    assert (found.collapsed, found.warned, found.others, found.alarmed) == (4, 2, 2, 1)
    assert (found.sensitivity, found.false_alarms) == (share_interval(2, 4), share_interval(1, 2))
    assert found.lead.mean == np.median([COLLAPSE - 21, COLLAPSE - 31])
    assert found.p == pytest.approx(stats.hypergeom.sf(1, 6, 3, 4))  # Fisher's, from the hypergeometric
    assert found.skill == pytest.approx(0)
    assert math.isnan(warned(cases, "k3", 3.0, True).skill)


def all_of(cases: list[Case]) -> list[Warned]:
    """Every threshold of every metric on both halves."""
    tried = [(name, factor) for name, (_, factors) in METRICS.items() for factor in factors]
    return [warned(cases, name, factor, chooses) for name, factor in tried for chooses in (True, False)]


def test_a_threshold_is_chosen_without_the_runs_that_judge_it() -> None:
    """k3 announces collapses in both halves, the entropy in the one that chooses alone."""
    cases = [case(seed, collapses=seed % 4 < 2, rise=20 if seed % 4 < 2 else None) for seed in range(16)]
    for index, one in enumerate(cases):
        if one.chooses and one.collapse is not None:
            falling = np.where(np.arange(STEPS) >= 15, 0.01, 1.0)
            cases[index] = replace(one, signals={**one.signals, "policy/entropy": falling})
    judged = {one.metric: one for one in judge_metrics(all_of(cases))}
    assert next(iter(judged)) == "falling entropy"  # by the half that chooses: as good, and earlier
    assert judged["k3"].skill == 1 and judged["falling entropy"].skill == 0
    assert {one.half for one in judged.values()} == {"judged on"}
    silent = dict.fromkeys(cases[0].signals, np.ones(STEPS))
    other = [one if one.chooses else replace(one, signals=silent) for one in cases]
    assert [(one.metric, one.factor) for one in judge_metrics(all_of(other))] == [
        (one.metric, one.factor) for one in judged.values()
    ]


def test_ties_go_to_the_longer_lead_and_then_to_the_farther_threshold() -> None:
    def one(metric: str, factor: float, lead: float) -> Warned:
        share = Interval(0.5, 0.2, 0.8, 6)
        return Warned(
            metric, "", factor, "chosen on", 6, 3, share, 6, 1, share_interval(1, 6), Interval(lead, 0, 9, 3), 0.1
        )

    made = [one("k3", 2.0, 10), one("k3", 5.0, 10), one("k3", 3.0, 5), one("skew of C(r)", 2.0, 30)]
    judged = judge_metrics([*made, *(replace(other, half="judged on") for other in made)])
    assert [(other.metric, other.factor) for other in judged] == [("skew of C(r)", 2.0), ("k3", 5.0)]
    assert judge_metrics([replace(made[0], false_alarms=Interval(math.nan, math.nan, math.nan, 0))]) == []


def write_run(folder: Path, arm: str, seed: int, *, collapses: bool) -> None:
    job = folder / "train" / arm / f"seed{seed}"
    job.mkdir(parents=True)
    lines = []
    for step in range(STEPS):
        reward = 0.8 if step < 35 or not collapses else 0.0
        k3 = 1e-3 * (100 if collapses and step >= 20 else 1)
        skew = {"rollout_corr/c_positive_advantage": 0.1, "rollout_corr/c_negative_advantage": -0.05 * (step + 1)}
        lines.append(json.dumps({"train/step": step, "reward/mean": reward, K3: k3, "train/grad_norm": None, **skew}))
    (job / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (job / "run.json").write_text(json.dumps({"settings": {"training": {"steps": STEPS}}}))


@pytest.fixture
def study(tmp_path: Path) -> Path:
    folder = tmp_path / "results" / "made"
    for seed in range(200, 208):
        write_run(folder, "falls", seed, collapses=True)
        write_run(folder, "stays", seed, collapses=False)
    return folder


def test_runs_are_read_as_they_are(study: Path) -> None:
    cases = read_cases(study)
    assert [c.seed for c in cases if c.chooses and c.arm == "falls"] == [200, 202, 204, 206]
    # The mean over 6 steps is below half of 0.8 from the fourth zero on.
    assert {(c.arm, c.collapse) for c in cases} == {("falls", 38), ("stays", None)}
    assert np.isnan(cases[0].signals["train/grad_norm"]).all() and np.isnan(cases[0].signals["policy/entropy"]).all()
    np.testing.assert_allclose(cases[0].signals[SKEW][[0, 1, 3]], [0.05, 0.0, 0.1])


def test_a_run_counts_once_however_many_studies_have_it(study: Path) -> None:
    """Another arm with the same bits is the same run; another seed is another, whatever its bits."""
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


@pytest.mark.parametrize(
    ("lead", "verdict"),
    [((40.0, 31.0, 50.0), REPRODUCED), ((40.0, 29.0, 50.0), UNDECIDED), ((20.0, 10.0, 29.0), CONTRADICTED)],
)
def test_the_plateau_of_k3(lead: tuple[float, float, float], verdict: str) -> None:
    share = share_interval(5, 10)
    one = Warned("k3", K3, 2.0, "judged on", 10, 5, share, 10, 5, share, Interval(*lead, 5), 0.5)
    announces, plateau = _verdicts([], [one])
    assert (announces.verdict, plateau.verdict, plateau.seeds) == (UNDECIDED, verdict, 5)
    assert plateau.claim == "k3 leaves its level 30 to 50 steps before a collapse"
    nothing = replace(one, warned=0, lead=Interval(math.nan, math.nan, math.nan, 0))
    assert _verdicts([], [nothing])[1].verdict == UNTESTABLE


def test_how_the_runs_end_that_the_rule_would_have_ended_for_nothing(study: Path) -> None:
    """Two of four that are judged raise a false alarm: one ends above the untrained policy, one below it."""
    for seed in (201, 203):
        job = study / "train" / "stays" / f"seed{seed}" / "metrics.jsonl"
        lines = [json.loads(line) for line in job.read_text().splitlines()]
        job.write_text(
            "".join(json.dumps(line | {K3: 1.0} if line["train/step"] > 50 else line) + "\n" for line in lines)
        )
    ends = {"base": {0: [1, 0]}, "stays": {seed: [0, 0] if seed in (201, 202) else [1, 1] for seed in range(200, 208)}}
    for arm, scores in ends.items():
        policies = [{"seed": s, "per_problem": [{"id": "a", "correct": right}]} for s, right in scores.items()]
        path = study / "eval" / f"{arm}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"arm": arm, "policies": policies}))
    assert {c.seed: c.gain for c in read_cases(study) if c.arm == "stays"} == {
        seed: -0.5 if seed in (201, 202) else 0.5 for seed in range(200, 208)
    }
    assert all(math.isnan(c.gain) for c in read_cases(study) if c.arm == "falls")
    write_early_warning([study], study.parent / "out")
    text = (study.parent / "out" / "early_warning.md").read_text()
    assert "Of the 4 runs without a collapse whose policies were evaluated it would have ended 2, 1 of them" in text
    assert "below the untrained policy; of the 3 that end above it, 1." in text


def test_the_report_of_early_warnings(study: Path) -> None:
    out = study.parent / "early_warning"
    write_early_warning([study], out)
    with (out / "early_warning.csv").open(newline="") as file:
        first, *others = csv.DictReader(file)
    assert (first["metric"], first["collapsed"], first["warned"], first["others"], first["alarmed"]) == ("k3", *"4440")
    text = (out / "early_warning.md").read_text()
    assert "16 runs of made, each counted once, of which 8 collapsed" in text and "nan" not in text
    assert f"metric: {K3}, factor: 10" in text  # the farthest threshold with the same lead
    with (out / "runs.csv").open(newline="") as file:
        runs = list(csv.DictReader(file))
    assert len(runs) == 16
    for one in (first, *others):
        own = [run for run in runs if run["chooses"] == "False"]
        early = [run for run in own if run["collapse"] and run[one["metric"]]]
        assert sum(int(run[one["metric"]]) < int(run["collapse"]) for run in early) == int(one["warned"])
        assert sum(not run["collapse"] and run[one["metric"]] != "" for run in own) == int(one["alarmed"])
    assert (out / "early_warning.svg").read_text().startswith("<?xml")
    written = {path: path.read_bytes() for path in out.iterdir()}
    write_early_warning([study], out)
    assert {path: path.read_bytes() for path in out.iterdir()} == written
    shown = answers(read_shown([study.parent]))
    about = [s for s in STATEMENTS if any("announces" in name or "leaves its level" in name for name in s.by)]
    assert len(about) == 2
    for statement in about:
        assert OPEN not in {answer.verdict for answer in shown if answer.statement == statement}


def test_runs_of_one_kind_choose_no_threshold(tmp_path: Path) -> None:
    for seed in range(4):
        write_run(tmp_path / "calm", "stays", seed, collapses=False)
    write_early_warning([tmp_path / "calm"], tmp_path / "out")
    assert "No threshold can be chosen" in (tmp_path / "out" / "early_warning.md").read_text()
    assert "No run that is judged collapsed" not in (tmp_path / "out" / "early_warning.md").read_text()


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"nothing: no finished run, train/<arm>/seed<seed>/run.json"):
        write_early_warning([tmp_path / "nothing"], tmp_path / "out")
    write_run(tmp_path / "x", "a", 0, collapses=False)
    (tmp_path / "x" / "train" / "a" / "seed0" / "run.json").write_text("{}")
    with pytest.raises(StudyError, match=r"run.json: has no settings.training.steps"):
        read_cases(tmp_path / "x")

"""What is said of early warnings: verdicts, the page, and tables from which anyone can repeat the analysis."""

import csv
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from artifacts_fixture import edit, policy_of, write_scores
from early_warning_fixture import case, write_run, write_runs

from tailrl.analysis.early_warning import ALL, MISMATCHED, TRIED, Warned, read_cases
from tailrl.claims.catalogue import STATEMENTS
from tailrl.claims.early_warning import ALIKE, UNSKILLED, judge_warnings
from tailrl.claims.evidence import answers, read_shown
from tailrl.claims.finding import CONTRADICTED, OPEN, REPRODUCED, UNDECIDED, UNTESTABLE
from tailrl.config.load import parse_study
from tailrl.report.early_warning import warning_figure
from tailrl.report.study import write_early_warning
from tailrl.stats.clustered import shuffled_skill
from tailrl.stats.intervals import Interval, share_interval
from tailrl.tracking.metrics import K3_UNMASKED as K3

LEAD = Interval(20.0, 10.0, 30.0, 4)


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return write_runs(tmp_path / "results" / "made")


@pytest.mark.parametrize(
    ("lead", "verdict"),
    [((40.0, 31.0, 50.0), REPRODUCED), ((40.0, 29.0, 50.0), UNDECIDED), ((20.0, 10.0, 29.0), CONTRADICTED)],
)
def test_the_plateau_of_k3(lead: tuple[float, float, float], verdict: str) -> None:
    share = share_interval(5, 10)
    one = Warned("k3", K3, 2.0, "judged on", ALL, 10, 5, share, 10, 5, share, Interval(*lead, 3), 0.5)
    announces, plateau, *_ = judge_warnings([], [one])
    assert (announces.verdict, plateau.verdict, plateau.seeds) == (UNDECIDED, verdict, 5)
    assert plateau.id == "warning.k3.collapse.lead"
    nothing = replace(one, warned=0, lead=Interval(math.nan, math.nan, math.nan, 0))
    assert judge_warnings([], [nothing])[1].verdict == UNTESTABLE


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(1.0, 9.0, REPRODUCED), (0.0, 9.0, UNDECIDED), (math.nan, math.nan, UNDECIDED), (-9.0, -1.0, CONTRADICTED)],
)
def test_which_warns_first(low: float, high: float, verdict: str) -> None:
    """A line for each metric that is held against the falling reward, none for one that is not. A metric that is not
    told from chance cannot be shown to be first."""
    many, few = share_interval(8, 10), share_interval(2, 10)
    reward = Warned("falling reward", "reward/mean", 0.5, "judged on", ALL, 10, 8, many, 10, 2, few, LEAD, 0.0001)
    k3 = replace(reward, metric="k3", signal=K3, ahead=Interval((low + high) / 2, low, high, 3))
    for p, expected in ((0.0001, verdict), (0.5, UNDECIDED if verdict == REPRODUCED else verdict)):
        lines = [
            (line.id, line.verdict, line.seeds)
            for line in judge_warnings([], [reward, replace(k3, p=p)])
            if line.id.endswith(".before_reward")
        ]
        assert lines == [("warning.k3.before_reward", expected, 10)]
    assert [one.id for one in STATEMENTS if "warning.*.before_reward" in one.by] == ["question.7"]


def test_what_is_said_of_metrics() -> None:
    """p at most 5 %, by Holm over all ten metrics, and skill; else no metric announces."""
    many, few = share_interval(8, 10), share_interval(2, 10)
    good = Warned("falling reward", "reward/mean", 0.5, "judged on", ALL, 10, 8, many, 10, 2, few, LEAD, 0.0049)
    fair = replace(good, metric="rising entropy", p=0.005)
    backward = replace(good, metric="tokens outside", sensitivity=few, false_alarms=many, p=0.001)
    cases = [case(seed, collapses=False) for seed in range(5)]
    lines = {line.id: line for line in judge_warnings(cases, [good, fair])}
    first, second, k3, plateau = (
        lines[name]
        for name in (
            "warning.falling_reward.collapse",
            "warning.rising_entropy.collapse",
            "warning.k3.collapse",
            "warning.k3.collapse.lead",
        )
    )
    assert [(line.verdict, line.p, line.p_holm) for line in (first, second)] == [
        (REPRODUCED, 0.0049, pytest.approx(0.049)),
        (REPRODUCED, 0.005, pytest.approx(0.049)),
    ]
    assert judge_warnings(cases, [replace(good, p=0.0051)])[0].verdict == UNDECIDED
    assert judge_warnings(cases, [backward])[0].verdict == UNDECIDED
    assert len(lines) == len(TRIED) + 1
    assert {line.verdict for line in lines.values() if line not in (first, second)} == {UNTESTABLE}
    assert k3.seen == plateau.seen == f"k3: {ALIKE}", "no run of these collapses"
    assert math.isnan(k3.p) and math.isnan(k3.p_holm) and (k3.arms, k3.seeds) == ("s", 2)


def test_how_the_runs_end_that_the_rule_would_have_ended_for_nothing(study: Path) -> None:
    """Two of four that are judged raise a false alarm: one ends above the untrained policy, one below it."""
    for seed in (201, 203):
        job = study / "train" / "stays" / f"seed{seed}" / "metrics.jsonl"
        edit(job, lambda line: line.update({K3: 1.0}) if line["train/step"] > 50 else None)
    ends = {"base": {0: [1, 0]}, "stays": {seed: [0, 0] if seed in (201, 202) else [1, 1] for seed in range(200, 208)}}
    for arm, scores in ends.items():
        settings = parse_study({"name": "s", "arms": {"stays": {}}, "evaluation": {"samples": 2}})
        write_scores(study, settings, arm, [policy_of(seed, [right]) for seed, right in scores.items()])
    assert {c.seed: c.gain for c in read_cases(study) if c.arm == "stays"} == {
        seed: -0.5 if seed in (201, 202) else 0.5 for seed in range(200, 208)
    }
    assert all(math.isnan(c.gain) for c in read_cases(study) if c.arm == "falls")
    write_early_warning([study], study.parent / "out")
    text = (study.parent / "out" / "early_warning.md").read_text()
    assert "Of the 4 evaluated runs without a collapse, this rule would have ended 2; 1 of these ended below" in text
    assert "Of the 3 that did not end below it, the rule would have ended 1." in text


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def steps_of(runs: list[dict[str, str]], column: str) -> list[float]:
    return [float(run[column] or "inf") for run in runs]


def again(runs: list[dict[str, str]], line: dict[str, str], half: str) -> list[int]:
    """The counts of a line of early_warning.csv, from runs.csv alone."""
    own = [run for run in runs if run["chooses"] == half and (line["runs"] == ALL or run["mismatch"] == "True")]
    alarms, collapses = steps_of(own, f"{line['metric']} {line['factor']}"), steps_of(own, "collapse")
    pairs = list(zip(alarms, collapses, strict=True))
    return [
        sum(math.isfinite(collapse) for collapse in collapses),
        sum(alarm < collapse < math.inf for alarm, collapse in pairs),
        sum(collapse == math.inf for collapse in collapses),
        sum(alarm < collapse == math.inf for alarm, collapse in pairs),
    ]


def p_again(runs: list[dict[str, str]], metric: str) -> float:
    """The p of a metric, likewise."""
    return 2 * shuffled_skill(
        [steps_of(runs, f"{metric} {factor:g}") for factor in reversed(TRIED[metric][1])],
        steps_of(runs, "collapse"),
        [run["chooses"] == "True" for run in runs],
        [run["settings"] for run in runs],
        [(run["study"], run["steps"], run["seed"]) for run in runs],
    )


def test_the_report_of_early_warnings(study: Path) -> None:
    """k3 and the reward announce collapses; the skew rises in every run; the others were not recorded."""
    for seed in range(200, 206):
        write_run(study, "matched", seed, collapses=False, mismatch=0.0, height=0.7)
    out = study.parent / "early_warning"
    write_early_warning([study], out)
    table, runs = read(out / "early_warning.csv"), read(out / "runs.csv")
    counts = ("collapsed", "warned", "others", "alarmed")
    assert [[line[key] for key in ("metric", "runs", *counts)] for line in table] == [
        ["k3", ALL, *"4470"],
        ["falling reward", ALL, *"4470"],
        ["k3", MISMATCHED, *"4440"],
        ["falling reward", MISMATCHED, *"4440"],
    ]
    assert len(runs) == 22
    assert list(runs[0])[:10] == [
        *("study", "arm", "seed", "settings", "chooses", "steps", "collapse", "gain", "mismatch"),
        "k3 1.25",
    ]
    for line in table:
        assert again(runs, line, "False") == [int(line[key]) for key in counts]
        p = min(1.0, p_again(runs, line["metric"]))
        assert (float(line["p"]) == pytest.approx(p)) if line["runs"] == ALL else line["p"] == ""
    judged = [run for run in runs if run["chooses"] == "False" and run["collapse"]]
    own, reward, end = (
        steps_of(judged, name) for name in ("k3 30", f"falling reward {table[1]['factor']}", "collapse")
    )
    ahead = [min(other, last) - min(first, last) for first, other, last in zip(own, reward, end, strict=True)]
    assert float(table[0]["ahead_mean"]) == statistics.median(ahead) > 0 and table[1]["ahead_mean"] == ""
    for line in read(out / "thresholds.csv"):
        assert again(runs, line, str(line["half"] == "chosen on")) == [int(line[key]) for key in counts]
    text = (out / "early_warning.md").read_text()
    assert "22 runs of made, each counted once, of which 8 collapsed" in text and "nan" not in text
    assert f"metric: {K3}, factor: 30" in text  # the farthest threshold with the same skill
    assert text.count(UNSKILLED) == len(TRIED) - 2 and f"| skew of C(r) | {UNSKILLED} |" in text
    assert "the 8 judged runs with a mismatch" in text
    assert (out / "early_warning.svg").read_text().startswith("<?xml")
    written = {path: path.read_bytes() for path in out.iterdir()}
    write_early_warning([study], out)
    assert {path: path.read_bytes() for path in out.iterdir()} == written
    shown = answers(read_shown([study.parent]))
    about = [s for s in STATEMENTS if any(".collapse" in name and name.startswith("warning.") for name in s.by)]
    assert len(about) == 2 and "ahead_mean" not in read(out / "thresholds.csv")[0]
    for statement in about:
        assert OPEN not in {answer.verdict for answer in shown if answer.statement == statement}


def test_runs_of_one_kind_choose_no_threshold(tmp_path: Path) -> None:
    for seed in range(4):
        write_run(tmp_path / "calm", "stays", seed, collapses=False)
    write_early_warning([tmp_path / "calm"], tmp_path / "out")
    text = (tmp_path / "out" / "early_warning.md").read_text()
    assert f"No threshold can be chosen: {ALIKE}." in text
    lines = read(tmp_path / "out" / "claims.csv")
    assert {(line["verdict"], line["seen"].partition(": ")[2]) for line in lines} == {(UNTESTABLE, ALIKE)}
    assert {text.get_text() for ax in warning_figure([]).axes for text in ax.texts} == {"No threshold was chosen."}

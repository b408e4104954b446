"""Which metric announces a collapse, how long before, and how often falsely: over the runs of one or more studies.

A threshold is a multiple of a run's own level (`tailrl.alarm`). It is chosen on half of the seeds and judged on the
other half, metric by metric, so that no threshold is judged on the runs that chose it.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy import stats

from tailrl.alarm import SKEW, SKEWED, alarm_step, start_steps
from tailrl.errors import StudyError
from tailrl.report.axes import ARM_COLOURS, GREY, make_panels, save_svg, say_nothing_to_show, set_percent_axis, style
from tailrl.report.data import FloatArray, read_evaluation, read_metrics, read_text
from tailrl.report.findings import REPRODUCED, UNDECIDED, UNTESTABLE
from tailrl.report.statistics import Interval, collapse_step, holm, median_interval, share_interval
from tailrl.report.summary import count, p_value, percent, table
from tailrl.report.survival import FEWEST, REWARD, WINDOW
from tailrl.report.tables import flat_rows, write_csv
from tailrl.report.verdicts import LEVEL, Verdict
from tailrl.study import BASE_ARM

RISES, FALLS = (1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0), (0.8, 0.67, 0.5, 0.33, 0.2, 0.1, 0.03, 0.01)
"""Multiples of a run's own level that are tried as thresholds."""

METRICS = {
    "k3": ("rollout_corr_unmasked/k3_kl", RISES),
    "masked k3": ("rollout_corr/k3_kl", RISES),
    "effective sample size": ("rollout_corr_raw/rollout_is_eff_sample_size", FALLS),
    "smallest weight": ("rollout_corr_raw/rollout_is_min", FALLS),
    "skew of C(r)": (SKEW, RISES),
    "gradient norm": ("train/grad_norm", RISES),
    "rising entropy": ("policy/entropy", RISES),
    "falling entropy": ("policy/entropy", FALLS),
    "tokens outside": ("dvp/sampled_outside_train_support_fraction", RISES),
}
"""The metrics that are tried, each with its signal and its thresholds, in this order where they tie."""

WARNED, ALARMED = ARM_COLOURS[:2]


@dataclass(frozen=True, slots=True)
class Case:
    """One run: whether the threshold is chosen on it or judged, and its collapse, a step from 0 (None: none).

    gain is its policy's avg@k less that of the untrained one; NaN where they have not been evaluated.
    """

    study: str
    arm: str
    seed: int
    chooses: bool
    steps: int
    collapse: int | None
    gain: float
    signals: dict[str, FloatArray]


@dataclass(frozen=True, slots=True)
class Warned:
    """What one threshold of one metric does on some runs.

    Attributes:
        metric, signal, factor: the alarm is where the signal's mean is beyond so many times the run's own level.
        half: `chosen on`, or `judged on`.
        collapsed, warned: runs that collapsed, and those of them with an alarm before; sensitivity is their share.
        others, alarmed: runs that did not, and those with an alarm; false_alarms is their share.
        lead: median steps from the alarm to the collapse, with its interval.
        p: one-sided, by Fisher's test, that an alarm is as likely in a run that does not collapse.
    """

    metric: str
    signal: str
    factor: float
    half: str
    collapsed: int
    warned: int
    sensitivity: Interval
    others: int
    alarmed: int
    false_alarms: Interval
    lead: Interval
    p: float

    @property
    def skill(self) -> float:
        """Youden's index: sensitivity less false alarms; NaN where one of them has no runs."""
        return self.sensitivity.mean - self.false_alarms.mean


def write_early_warning(studies: Sequence[Path], out: Path) -> None:
    """Writes out/early_warning.csv, thresholds.csv, runs.csv, claims.csv, early_warning.md and early_warning.svg.

    Args:
        studies: results folders, each with train/<arm>/seed<seed>/ in it.
        out: where the report goes; the same inputs give the same bytes.

    Raises:
        StudyError: there is no finished run, or its metrics cannot be read.
    """
    cases = [case for folder in studies for case in read_cases(folder)]
    if not cases:
        raise StudyError(f"{', '.join(map(str, studies))}: no finished run, train/<arm>/seed<seed>/run.json")
    every = [warned(cases, name, factor, chooses) for name, factor in _thresholds() for chooses in (True, False)]
    judged = judge_metrics(every)
    write_csv(out / "thresholds.csv", flat_rows(every))
    write_csv(out / "early_warning.csv", flat_rows(judged))
    write_csv(out / "runs.csv", [_row(case, judged) for case in cases])
    write_csv(out / "claims.csv", flat_rows(_verdicts(cases, judged)))
    save_svg(warning_figure(judged), out / "early_warning.svg")
    (out / "early_warning.md").write_text(_page(cases, judged), encoding="utf-8")


def read_cases(folder: Path) -> list[Case]:
    """The finished runs of one study; seeds at even places of their order choose, the others are judged."""
    jobs = sorted(path.parent for path in folder.glob("train/*/seed*/run.json"))
    seeds = sorted({int(job.name.removeprefix("seed")) for job in jobs})
    gains = {arm: _gains(folder / "eval", arm) for arm in {job.parent.name for job in jobs}}
    return [_case(folder, job, seeds, gains[job.parent.name]) for job in jobs]


def _gains(folder: Path, arm: str) -> dict[int, float]:
    """What each seed of an arm gains over the untrained policy, as far as they have been evaluated."""
    paths = [folder / f"{name}.json" for name in (BASE_ARM, arm)]
    if not all(path.exists() for path in paths):
        return {}
    base, own = (read_evaluation(path).scores for path in paths)
    return {score.seed: score.avg_at_k - base[0].avg_at_k for score in own}


def _case(folder: Path, job: Path, seeds: Sequence[int], gains: Mapping[int, float]) -> Case:
    metrics = read_metrics(job / "metrics.jsonl")
    try:
        settings = json.loads(read_text(job / "run.json"))["settings"]
        planned = int(settings["training"]["steps"])
    except (ValueError, KeyError, TypeError):
        raise StudyError(f"{job / 'run.json'}: has no settings.training.steps") from None
    length = len(metrics["train/step"])
    reward_N = metrics.get(REWARD, np.full(length, math.nan))
    known = ~np.isnan(reward_N)
    window = max(FEWEST, math.ceil(WINDOW * int(known.sum())))
    index = collapse_step(reward_N[known], window)
    seed = int(job.name.removeprefix("seed"))
    keys = {key for key, _ in METRICS.values()}
    return Case(
        folder.name,
        job.parent.name,
        seed,
        seeds.index(seed) % 2 == 0,
        planned,
        None if index is None else int(np.flatnonzero(known)[index]),
        gains.get(seed, math.nan),
        {key: _signal(metrics, key, length) for key in keys},
    )


def _signal(metrics: dict[str, FloatArray], key: str, length: int) -> FloatArray:
    """The signal at every step; what `tailrl.alarm.signal` takes from one step."""
    absent = np.full(length, math.nan)
    if key == SKEW:
        return np.asarray(np.abs(np.sum([metrics.get(part, absent) for part in SKEWED], axis=0)), dtype=np.float64)
    return np.asarray(np.abs(metrics.get(key, absent)), dtype=np.float64)


def _thresholds() -> list[tuple[str, float]]:
    return [(name, factor) for name, (_, factors) in METRICS.items() for factor in factors]


def _alarm(case: Case, key: str, factor: float) -> int | None:
    return alarm_step(case.signals[key], factor, start_steps(case.steps))


def _row(case: Case, judged: Sequence[Warned]) -> dict[str, Any]:
    """A run, and the step at which each metric raises its alarm, if it does."""
    names = ("study", "arm", "seed", "chooses", "steps", "collapse", "gain")
    alarms = {one.metric: _alarm(case, one.signal, one.factor) for one in judged}
    return {name: getattr(case, name) for name in names} | alarms


def warned(cases: Iterable[Case], metric: str, factor: float, chooses: bool) -> Warned:
    """One threshold on one half of the runs."""
    key = METRICS[metric][0]
    own = [case for case in cases if case.chooses == chooses]
    alarms = [_alarm(case, key, factor) for case in own]
    pairs = list(zip(own, alarms, strict=True))
    leads = [
        case.collapse - alarm
        for case, alarm in pairs
        if case.collapse is not None and alarm is not None and alarm < case.collapse
    ]
    collapsed = sum(case.collapse is not None for case in own)
    false = sum(case.collapse is None and alarm is not None for case, alarm in pairs)
    others = len(own) - collapsed
    counts = [[len(leads), collapsed - len(leads)], [false, others - false]]
    p = float(stats.fisher_exact(counts, alternative="greater").pvalue) if collapsed and others else math.nan
    shares = [share_interval(k, n) if n else Interval(math.nan, math.nan, math.nan, 0) for k, n in (
        (len(leads), collapsed), (false, others)
    )]  # fmt: skip
    half = "chosen on" if chooses else "judged on"
    return Warned(
        metric, key, factor, half, collapsed, len(leads), shares[0], others, false, shares[1], median_interval(leads), p
    )


def judge_metrics(every: Sequence[Warned]) -> list[Warned]:
    """Each metric at the threshold with most skill where it was chosen, judged; the best one there comes first.

    Ties go to the longer lead, then to the threshold that is farther from a run's own level. None where the runs that
    choose lack one of the kinds.
    """

    def rank(one: Warned) -> tuple[float, float, float]:
        lead = -1.0 if math.isnan(one.lead.mean) else one.lead.mean
        return one.skill, lead, abs(math.log(one.factor))

    chosen = []
    for metric in METRICS:
        own = [one for one in every if one.metric == metric and one.half == "chosen on" and not math.isnan(one.skill)]
        chosen += [max(own, key=rank)] if own else []
    chosen.sort(key=rank, reverse=True)
    judged = {(one.metric, one.factor): one for one in every if one.half == "judged on"}
    return [judged[one.metric, one.factor] for one in chosen]


# --- what is shown ------------------------------------------------------------------------------------


def warning_figure(judged: Sequence[Warned]) -> Figure:
    """Sensitivity and false alarms of each metric, and its lead; the best one on the other half of the runs on top."""
    with style():
        figure, (shares, leads) = make_panels(1, 2, 1.0 + 0.3 * max(1, len(judged)))
        if not any(one.collapsed for one in judged):
            for ax in (shares, leads):
                say_nothing_to_show(ax, "No run that is judged collapsed.")
            return figure
        for place, one in enumerate(judged):
            for interval, colour, shift in ((one.sensitivity, WARNED, -0.13), (one.false_alarms, ALARMED, 0.13)):
                shares.hlines(place + shift, interval.low, interval.high, color=colour, linewidth=1)
                shares.plot(interval.mean, place + shift, "o", markersize=4, color=colour)
            if not math.isnan(one.lead.mean):
                leads.hlines(place, one.lead.low, one.lead.high, color=GREY, linewidth=1)
                leads.plot(one.lead.mean, place, "D", markersize=4, color="black")
        words = [f"{one.metric} {'>' if one.factor > 1 else '<'} {one.factor:g} ×" for one in judged]
        shares.set_yticks(range(len(judged)), words)
        leads.set_yticks(range(len(judged)), [""] * len(judged))
        for ax in (shares, leads):
            ax.set_ylim(len(judged) - 0.5, -0.5)
        shares.set_xlim(-0.03, 1.03)
        set_percent_axis(shares)
        shares.set_xlabel("share of runs")
        marks = [Line2D([], [], color=colour, marker="o", markersize=4, linewidth=1) for colour in (WARNED, ALARMED)]
        figure.legend(marks, ["warned before a collapse", "alarmed without one"], loc="outside upper center", ncols=2)
        leads.set_xlabel("median lead (steps)")
        return figure


def _page(cases: Sequence[Case], judged: Sequence[Warned]) -> str:
    studies = ", ".join(dict.fromkeys(case.study for case in cases))
    collapsed = sum(case.collapse is not None for case in cases)
    introduction = (
        f"{count(len(cases), 'run')} of {studies}, of which {collapsed} collapsed. An alarm is raised at the first "
        "step at which a metric's mean over the last 5 steps is beyond so many times the run's own level, its mean "
        "over the first tenth of the steps. Each metric's threshold is the one with most skill (warned before a "
        "collapse, less alarmed without one) on half of the seeds; what is shown is of the other half. Shares have "
        "Wilson's intervals, the median lead that of order statistics; p is Fisher's, one-sided, by Holm over the "
        "metrics."
    )
    if not judged:
        return (
            f"# Early warning\n\n{introduction}\n\nNo threshold can be chosen: the runs of that half are all alike.\n"
        )
    p_holm = holm([one.p for one in judged]).tolist()
    rows = []
    for one, p in zip(judged, p_holm, strict=True):
        beyond = f"{'above' if one.factor > 1 else 'below'} {one.factor:g} times"
        warned_, false = (f"{k} of {n}, {percent(share)}" if n else "" for k, n, share in _counts(one))
        rows.append([one.metric, beyond, warned_, false, _steps(one.lead), p_value(p)])
    header = ("metric", "threshold", "warned before a collapse", "alarmed without one", "median lead, steps", "p, Holm")
    best = judged[0]
    rule = f"`training: {{stop_when: {{metric: {best.signal}, factor: {best.factor:g}}}}}`"
    last = (
        f"The first line had most skill where thresholds were chosen; as a rule that ends a run at its alarm: {rule}."
    )
    last += _ended(cases, best)
    return "\n\n".join(["# Early warning", introduction, table(header, rows), last]) + "\n"


def _ended(cases: Sequence[Case], rule: Warned) -> str:
    """How the runs end that the rule would have ended for nothing, as a sentence."""
    kept = [case for case in cases if not case.chooses and case.collapse is None and not math.isnan(case.gain)]
    if not kept:
        return ""
    better = [case for case in kept if case.gain >= 0]
    false, lost = (sum(_alarm(case, rule.signal, rule.factor) is not None for case in own) for own in (kept, better))
    return (
        f" Of the {count(len(kept), 'run')} without a collapse whose policies were evaluated it would have ended "
        f"{false}, {false - lost} of them in the end below the untrained policy; of the {len(better)} that end above "
        f"it, {lost}."
    )


def _counts(one: Warned) -> tuple[tuple[int, int, Interval], tuple[int, int, Interval]]:
    return (one.warned, one.collapsed, one.sensitivity), (one.alarmed, one.others, one.false_alarms)


def _steps(lead: Interval) -> str:
    if math.isnan(lead.mean):
        return ""
    return f"{lead.mean:g}" + ("" if math.isnan(lead.low) else f" [{lead.low:g}, {lead.high:g}]")


def _verdicts(cases: Sequence[Case], judged: Sequence[Warned]) -> list[Verdict]:
    studies = ", ".join(dict.fromkeys(case.study for case in cases))
    found = []
    for one, p in zip(judged, holm([one.p for one in judged]).tolist(), strict=True):
        lead = f", median lead {_steps(one.lead)} steps" if one.warned else ""
        true, false = f"{one.warned} of {one.collapsed} collapses", f"{one.alarmed} of {one.others} runs"
        seen = f"{one.metric}: before {true}{lead}; falsely in {false}"
        found.append(
            Verdict(
                claim=f"{one.metric} announces a collapse",
                source="arXiv 2605.14220; open question",
                verdict=UNTESTABLE if math.isnan(p) else REPRODUCED if p <= LEVEL else UNDECIDED,
                policy="",
                task="",
                dose=f"{'above' if one.factor > 1 else 'below'} {one.factor:g} times its start",
                arms=studies,
                seeds=one.collapsed + one.others,
                effect=one.lead.mean,
                low=one.lead.low,
                high=one.lead.high,
                unit="steps",
                p=one.p,
                p_holm=p,
                seen=seen,
                endpoint="An alarm is likelier before a collapse than in a run without one: Fisher's test on the half "
                "of the seeds that did not choose the threshold, one-sided, by Holm over the metrics.",
            )
        )
    return found

"""Which metric announces a collapse, how long before, and how often falsely: over the runs of one or more studies.

A threshold is a multiple of a run's own level (`tracking.alarm`). It is chosen on half of the seeds and judged on the
other half, metric by metric, so that no threshold is judged on the runs that chose it. Both halves are of the same
arms, though: the test of a threshold chooses it anew in every shuffle.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tailrl.analysis.arm_kinds import is_scored_first
from tailrl.analysis.describe import flatten
from tailrl.analysis.survival import collapse_of
from tailrl.artifacts.evaluation import read_evaluation
from tailrl.artifacts.metrics import FloatArray, Metrics
from tailrl.artifacts.records import finished_jobs
from tailrl.artifacts.results import read_job
from tailrl.config.study import BASE_ARM
from tailrl.stats.clustered import clustered_median, clustered_share, shuffled_skill
from tailrl.stats.intervals import NO_INTERVAL, Interval
from tailrl.tracking import metrics as keys
from tailrl.tracking.alarm import SKEW, SKEWED, alarm_step, start_steps

ALL, MISMATCHED = "all", "with a mismatch"
"""The runs that a table is over."""

RISES, FALLS = (1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0), (0.8, 0.67, 0.5, 0.33, 0.2, 0.1, 0.03, 0.01)
"""Multiples of a run's own level that are tried as thresholds."""

FALLING = "falling reward"
"""The metric that the others are held against: it is what collapses."""

METRICS = {
    "k3": (keys.K3_UNMASKED, RISES),
    "masked k3": (keys.K3_MASKED, RISES),
    "effective sample size": (keys.SAMPLE_SIZE_RAW, FALLS),
    "smallest weight": (keys.WEIGHT_RAW_MIN, FALLS),
    "skew of C(r)": (SKEW, RISES),
    "gradient norm": (keys.GRADIENT_NORM, RISES),
    "rising entropy": (keys.ENTROPY, RISES),
    "falling entropy": (keys.ENTROPY, FALLS),
    FALLING: (keys.REWARD, FALLS),
    "tokens outside": (keys.OUTSIDE, RISES),
}
"""The metrics that are tried, each with its signal and its thresholds, from near a run's level to far from it; in this
order where they tie. A metric that does no better than to look at the reward says nothing new."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run: whether the threshold is chosen on it or judged, and its collapse, a step from 0 (None: none).

    Attributes:
        settings: a digest of what it was trained by, but for the study, the arm's name, seed and steps: runs with the
            same are one arm, whichever studies have them.
        steps: as it was planned; the signals, by metric, have a value for each step that it took.
        gain: its policy's avg@k less that of the untrained one; NaN where they have not been evaluated.
        scored_first: whether its mismatch is measured before the first update on a step's responses.
    """

    study: str
    arm: str
    seed: int
    settings: str
    chooses: bool
    steps: int
    collapse: int | None
    gain: float
    scored_first: bool
    signals: dict[str, FloatArray]

    @property
    def mismatched(self) -> bool:
        """Whether sampler and trainer ever differed: an unmasked k3 that is finite and not 0.

        Of several updates a step it may be theirs alone, where they go on while it is measured (`scored_first`).
        """
        k3_N = self.signals[keys.K3_UNMASKED]
        return bool((np.isfinite(k3_N) & (k3_N != 0)).any())


@dataclass(frozen=True, slots=True)
class Warned:
    """What one threshold of one metric does on some runs.

    Attributes:
        metric, signal, factor: the alarm is where the signal's mean is beyond so many times the run's own level.
        half: `chosen on`, or `judged on`.
        runs: `all` of that half, or those `with a mismatch`.
        collapsed, warned: runs that collapsed, and those of them with an alarm before; sensitivity is their share.
        others, alarmed: runs that did not, and those with an alarm; false_alarms is their share.
        lead: median steps from the alarm to the collapse, with its interval. All three are over arms, their n.
        p: twice the one-sided one that any arm's alarms would have that skill; NaN where it is not tested.
        ahead: of all collapses, its alarm before that of the falling reward, at the latest at the collapse.
    """

    metric: str
    signal: str
    factor: float
    half: str
    runs: str
    collapsed: int
    warned: int
    sensitivity: Interval
    others: int
    alarmed: int
    false_alarms: Interval
    lead: Interval
    p: float = math.nan
    ahead: Interval = NO_INTERVAL

    @property
    def skill(self) -> float:
        """Youden's index: sensitivity less false alarms; NaN where one of them has no runs."""
        return self.sensitivity.mean - self.false_alarms.mean

    @property
    def rank(self) -> tuple[int, float]:
        """What chooses among thresholds on the same runs: the skill, as a whole number; then the farther one."""
        return self.warned * self.others - self.alarmed * self.collapsed, abs(math.log(self.factor))


def read_cases(folder: Path) -> list[Case]:
    """The finished runs of one study; seeds at even places of their order choose, the others are judged.

    A run that a rule ended (`training.stop_when`) is left out: whether it would have collapsed nobody knows.
    """
    jobs = finished_jobs(folder)
    seeds = sorted({int(job.name.removeprefix("seed")) for job in jobs})
    gains = {arm: _gains(folder / "eval", arm) for arm in {job.parent.name for job in jobs}}
    found = (_case(folder, job, seeds, gains[job.parent.name]) for job in jobs)
    return [case for case in found if case]


def distinct(cases: Iterable[Case]) -> list[Case]:
    """Each run once: of those with the same seed and the same training, as far as both go, the longest.

    Training is the same where every reward and every gradient norm is. What a run records of its mismatch is not
    asked: with the exact engine bypass and recompute are one training to the bit, but of a step with several updates
    bypass measures k3 while they go on, recompute before the first. Of copies as long the one that measures it before
    is kept, since that is the mismatch between the engines, without the updates; else the first.
    """
    runs, found = list(cases), list[int]()
    for place in sorted(range(len(runs)), key=lambda place: (-_length(runs[place]), not runs[place].scored_first)):
        if not any(runs[i].seed == runs[place].seed and _begins_with(runs[i], runs[place]) for i in found):
            found.append(place)
    return [runs[place] for place in sorted(found)]


def _length(case: Case) -> int:
    return len(case.signals[keys.REWARD])


def _begins_with(case: Case, other: Case) -> bool:
    """Whether a run's training begins with all of another's."""
    return all(
        np.array_equal(case.signals[key][: _length(other)], other.signals[key], equal_nan=True)
        for key in (keys.REWARD, keys.GRADIENT_NORM)
    )


def _gains(folder: Path, arm: str) -> dict[int, float]:
    """What each seed of an arm gains over the untrained policy, as far as they have been evaluated."""
    paths = [folder / f"{name}.json" for name in (BASE_ARM, arm)]
    if not all(path.exists() for path in paths):
        return {}
    base, own = (read_evaluation(path).scores for path in paths)
    return {score.seed: score.avg_at_k - base[0].avg_at_k for score in own}


def _case(folder: Path, job: Path, seeds: Sequence[int], gains: Mapping[int, float]) -> Case | None:
    """A finished run; None where a rule ended it."""
    record, metrics = read_job(job)
    if record.stopped:
        return None
    settings = flatten(record.settings)
    length = len(metrics[keys.STEP])
    return Case(
        folder.name,
        record.arm,
        record.seed,
        _digest(settings),
        seeds.index(record.seed) % 2 == 0,
        settings["training.steps"],
        collapse_of(metrics.get(keys.REWARD, np.full(length, math.nan))),
        gains.get(record.seed, math.nan),
        is_scored_first(settings),
        {key: _signal(metrics, key, length) for key in {key for key, _ in METRICS.values()}},
    )


def _digest(settings: Mapping[str, Any]) -> str:
    """Of what makes an arm, as text."""
    own = {key: value for key, value in settings.items() if key not in ("study", "arm", "training.steps")}
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:12]


def _signal(metrics: Metrics, key: str, length: int) -> FloatArray:
    """The signal at every step; what `tailrl.tracking.alarm.signal` takes from one step."""
    absent = np.full(length, math.nan)
    if key == SKEW:
        return np.asarray(np.abs(np.sum([metrics.get(part, absent) for part in SKEWED], axis=0)), dtype=np.float64)
    return np.asarray(np.abs(metrics.get(key, absent)), dtype=np.float64)


def thresholds() -> list[tuple[str, float]]:
    """Every metric with every threshold that is tried."""
    return [(name, factor) for name, (_, factors) in METRICS.items() for factor in factors]


def raised(case: Case, key: str, factor: float) -> int | None:
    """The step, from 0, of the run's alarm by this threshold of a signal; None without one."""
    return alarm_step(case.signals[key], factor, start_steps(case.steps))


def warned(cases: Iterable[Case], metric: str, factor: float, chooses: bool, runs: str = ALL) -> Warned:
    """One threshold on one half of the runs, on all of it or on those with a mismatch."""
    key = METRICS[metric][0]
    own = [case for case in cases if case.chooses == chooses and (runs == ALL or case.mismatched)]
    alarm_R, collapse_R = _alarms(own, key, factor), _collapses(own)
    arm_R = np.array([case.settings for case in own])
    collapsed_R = np.isfinite(collapse_R)
    early_R = alarm_R < collapse_R
    warned_R = collapsed_R & early_R
    return Warned(
        metric,
        key,
        factor,
        "chosen on" if chooses else "judged on",
        runs,
        int(collapsed_R.sum()),
        int(warned_R.sum()),
        clustered_share(early_R[collapsed_R], arm_R[collapsed_R]),
        int((~collapsed_R).sum()),
        int((~collapsed_R & early_R).sum()),
        clustered_share(early_R[~collapsed_R], arm_R[~collapsed_R]),
        clustered_median(collapse_R[warned_R] - alarm_R[warned_R], arm_R[warned_R]),
    )


def _alarms(cases: Sequence[Case], key: str, factor: float) -> FloatArray:
    """The step of each run's alarm, infinite where there is none: one that is earlier than the collapse is in time for
    it, or false where none comes."""
    alarms = [raised(case, key, factor) for case in cases]
    return np.array([math.inf if alarm is None else alarm for alarm in alarms])


def _collapses(cases: Sequence[Case]) -> FloatArray:
    """The step of each run's collapse, infinite where there is none."""
    return np.array([math.inf if case.collapse is None else case.collapse for case in cases])


def ahead(one: Warned, other: Warned, cases: Iterable[Case]) -> Interval:
    """Median steps by which a metric's alarm comes before another's, over the collapses that are judged, arms as units.

    Who has no alarm by then has it at the collapse: else a metric that misses most of them could only be ahead.
    """
    judged = [case for case in cases if not case.chooses and case.collapse is not None]
    end_R = _collapses(judged)
    own_R, other_R = (np.minimum(_alarms(judged, metric.signal, metric.factor), end_R) for metric in (one, other))
    return clustered_median(other_R - own_R, [case.settings for case in judged])


def with_p(one: Warned, cases: Sequence[Case]) -> Warned:
    """A metric at its chosen threshold, with the p of its skill.

    Arms change places that were to run for as many steps: an alarm can come no later than a run's end.
    """
    key, factors = METRICS[one.metric]
    alarms = [_alarms(cases, key, factor) for factor in reversed(factors)]  # of ties the farther is chosen
    chooses = [case.chooses for case in cases]
    places = [(case.study, case.steps, case.seed) for case in cases]
    p = shuffled_skill(alarms, _collapses(cases), chooses, [case.settings for case in cases], places)
    return replace(one, p=float(np.minimum(1.0, 2 * p)))


def judge_metrics(every: Sequence[Warned]) -> list[Warned]:
    """Each metric at the threshold with most skill where it was chosen, judged; the best one there comes first.

    Ties go to the threshold that is farther from a run's own level. A metric of which none has any skill there is left
    out: the best of them would be one that never fires. So are all where the runs that choose lack one of the kinds.
    """
    chosen = []
    for metric in METRICS:
        own = [one for one in every if one.metric == metric and one.half == "chosen on" and one.skill > 0]
        chosen += [max(own, key=lambda one: one.rank)] if own else []
    chosen.sort(key=lambda one: one.rank[0], reverse=True)
    judged = {(one.metric, one.factor): one for one in every if one.half == "judged on"}
    return [judged[one.metric, one.factor] for one in chosen]

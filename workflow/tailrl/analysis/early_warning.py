"""Early warnings of a collapse: each metric's sensitivity, false alarms and lead, over the runs of some studies.

A threshold is a multiple of a run's own level (`tracking.alarm`). For each metric it is chosen on half of the seeds and
judged on the other, held-out half. Both halves have the same arms, so the test chooses the threshold in each shuffle.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tailrl.analysis.arm_kinds import is_scored_first
from tailrl.analysis.describe import flatten
from tailrl.analysis.survival import collapse_of, tells_collapse
from tailrl.artifacts.evaluation import read_evaluation
from tailrl.artifacts.metrics import FloatArray
from tailrl.artifacts.records import finished_jobs
from tailrl.artifacts.results import read_job
from tailrl.config.study import BASE_ARM
from tailrl.stats.clustered import clustered_median, clustered_share, shuffled_skill
from tailrl.stats.intervals import NO_INTERVAL, Interval
from tailrl.tracking import metrics as keys
from tailrl.tracking.alarm import SKEW, SKEWED, alarm_step, start_steps

ALL, MISMATCHED = "all", "with a mismatch"
"""The runs of a table."""

RISES, FALLS = (1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0), (0.8, 0.67, 0.5, 0.33, 0.2, 0.1, 0.03, 0.01)
"""The tried thresholds, as multiples of a run's own level."""

FALLING = "falling reward"
"""The reference for the other metrics: the reward is what collapses."""

TRIED = {
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
"""The tried metrics, each with its signal and its thresholds, from near a run's level to far. Ties keep this order. A
metric is useful only if it warns better than the falling reward."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run: whether thresholds are chosen or judged on it, and the step of its collapse, from 0, or None.

    Attributes:
        settings: a digest of its training settings without the study, the arm's name and the steps. Runs with the same
            digest belong to one arm, across studies.
        steps: the planned number; the signals, by key, have a value for each step that it took.
        gain: its policy's avg@k minus that of the untrained policy; NaN if not evaluated.
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

        With several updates per step these alone can cause it, if k3 is measured between them (`scored_first`).
        """
        k3_N = self.signals[keys.K3_UNMASKED]
        return bool((np.isfinite(k3_N) & (k3_N != 0)).any())


@dataclass(frozen=True, slots=True)
class Warned:
    """The results of one threshold of one metric on some runs.

    Attributes:
        metric, signal, factor: an alarm is raised when the signal's mean passes `factor` times the run's own level.
        half: `chosen on`, or `judged on`.
        runs: `all` of that half, or only those `with a mismatch`.
        collapsed, warned: collapsed runs, and those among them with an earlier alarm; sensitivity is their share.
        others, alarmed: other runs, and those among them with an alarm; false_alarms is their share.
        lead: median steps from the alarm to the collapse. All three intervals are over arms, their n.
        p: of the skill: twice the one-sided p of `shuffled_skill`; NaN if not tested.
        ahead: median steps by which its alarm precedes that of the falling reward, see `ahead`.
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
        """Youden's index: sensitivity minus false alarms; NaN if one of them has no runs."""
        return self.sensitivity.mean - self.false_alarms.mean

    @property
    def rank(self) -> tuple[int, float]:
        """The key that chooses among thresholds on the same runs: skill as a whole number, then distance."""
        return self.warned * self.others - self.alarmed * self.collapsed, abs(math.log(self.factor))


def read_cases(folder: Path) -> list[Case]:
    """The finished runs of one study; every other seed chooses thresholds, the first among them; the rest are judged.

    Runs that a rule ended (`training.stop_when`) are left out: whether they would have collapsed is unknown. Runs
    whose problems become harder are left out too (`tells_collapse`).
    """
    jobs = finished_jobs(folder)
    seeds = sorted({int(job.name.removeprefix("seed")) for job in jobs})
    gains = {arm: _gains(folder / "eval", arm) for arm in {job.parent.name for job in jobs}}
    found = (_case(folder, job, seeds, gains[job.parent.name]) for job in jobs)
    return [case for case in found if case]


def distinct(cases: Iterable[Case]) -> list[Case]:
    """Each training once: among runs with the same seed and training, as far as both go, the longest.

    Training is the same if every reward and gradient norm agrees. The recorded mismatch may differ: with the exact
    engine, bypass and recompute train alike to the bit. But with several updates per step, bypass measures k3 between
    them, and recompute before the first. Of copies of the same length, a run that measures before the first update is
    kept, since only the engines cause its mismatch; otherwise the first copy.
    """
    runs, found = list(cases), list[int]()
    lengths = [len(run.signals[keys.REWARD]) for run in runs]
    for place in sorted(range(len(runs)), key=lambda place: (-lengths[place], not runs[place].scored_first)):
        if not any(runs[i].seed == runs[place].seed and _begins_with(runs[i], runs[place]) for i in found):
            found.append(place)
    return [runs[place] for place in sorted(found)]


def _begins_with(case: Case, other: Case) -> bool:
    """Whether a run's training begins with all of another run's training."""
    pairs = [(case.signals[key], other.signals[key]) for key in (keys.REWARD, keys.GRADIENT_NORM)]
    return all(np.array_equal(own_N[: other_N.size], other_N, equal_nan=True) for own_N, other_N in pairs)


def _gains(folder: Path, arm: str) -> dict[int, float]:
    """Each seed's gain over the untrained policy, as far as evaluated."""
    paths = [folder / f"{name}.json" for name in (BASE_ARM, arm)]
    if not all(path.exists() for path in paths):
        return {}
    base, own = (read_evaluation(path).scores for path in paths)
    return {score.seed: score.avg_at_k - base[0].avg_at_k for score in own}


def _case(folder: Path, job: Path, seeds: Sequence[int], gains: Mapping[int, float]) -> Case | None:
    """A finished run; None if a rule ended it, or if a collapse cannot be told."""
    record, metrics = read_job(job)
    if record.stopped or not tells_collapse(metrics):
        return None
    settings, absent_N = flatten(record.settings), np.full(len(metrics[keys.STEP]), math.nan)
    own = {key: value for key, value in settings.items() if key not in ("study", "arm", "training.steps")}
    # At every step, what `tracking.alarm.signal` takes from one step.
    parts = {key: SKEWED if key == SKEW else (key,) for key, _ in TRIED.values()}
    signals = {key: np.abs(np.sum([metrics.get(k, absent_N) for k in held], axis=0)) for key, held in parts.items()}
    return Case(
        folder.name,
        record.arm,
        record.seed,
        hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()[:12],
        seeds.index(record.seed) % 2 == 0,
        settings["training.steps"],
        collapse_of(metrics.get(keys.REWARD, absent_N)),
        gains.get(record.seed, math.nan),
        is_scored_first(settings),
        signals,
    )


def thresholds() -> list[tuple[str, float]]:
    """Every metric with each of its thresholds."""
    return [(name, factor) for name, (_, factors) in TRIED.items() for factor in factors]


def raised(case: Case, key: str, factor: float) -> int | None:
    """The step, from 0, of the run's alarm by this threshold of a signal; None without an alarm."""
    return alarm_step(case.signals[key], factor, start_steps(case.steps))


def warned(cases: Iterable[Case], metric: str, factor: float, chooses: bool, runs: str = ALL) -> Warned:
    """The results of one threshold on one half of the runs, all of them or those with a mismatch."""
    key = TRIED[metric][0]
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
    """The step of each run's alarm, infinite without an alarm."""
    alarms = [raised(case, key, factor) for case in cases]
    return np.array([math.inf if alarm is None else alarm for alarm in alarms])


def _collapses(cases: Sequence[Case]) -> FloatArray:
    """The step of each run's collapse, infinite without one."""
    return np.array([math.inf if case.collapse is None else case.collapse for case in cases])


def ahead(one: Warned, other: Warned, cases: Iterable[Case]) -> Interval:
    """Median steps by which a metric's alarm precedes another's, over the judged collapses, with arms as units.

    A missing or later alarm counts as one at the collapse. Otherwise a metric that misses most collapses could only be
    ahead.
    """
    judged = [case for case in cases if not case.chooses and case.collapse is not None]
    end_R = _collapses(judged)
    own_R, other_R = (np.minimum(_alarms(judged, metric.signal, metric.factor), end_R) for metric in (one, other))
    return clustered_median(other_R - own_R, [case.settings for case in judged])


def with_p(one: Warned, cases: Sequence[Case]) -> Warned:
    """A metric at its chosen threshold, with the p of its skill.

    Only arms with the same planned steps are exchanged, since no alarm can come after a run's end.
    """
    key, factors = TRIED[one.metric]
    alarms = [_alarms(cases, key, factor) for factor in reversed(factors)]  # the farther threshold wins a tie
    chooses = [case.chooses for case in cases]
    places = [(case.study, case.steps, case.seed) for case in cases]
    p = shuffled_skill(alarms, _collapses(cases), chooses, [case.settings for case in cases], places)
    return replace(one, p=float(np.minimum(1.0, 2 * p)))


def judge_metrics(every: Sequence[Warned]) -> list[Warned]:
    """Each metric judged at the threshold with most skill on the runs that choose; the best metric there comes first.

    The threshold farther from a run's own level wins a tie. A metric without skill there is left out: its best
    threshold would never raise an alarm. All are left out if these runs all collapsed, or none did.
    """
    chosen = []
    for metric in TRIED:
        own = [one for one in every if one.metric == metric and one.half == "chosen on" and one.skill > 0]
        chosen += [max(own, key=lambda one: one.rank)] if own else []
    chosen.sort(key=lambda one: one.rank[0], reverse=True)
    judged = {(one.metric, one.factor): one for one in every if one.half == "judged on"}
    return [judged[one.metric, one.factor] for one in chosen]

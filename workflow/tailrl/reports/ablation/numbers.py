"""The results of each value of an ablation: scores, collapses, mismatch, kept mass."""

from collections.abc import Sequence
from dataclasses import dataclass

from tailrl.artifacts.results import Results, TrainedRun
from tailrl.reports.collapse.numbers import collapses
from tailrl.reports.curves import mean_of
from tailrl.reports.scores.numbers import Gain, gains_over_base, scores_of
from tailrl.stats.crossed import crossed_difference
from tailrl.stats.intervals import Interval, mean_interval
from tailrl.stats.tests import NO_DIFFERENCE, Difference, holm
from tailrl.tracking.metrics import K3_MASKED, K3_UNMASKED, KEPT_MASS_TRAIN, OUTSIDE


@dataclass(frozen=True, slots=True)
class Point:
    """The results of one value of the field: means over seeds with t intervals.

    Attributes:
        base: the base arm; arm: with this value, given as text.
        avg: avg@k, share of 1; gain: over the untrained policy; both with intervals over seeds and problems.
        change: avg@k minus that of the unchanged base arm, or of the first value if it is not among them.
        change_p_holm: the change's p by Holm over the ablation.
        k3_masked, k3_unmasked: nats per token, mean over all steps.
        lost: 1 - Z, mean mass outside the trainer's safe set.
        outside: share of sampled tokens outside the trainer's set.
        survived: steps before the collapse, or all steps without one.
        runs, collapsed: the number of runs, and of collapsed runs.
    """

    base: str
    arm: str
    value: str
    avg: Interval
    gain: Difference
    change: Difference
    change_p_holm: float
    k3_masked: Interval
    k3_unmasked: Interval
    lost: Interval
    outside: Interval
    survived: Interval
    runs: int
    collapsed: int


def points_of(results: Results, places: Sequence[tuple[str, str, str]]) -> list[Point]:
    """The points of (base, arm, value), each with its change against the base arm or its first value."""
    gains = {gain.arm: gain for gain in gains_over_base(results)}
    scores = {arm: scores_of(results, arm) for _, arm, _ in places}
    changes = []
    for base, arm, _ in places:
        own = [other for of, other, _ in places if of == base]
        start = base if base in own else own[0]
        changes.append(crossed_difference(scores[arm], scores[start]) if arm != start else NO_DIFFERENCE)
    adjusted = holm([change.p for change in changes]).tolist()
    return [
        _point(results.runs[arm], base, gains[arm], value, change, p)
        for (base, arm, value), change, p in zip(places, changes, adjusted, strict=True)
    ]


def _point(runs: Sequence[TrainedRun], base: str, gain: Gain, value: str, change: Difference, change_p: float) -> Point:
    found = collapses(runs)
    seeds = {
        "k3_masked": mean_of(runs, K3_MASKED),
        "k3_unmasked": mean_of(runs, K3_UNMASKED),
        "lost": 1.0 - mean_of(runs, KEPT_MASS_TRAIN),
        "outside": mean_of(runs, OUTSIDE),
        "survived": found.lasted,
    }
    return Point(
        base=base,
        arm=gain.arm,
        value=value,
        avg=gain.avg,
        gain=gain.gain,
        change=change,
        change_p_holm=change_p,
        runs=found.runs,
        collapsed=found.collapsed,
        **{name: mean_interval(values) for name, values in seeds.items()},
    )

"""What an ablation says of its field: whether a value changes the score, how long runs last, an arm's lead, or
less than a margin."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tailrl.analysis import arm_kinds
from tailrl.analysis.format import points
from tailrl.analysis.survival import collapses, lasted
from tailrl.artifacts.results import Results
from tailrl.claims.decide import Verdict, change_verdict
from tailrl.claims.finding import CHANGES, CONTRADICTED, REPRODUCED, UNDECIDED, UNTESTABLE, interval
from tailrl.config.arm import Ablation
from tailrl.stats.intervals import LEVEL, Interval
from tailrl.stats.tests import NO_DIFFERENCE, Difference, arm_contrast, arm_difference, holm


@dataclass(frozen=True, slots=True)
class Point:
    """What one value of the field led to: means over seeds with t intervals.

    Attributes:
        base: the arm whose field it is; value: as text.
        avg: avg@k, share of 1; gain: over the untrained policy; both with intervals over seeds and problems.
        change: avg@k less that of the base arm as the study has it, or else of the first value; change_p_holm: its p by
            Holm over the ablation.
        k3_masked, k3_unmasked: nats per token, mean over all steps; times the steps, the area under its curve.
        lost: 1 - Z, mean mass outside the trainer's safe set.
        outside: share of sampled tokens outside the trainer's set.
        survived: steps before the collapse, or all steps where there was none.
        runs, collapsed: how many runs, and how many of them collapsed.
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


Changed = tuple[Point, Difference, float]
"""A value, how something changes from the value that its base arm starts from, and the p of that by Holm."""


def ablation_verdicts(ablation: Ablation, results: Results, points_A: Sequence[Point]) -> list[Verdict]:
    """The lines of one ablation: of each base arm whether the field matters; whether runs last longer or shorter, where
    one collapsed; then the contrast of two of them, and what is as good as the base arm, where the ablation asks for
    these."""
    by_base = {base: [p for p in points_A if p.base == base] for base in ablation.bases}
    lines = [_verdict(results, ablation.field, own) for own in by_base.values()]
    found = _lasting(results, ablation.field, by_base)
    if ablation.contrast:
        found += _contrasts(results, ablation.field, points_A, ablation.contrast)
    if ablation.margin:
        for line, own in zip(lines, by_base.values(), strict=True):
            as_good_A = as_good(line, own, ablation.margin)
            found += [replace(one, dose=arm_kinds.dose(arm_kinds.settings_of(results, one.arms))) for one in as_good_A]
    return lines + found


def as_good(line: Verdict, points_B: Sequence[Point], margin: float) -> list[Verdict]:
    """Of each other value of one base arm, whether it is as good: whether its change lies above a margin, all of it.

    Args:
        line: the base arm's own line on the field, for the scope; a value's dose may be another.
        points_B: the base arm's values.
        margin: points of avg@k, as a share of 1, by which a value may fall short.
    """
    start = _start(points_B).value
    found = []
    for p in points_B:
        if math.isnan(p.change.low):
            continue
        above, below = p.change.low > -margin, p.change.high < -margin
        found.append(
            replace(
                line,
                id=f"{line.id.rpartition('.')[0]}.as_good",
                verdict=REPRODUCED if above else CONTRADICTED if below else UNDECIDED,
                arms=p.arm,
                seeds=p.runs,
                effect=p.change.mean,
                low=p.change.low,
                high=p.change.high,
                p=math.nan,
                p_holm=math.nan,
                seen=f"{p.value} less {start}: {points(p.change)} points",
                endpoint=f"Held-out avg@k at the value less that at {start}: as good where the 95 % interval over "
                f"seeds and problems, each value's own, lies above {-100 * margin:g} points, worse where below.",
            )
        )
    return found


def _start(points_B: Sequence[Point]) -> Point:
    """What the other values of a base arm are held against."""
    return next(p for p in points_B if math.isnan(p.change.mean))


def _verdict(results: Results, field: str, points_B: Sequence[Point]) -> Verdict:
    """Whether the field matters to the score of one base arm: whether any of its values changes it, by Holm."""
    changed_B = [(p, p.change, p.change_p_holm) for p in points_B]
    said = [f"{p.value}: {points(change)} points" for p, change, _ in _decided(changed_B)]
    collapses_B = ", ".join(f"{p.collapsed} of {p.runs} at {p.value}" for p in points_B if p.collapsed)
    return _line(
        results,
        field,
        changed_B,
        asked="score",
        unit="share of samples",
        seen="; ".join(
            [*(said or ["by Holm no value changes avg"]), *([f"collapsed: {collapses_B}"] if collapses_B else [])]
        ),
        endpoint=f"Held-out avg@k at each value less that at {_start(points_B).value}, over seeds and problems, by "
        "Holm over the values of all base arms",
    )


def _lasting(results: Results, field: str, by_base: Mapping[str, Sequence[Point]]) -> list[Verdict]:
    """Of each base arm whether a value changes how many steps its runs last; no line where no run of any collapsed."""
    points_A = [p for own in by_base.values() for p in own]
    if not any(p.collapsed for p in points_A):
        return []
    changes_A = [_lasts(results, p, _start(by_base[p.base])) for p in points_A]
    changed_A = list(zip(points_A, changes_A, holm([change.p for change in changes_A]).tolist(), strict=True))
    lines = []
    for base, own in by_base.items():
        changed_B = [one for one in changed_A if one[0].base == base]
        tested = _tested(changed_B)
        said = [
            f"{p.value}: {interval(change.mean, change.low, change.high, form='+.0f')} steps"
            for p, change, _ in _decided(changed_B) or tested
        ]
        line = _line(
            results,
            field,
            changed_B,
            asked="steps_before_collapse",
            unit="steps",
            seen="; ".join(said) or ("nothing to compare" if any(p.collapsed for p in own) else "no run collapsed"),
            endpoint=f"Steps of a run up to its collapse, all of them where there is none, at each value less those "
            f"at {_start(own).value}, over seeds (Welch), by Holm over the values of all base arms at which a run "
            "collapsed",
        )
        lines.append(line if tested else replace(line, verdict=UNTESTABLE))
    return lines


def _lasts(results: Results, p: Point, start: Point) -> Difference:
    """How many steps more an arm's runs last than another's; no comparison where those of both last to their end, nor
    where some were planned shorter than others, or ended by a rule."""
    if p is start or not p.collapsed + start.collapsed:
        return NO_DIFFERENCE
    found = [collapses(results.runs[arm]) for arm in (p.arm, start.arm)]
    if len({length for _, lengths in found for length in lengths}) > 1:
        return NO_DIFFERENCE
    return arm_difference(*map(lasted, found))


def _line(
    results: Results, field: str, changed_B: Sequence[Changed], *, asked: str, unit: str, seen: str, endpoint: str
) -> Verdict:
    """The line on one base arm, by the largest of its changes."""
    points_B, decided = [p for p, _, _ in changed_B], _decided(changed_B)
    _, largest, p_holm = max(decided or _tested(changed_B), key=lambda one: abs(one[1].mean), default=changed_B[0])
    line = change_verdict(
        f"ablation.{field}.{asked}",
        arm_kinds.settings_of(results, points_B[0].arm),
        points_B[0].base,
        min(p.runs for p in points_B),
        largest,
        p_holm,
        unit=unit,
        seen=seen,
        endpoint=f"{endpoint}. The effect is the largest change, of those that are decided if any is.",
    )
    verdict = CHANGES if decided else UNDECIDED  # a smaller change can be the surer one
    return replace(line, verdict=verdict, dose=_dose(results, field, points_B))


def _tested(changed_B: Sequence[Changed]) -> list[Changed]:
    return [one for one in changed_B if not math.isnan(one[1].mean)]


def _decided(changed_B: Sequence[Changed]) -> list[Changed]:
    return [one for one in changed_B if one[2] <= LEVEL]


def _dose(results: Results, field: str, points_B: Sequence[Point]) -> str:
    """The mismatch under which one base arm's values are compared: that of the first, and the values, where they are
    what changes it."""
    first, *rest = [arm_kinds.dose(arm_kinds.settings_of(results, p.arm)) for p in points_B]
    return first if set(rest) <= {first} else f"{first}; {field}: {', '.join(p.value for p in points_B)}"


def _contrasts(results: Results, field: str, points_A: Sequence[Point], pair: tuple[str, str]) -> list[Verdict]:
    """Whether a value changes how far one base arm is above another: a difference of two differences, a value each."""
    arms = {(p.base, p.value): p.arm for p in points_A}
    reference, *others = dict.fromkeys(p.value for p in points_A)
    found = []
    for value in others:
        four = [arms[base, at] for at in (value, reference) for base in pair]
        scores_A = [[score.avg_at_k for score in results.evaluations[arm].scores] for arm in four]
        found.append((value, arm_contrast(scores_A, (1, -1, -1, 1))))
    settings = arm_kinds.settings_of(results, arms[pair[0], reference])
    endpoint = (
        f"Held-out avg@k of {pair[0]} less that of {pair[1]} at a value, less the same difference at {reference}, over "
        "seeds (Welch over the four arms), by Holm over the values."
    )
    lines = []
    for (value, change), p in zip(found, holm([change.p for _, change in found]).tolist(), strict=True):
        line = change_verdict(
            f"ablation.{field}.contrast",
            settings,
            ", ".join(pair),
            change.n,
            change,
            p,
            unit="share of samples",
            seen=f"{value} against {reference}: {points(change)} points",
            endpoint=endpoint,
        )
        compared = [point for point in points_A if point.base == pair[0] and point.value in (reference, value)]
        lines.append(replace(line, dose=_dose(results, field, compared)))
    return lines

"""Verdicts of an ablation: whether a value changes a result, or is as good as the base arm's."""

import math
from collections.abc import Sequence
from dataclasses import replace

from tailrl.artifacts.claims import Verdict
from tailrl.artifacts.results import Results
from tailrl.claims.catalogue import CATALOGUE
from tailrl.claims.decide import Changes, Line, Scope, decide, decide_changes, scope_of
from tailrl.claims.finding import Finding, changed
from tailrl.config.ablation import Ablation
from tailrl.config.words import dose
from tailrl.page_parts.number_text import points, with_interval
from tailrl.reports.ablation.numbers import Point
from tailrl.reports.collapse.numbers import collapses
from tailrl.reports.scores.numbers import seed_scores
from tailrl.stats.tests import NO_DIFFERENCE, arm_contrast, arm_difference

Bases = Sequence[Sequence[Point]]
"""The points of each base arm, in the study's order."""


def judge_ablation(ablation: Ablation, results: Results, points_A: Sequence[Point]) -> list[Verdict]:
    """The verdicts of one ablation, in this order.

    For each base arm: whether the field changes the score, and if a run collapsed, the steps before the collapse. Then,
    if the ablation asks for them, the contrast of two base arms, and the values as good as the base arm's.
    """
    bases = [[p for p in points_A if p.base == base] for base in ablation.bases]
    found = _scores(results, ablation.field, bases)
    if any(p.collapsed for p in points_A):
        found += _lasting(results, ablation.field, bases)
    if ablation.contrast:
        found += _contrasts(results, ablation.field, points_A, ablation.contrast)
    if ablation.margin:
        for own in bases:
            scopes = [scope_of(results.settings(p.arm)) for p in own]
            found += as_good(ablation.field, own, scopes, ablation.margin)
    return found


def as_good(field: str, points_B: Sequence[Point], scopes_B: Sequence[Scope], margin: float) -> list[Verdict]:
    """For each other value of one base arm, whether it is as good: the interval of its change is above -margin.

    The margin is the allowed loss of avg@k, as a share of 1; scopes_B holds the scope of each value.
    """
    start = _start(points_B).value
    claim = CATALOGUE["ablation.{field}.as_good"].filled(field=field, start=start, points=f"{-100 * margin:g}")
    claim, lines = claim.model_copy(update={"limit": -margin}), []
    for p, scope in zip(points_B, scopes_B, strict=True):
        if not math.isnan(p.change.low):
            words = f"{p.value} minus {start}: {points(p.change)} points"
            lines.append(Line(claim, scope, changed((p.arm,), p.runs, p.change, words)))
    return decide(lines)


def _start(points_B: Sequence[Point]) -> Point:
    """The reference for the other values of a base arm."""
    return next(p for p in points_B if math.isnan(p.change.mean))


def _scores(results: Results, field: str, bases: Bases) -> list[Verdict]:
    """For each base arm, whether any value changes the score."""
    groups = []
    for own in bases:
        found = [changed((p.base,), p.runs, p.change, f"{p.value}: {points(p.change)} points") for p in own]
        ended = ", ".join(f"{p.collapsed} of {p.runs} at {p.value}" for p in own if p.collapsed)
        beside = f"collapsed: {ended}" if ended else ""
        groups.append(_changes(results, field, "score", own, found, "by Holm no value changes avg", beside))
    return decide_changes(groups)


def _lasting(results: Results, field: str, bases: Bases) -> list[Verdict]:
    """For each base arm, whether any value changes the steps before a collapse."""
    groups = []
    for own in bases:
        found = [_lasts(results, p, _start(own)) for p in own]
        if any(p.collapsed for p in own):
            none = "; ".join(one.words for one in found if not math.isnan(one.effect)) or "nothing to compare"
        else:
            found, none = [replace(one, effect=0.0) for one in found], "no run collapsed"
        groups.append(_changes(results, field, "steps_before_collapse", own, found, none))
    return decide_changes(groups)


def _changes(
    results: Results, field: str, asked: str, points_B: Sequence[Point], found: Sequence[Finding], none: str,
    beside: str = "",
) -> Changes:  # fmt: skip
    """One base arm's changes; `seeds` is that of the value with fewest."""
    claim = CATALOGUE[f"ablation.{{field}}.{asked}"].filled(field=field, start=_start(points_B).value)
    scope, seeds = _scope(results, points_B, _dose(results, field, points_B)), min(p.runs for p in points_B)
    return Changes(claim, scope, [replace(one, seeds=seeds) for one in found], none, beside)


def _lasts(results: Results, p: Point, start: Point) -> Finding:
    """How many steps more an arm's runs last than the reference's.

    There is no comparison if no run collapsed, or if the lengths of runs differ, by plan or by a rule.
    """
    found = [collapses(results.runs[arm]) for arm in (p.arm, start.arm)]
    alike = len({length for one in found for length in one.lengths}) == 1
    compared = p is not start and p.collapsed + start.collapsed and alike
    change = arm_difference(found[0].lasted, found[1].lasted) if compared else NO_DIFFERENCE
    steps = with_interval(change, "{:+.0f}".format)
    shown = changed((p.base,), p.runs, change, f"{p.value}: {steps} steps")
    return replace(shown, events=p.collapsed + start.collapsed if compared else 0)


def _scope(results: Results, points_B: Sequence[Point], dose: str) -> Scope:
    runs = [results.settings(p.arm) for p in points_B]
    rates = dict.fromkeys(scope_of(own).rate for own in runs)
    return scope_of(runs[0], dose, ", ".join(rates))


def _dose(results: Results, field: str, points_B: Sequence[Point]) -> str:
    """The mismatch under which one base arm's values are compared: that of the first value, and if values change it,
    the field with its values."""
    first, *rest = [dose(results.settings(p.arm)) for p in points_B]
    return first if set(rest) <= {first} else f"{first}; {field}: {', '.join(p.value for p in points_B)}"


def _contrasts(results: Results, field: str, points_A: Sequence[Point], pair: tuple[str, str]) -> list[Verdict]:
    """For each value, whether it changes the difference between two base arms: a difference of two differences."""
    places = {(p.base, p.value): p for p in points_A}
    reference, *others = dict.fromkeys(p.value for p in points_A)
    first, second = pair
    claim = CATALOGUE["ablation.{field}.contrast"].filled(field=field, first=first, second=second, start=reference)
    lines = []
    for value in others:
        four = [places[base, at].arm for at in (value, reference) for base in pair]
        scores_A = [seed_scores(results, arm) for arm in four]
        change = arm_contrast(scores_A, (1, -1, -1, 1))
        compared = [p for p in points_A if p.base == first and p.value in (reference, value)]
        scope = _scope(results, compared, _dose(results, field, compared))
        words = f"{value} against {reference}: {points(change)} points"
        lines.append(Line(claim, scope, changed(pair, change.n, change, words)))
    return decide(lines)

"""What an ablation says of its field: whether a value changes the score, how long runs last, an arm's lead, or
less than a margin."""

import math
from collections.abc import Sequence
from dataclasses import replace

from tailrl.analysis import arm_kinds
from tailrl.analysis.ablation import Point
from tailrl.analysis.format import points
from tailrl.analysis.survival import collapses, lasted
from tailrl.artifacts.results import Results
from tailrl.claims.catalogue import CATALOGUE
from tailrl.claims.decide import Line, Scope, Verdict, decide, scope_of
from tailrl.claims.finding import CHANGES, UNTESTABLE, Finding, changed, interval
from tailrl.config.arm import Ablation
from tailrl.stats.tests import NO_DIFFERENCE, arm_contrast, arm_difference

Bases = Sequence[Sequence[Point]]
"""The points of each base arm, in the study's order."""


def judge_ablation(ablation: Ablation, results: Results, points_A: Sequence[Point]) -> list[Verdict]:
    """The lines of one ablation: of each base arm whether the field matters; whether runs last longer or shorter, where
    one collapsed; then the contrast of two of them, and what is as good as the base arm, where the ablation asks for
    these."""
    bases = [[p for p in points_A if p.base == base] for base in ablation.bases]
    found = _scores(results, ablation.field, bases)
    if any(p.collapsed for p in points_A):
        found += _lasting(results, ablation.field, bases)
    if ablation.contrast:
        found += _contrasts(results, ablation.field, points_A, ablation.contrast)
    if ablation.margin:
        for own in bases:
            scopes = [_scope(results, own, arm_kinds.dose(arm_kinds.settings_of(results, p.arm))) for p in own]
            found += as_good(ablation.field, own, scopes, ablation.margin)
    return found


def as_good(field: str, points_B: Sequence[Point], scopes_B: Sequence[Scope], margin: float) -> list[Verdict]:
    """Of each other value of one base arm, whether it is as good: whether its change lies above a margin, all of it.

    Args:
        field: that the ablation varies.
        points_B: the base arm's values.
        scopes_B: where each of them holds.
        margin: points of avg@k, as a share of 1, by which a value may fall short.
    """
    start = _start(points_B).value
    claim = CATALOGUE["ablation.{field}.as_good"].filled(field=field, start=start, points=f"{-100 * margin:g}")
    claim = claim.model_copy(update={"limit": -margin})
    return decide(
        [
            Line(
                claim, scope, changed((p.arm,), p.runs, p.change, f"{p.value} less {start}: {points(p.change)} points")
            )
            for p, scope in zip(points_B, scopes_B, strict=True)
            if not math.isnan(p.change.low)
        ]
    )


def _start(points_B: Sequence[Point]) -> Point:
    """What the other values of a base arm are held against."""
    return next(p for p in points_B if math.isnan(p.change.mean))


def _scores(results: Results, field: str, bases: Bases) -> list[Verdict]:
    """Whether the field matters to the score of each base arm: whether any of its values changes it."""
    said = "{}: {} points"
    found = [
        [changed((p.base,), p.runs, p.change, said.format(p.value, points(p.change))) for p in own] for own in bases
    ]
    lines = []
    for own, (line, decided, _) in zip(bases, _of_bases(results, field, "score", bases, found), strict=True):
        ended = ", ".join(f"{p.collapsed} of {p.runs} at {p.value}" for p in own if p.collapsed)
        seen = [*(decided or ["by Holm no value changes avg"]), *([f"collapsed: {ended}"] if ended else [])]
        lines.append(replace(line, seen="; ".join(seen)))
    return lines


def _lasting(results: Results, field: str, bases: Bases) -> list[Verdict]:
    """Of each base arm whether a value changes how many steps its runs last."""
    found = [[_lasts(results, p, _start(own)) for p in own] for own in bases]
    lines = []
    of_bases = _of_bases(results, field, "steps_before_collapse", bases, found)
    for own, (line, decided, tested) in zip(bases, of_bases, strict=True):
        nothing = "nothing to compare" if any(p.collapsed for p in own) else "no run collapsed"
        lines.append(replace(line, seen="; ".join(decided or tested) or nothing))
    return lines


def _of_bases(
    results: Results, field: str, asked: str, bases: Bases, found: Sequence[Sequence[Finding]]
) -> list[tuple[Verdict, list[str], list[str]]]:
    """The line on each base arm, which is that of the largest of its changes, of those that are decided if any is; with
    what is seen of all that are decided, and of all that were tested."""
    lines = []
    for own, findings in zip(bases, found, strict=True):
        claim = CATALOGUE[f"ablation.{{field}}.{asked}"].filled(field=field, start=_start(own).value)
        scope, seeds = _scope(results, own, _dose(results, field, own)), min(p.runs for p in own)
        lines += [Line(claim, scope, replace(finding, seeds=seeds)) for finding in findings]
    verdicts = iter(decide(lines))
    chosen = []
    for own in bases:
        every = [next(verdicts) for _ in own]
        tested = [line for line in every if not math.isnan(line.effect)]
        decided = [line for line in tested if line.verdict == CHANGES]  # a smaller change can be the surer one
        largest = max(decided or tested, key=lambda line: abs(line.effect), default=every[0])
        chosen.append((largest, [line.seen for line in decided], [line.seen for line in tested]))
    return chosen


def _lasts(results: Results, p: Point, start: Point) -> Finding:
    """How many steps more an arm's runs last than another's; no comparison where those of both last to their end, nor
    where some were planned shorter than others, or ended by a rule."""
    ends = [collapses(results.runs[arm]) for arm in (p.arm, start.arm)]
    alike = len({length for _, lengths in ends for length in lengths}) == 1
    compared = p is not start and p.collapsed + start.collapsed and alike
    change = arm_difference(*map(lasted, ends)) if compared else NO_DIFFERENCE
    steps = interval(change.mean, change.low, change.high, form="+.0f")
    found = changed((p.base,), p.runs, change, f"{p.value}: {steps} steps")
    return found if compared else replace(found, outcome=UNTESTABLE)


def _scope(results: Results, points_B: Sequence[Point], dose: str) -> Scope:
    return scope_of(arm_kinds.settings_of(results, points_B[0].arm), dose)


def _dose(results: Results, field: str, points_B: Sequence[Point]) -> str:
    """The mismatch under which one base arm's values are compared: that of the first, and the values, where they are
    what changes it."""
    first, *rest = [arm_kinds.dose(arm_kinds.settings_of(results, p.arm)) for p in points_B]
    return first if set(rest) <= {first} else f"{first}; {field}: {', '.join(p.value for p in points_B)}"


def _contrasts(results: Results, field: str, points_A: Sequence[Point], pair: tuple[str, str]) -> list[Verdict]:
    """Whether a value changes how far one base arm is above another: a difference of two differences, a value each."""
    places = {(p.base, p.value): p for p in points_A}
    reference, *others = dict.fromkeys(p.value for p in points_A)
    first, second = pair
    claim = CATALOGUE["ablation.{field}.contrast"].filled(field=field, first=first, second=second, start=reference)
    lines = []
    for value in others:
        four = [places[base, at].arm for at in (value, reference) for base in pair]
        scores_A = [[score.avg_at_k for score in results.evaluations[arm].scores] for arm in four]
        change = arm_contrast(scores_A, (1, -1, -1, 1))
        compared = [p for p in points_A if p.base == first and p.value in (reference, value)]
        scope = _scope(results, [places[first, reference]], _dose(results, field, compared))
        words = f"{value} against {reference}: {points(change)} points"
        lines.append(Line(claim, scope, changed(pair, change.n, change, words)))
    return decide(lines)

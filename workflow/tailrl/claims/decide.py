"""The one place that decides: from findings to verdicts, by each claim's rule and with Holm's correction."""

import math
from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tailrl.artifacts.claims import Verdict
from tailrl.claims.catalogue import Claim, Statement, words_of
from tailrl.claims.finding import (
    ALIKE,
    ASIDE,
    CHANGES,
    CONTRADICTED,
    DEFINITION,
    DIFFERS,
    MEASURED,
    MIXED,
    NOT_SEEN,
    OPEN,
    REPRODUCED,
    UNDECIDED,
    UNTESTABLE,
    Finding,
    measured,
)
from tailrl.config import words
from tailrl.config.jobs import Run
from tailrl.page_parts.number_text import points, scientific
from tailrl.stats.intervals import LEVEL, ONE_SIDED_LEVEL, Interval
from tailrl.stats.tests import Difference, holm

TESTED = {
    "directed": (REPRODUCED, CONTRADICTED),
    "change": (CHANGES, UNDECIDED),
    "refutes": (CONTRADICTED, UNDECIDED),
}
"""The rules that test, each with its outcomes if the test shows the effect or the opposite. `refutes` is for a
prediction that a difference contradicts."""

SILENT = frozenset({UNTESTABLE, NOT_SEEN})
"""The outcomes without an event, which show no p."""


class Scope(NamedTuple):
    """The conditions under which a finding holds."""

    policy: str
    task: str
    dose: str
    rate: str = ""


def scope_of(run: Run, dose: str | None = None, rate: str | None = None) -> Scope:
    """An arm's scope from the settings of its runs."""
    return Scope(
        policy=words.policy_name(run.policy),
        task=run.task.name,
        dose=words.dose(run) if dose is None else dose,
        rate=scientific(run.training.learning_rate) if rate is None else rate,
    )


class Line(NamedTuple):
    """The input of a verdict: a claim, its scope, and the finding."""

    claim: Claim
    scope: Scope
    finding: Finding


class Changes(NamedTuple):
    """The input of one verdict on several changes: whether any of them is shown.

    Attributes:
        none: what was seen, in words, if no change is shown.
        beside: words that are added in any case.
    """

    claim: Claim
    scope: Scope
    findings: Sequence[Finding]
    none: str
    beside: str = ""


def decide(lines: Sequence[Line]) -> list[Verdict]:
    """The verdict of each line, in order, with Holm's correction over the tests of each family.

    A directed claim is reproduced if its one-sided p, by Holm, is at most 2.5 %. It is contradicted if the p of its
    opposite is. So at most 5 % of studies have any wrong verdict in a family. A question without a direction has one
    test at the same level, which is 5 % two-sided. A line that is not testable, or saw nothing, shows no p, but if its
    finding has a p, it counts as a test.
    """
    untested = math.nan, math.nan
    tests = [(found.p_for, found.p_against) if claim.rule in TESTED else untested for claim, _, found in lines]
    adjusted_L = np.full((len(lines), 2), math.nan)
    families = defaultdict(list)
    for place, (claim, _, _) in enumerate(lines):
        families[claim.family or claim.id].append(place)
    for places in families.values():
        for side in (0, 1):
            adjusted_L[places, side] = holm([tests[place][side] for place in places])
    verdicts = []
    for (claim, scope, finding), p, p_holm in zip(lines, tests, adjusted_L.tolist(), strict=True):
        outcome = _outcome(claim, finding, *p_holm)
        p_shown, p_holm_shown = (p, p_holm) if outcome not in SILENT else (untested, untested)
        verdicts.append(_verdict(claim, scope, finding, outcome, _two_sided(*p_shown), _two_sided(*p_holm_shown)))
    return verdicts


def decide_changes(groups: Sequence[Changes]) -> list[Verdict]:
    """The verdict of each group, in order: that of its largest change, of the shown ones if there are any."""
    verdicts = iter(decide([Line(group.claim, group.scope, found) for group in groups for found in group.findings]))
    chosen = []
    for group in groups:
        every = [next(verdicts) for _ in group.findings]
        tested = [verdict for verdict in every if not math.isnan(verdict.effect)]
        shown = [verdict for verdict in tested if verdict.verdict == CHANGES]  # a smaller change can have a smaller p
        largest = max(shown or tested, key=lambda verdict: abs(verdict.effect), default=every[0])
        seen = [*([verdict.seen for verdict in shown] or [group.none]), group.beside]
        chosen.append(replace(largest, seen="; ".join(filter(None, seen))))
    return chosen


def decide_published(
    claim: Claim,
    arms: Sequence[str],
    difference: Difference,
    p_holm: float,
    words: str,
    outcome: str = "",
    planned: int = 0,
) -> Verdict:
    """The verdict on a claim by a published difference, whose p is by Holm over its study's own family already.

    Args:
        claim: expects the difference above 0, or below it.
        arms: those compared.
        difference: a share, with its 95 % interval and its two-sided p.
        p_holm: this p by Holm.
        words: what is compared.
        outcome: that of a margin, where the study has one.
        planned: how many units, such as warm starts, the study planned. With fewer nothing is decided.

    Raises:
        ValueError: the claim has no direction, and there is no outcome.
    """
    if not outcome and (claim.rule != "directed" or claim.direction == "either"):
        raise ValueError(f"{claim.id} has no direction, so a difference cannot decide it")
    if not outcome and difference.low == difference.high == 0:
        outcome = NOT_SEEN  # each unit has exactly the other arm's value
    if difference.n < planned:
        outcome, words = UNDECIDED, f"{difference.n} of {planned} so far, {words}"
    directed = REPRODUCED if (difference.mean > 0) == (claim.direction == "above") else CONTRADICTED
    finding = measured(tuple(arms), difference, f"{words}: {points(difference)} points")
    outcome = outcome or (directed if p_holm <= LEVEL else UNDECIDED)
    return _verdict(claim, Scope("", "", ""), finding, outcome, difference.p, p_holm)


def equivalence(difference: Interval, margin: float, p_holm: float) -> str:
    """Whether two arms score level within a margin that was written before: ALIKE, DIFFERS or UNDECIDED.

    Args:
        difference: with its 90 % interval. ALIKE asks that it lies within the margin: two one-sided tests at 5 % each.
        margin: above 0, in the difference's unit.
        p_holm: of the difference from 0. DIFFERS asks for less than 5 %, and for a difference beyond the margin.
    """
    if -margin <= difference.low and difference.high <= margin:
        return ALIKE
    return DIFFERS if p_holm < LEVEL and abs(difference.mean) > margin else UNDECIDED


def outcome_without_lines(statement: Statement) -> str:
    """The outcome of a statement that no line of any study decides."""
    return DEFINITION if statement.held_by else UNTESTABLE if statement.beyond else OPEN


def outcome_of_lines(outcomes: Set[str]) -> str:
    """The one outcome of a statement whose lines, on several claims, mismatches or engines, have these outcomes.

    `in part` if some of them decide nothing, MIXED if those that decide differ.
    """
    decided = outcomes - {UNDECIDED, *SILENT}
    if len(outcomes) == 1:
        return next(iter(outcomes))
    if len(decided) == 1:
        return f"{next(iter(decided))} in part"
    return MIXED if decided else UNDECIDED if UNDECIDED in outcomes else NOT_SEEN


def _verdict(claim: Claim, scope: Scope, finding: Finding, outcome: str, p: float, p_holm: float) -> Verdict:
    """The line of the report; p is two-sided."""
    words = words_of(claim.id)
    if not words:
        raise ValueError(f"no claim has the id {claim.id!r}")
    return Verdict(
        id=claim.id,
        claim=words,
        source=claim.source,
        verdict=outcome,
        **scope._asdict(),
        arms=", ".join(finding.arms),
        seeds=finding.seeds,
        effect=finding.effect,
        low=finding.low,
        high=finding.high,
        unit=claim.unit,
        p=p,
        p_holm=p_holm,
        seen=finding.words,
        endpoint=claim.endpoint,
    )


def _outcome(claim: Claim, finding: Finding, p_for: float, p_against: float) -> str:
    """The outcome by the claim's rule: of a test, a fact, or an interval and a limit.

    A theorem is set aside where its assumption fails. Without an event there is nothing to test: it was not seen where
    there is a measured effect.
    """
    if not finding.premise:
        return ASIDE
    if finding.events == 0:
        return UNTESTABLE if math.isnan(finding.effect) else NOT_SEEN
    # Without p or interval they are NaN, and the comparisons are false.
    shown, opposite = TESTED.get(claim.rule, (REPRODUCED, CONTRADICTED))
    match claim.rule:
        case "told":
            return MEASURED
        case "fact":
            holds, fails = finding.holds is True, finding.holds is False
        case "above":
            holds, fails = finding.low > claim.limit, finding.high < claim.limit
        case _:
            holds = p_for <= ONE_SIDED_LEVEL and finding.holds is not False
            fails = p_against <= ONE_SIDED_LEVEL
    return shown if holds else opposite if fails else UNDECIDED


def _two_sided(p_for: float, p_against: float) -> float:
    return float(np.minimum(1.0, 2 * np.fmin(p_for, p_against)))

"""The three sentences that open a report: the largest difference in score, the other differences, the mismatch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tailrl.artifacts.claims import Verdict
from tailrl.artifacts.results import Results
from tailrl.claims.catalogue import CATALOGUE
from tailrl.claims.finding import CONTRADICTED, REPRODUCED
from tailrl.config.words import dose
from tailrl.page_parts.number_text import count, p_value, points, short
from tailrl.reports.collapse.numbers import collapses
from tailrl.reports.mismatch.numbers import mean_k3
from tailrl.reports.scores.numbers import Comparison, Gain
from tailrl.stats.intervals import LEVEL
from tailrl.stats.tests import Difference

MOST_NAMED_EFFECTS = 2
"""The second sentence names this many further decided differences, and counts the rest."""

MOST_PAIRS = 4
"""It names up to this many undecided pairs."""


@dataclass(frozen=True, slots=True)
class Effect:
    """avg@k of arm `first` minus arm `second`, and whether it is decided.

    Attributes:
        found: the difference with its interval, shares of 1; its p is corrected.
        decided: by the claim about the two arms if there is one, else by the table of differences.
        claim: the line of this claim, or None.
        other_p: p of the table of differences, if that decides otherwise than the claim; else NaN.
    """

    first: str
    second: str
    found: Difference
    decided: bool
    claim: Verdict | None = None
    other_p: float = math.nan


def effects(comparisons: Sequence[Comparison], verdicts: Sequence[Verdict]) -> list[Effect]:
    """The reported differences and those of claims on two arms' scores: decided ones first, each part by size."""
    reported = {frozenset((c.first, c.second)): c for c in comparisons if c.why}
    found: dict[frozenset[str], Effect] = {}
    for verdict in verdicts:
        arms, claim = verdict.arms.split(", "), CATALOGUE.get(verdict.id)
        if claim and claim.measure == "score" and len(arms) == 2 and not math.isnan(verdict.effect):
            found.setdefault(frozenset(arms), _by_claim(verdict, arms[0], arms[1], reported.get(frozenset(arms))))
    for pair, c in reported.items():
        corrected = Difference(c.both.mean, c.both.low, c.both.high, c.both_p_holm, c.both.n)
        found.setdefault(pair, Effect(c.first, c.second, corrected, c.both_p_holm <= LEVEL))
    return sorted(found.values(), key=lambda effect: (not effect.decided, -abs(effect.found.mean)))


def _by_claim(verdict: Verdict, first: str, second: str, table: Comparison | None) -> Effect:
    decided = verdict.verdict in (REPRODUCED, CONTRADICTED)
    found = Difference(verdict.effect, verdict.low, verdict.high, verdict.p_holm, verdict.seeds)
    other_p = table.both_p_holm if table and not math.isnan(verdict.p_holm) else math.nan
    differs = not math.isnan(other_p) and (other_p <= LEVEL) != decided
    return Effect(first, second, found, decided, verdict, other_p if differs else math.nan)


def three_sentences(
    results: Results, gains: Sequence[Gain], comparisons: Sequence[Comparison], verdicts: Sequence[Verdict]
) -> tuple[str, str, str]:
    """The sentences in Markdown: the first difference, the other ones or the gains, and the mismatch."""
    found = effects(comparisons, verdicts)
    largest = "largest difference" if found[1:] else "difference"
    headline = (
        _headline(found[0], largest, results, gains) if found else "The study has one arm, so no arms are compared."
    )
    return headline, _others(found[1:]) if found[1:] else _gains(results, gains), _mismatch(results)


def _headline(effect: Effect, largest: str, results: Results, gains: Sequence[Gain]) -> str:
    score = {gain.arm: f"{100 * gain.avg.mean:.1f} %" for gain in gains}
    doses_by_arm = {arm: dose(results.settings(arm)) for arm in (effect.first, effect.second)}
    doses = list(dict.fromkeys(doses_by_arm.values()))
    where = doses[0] if len(doses) == 1 else "; ".join(f"`{arm}`: {doses_by_arm[arm]}" for arm in doses_by_arm)
    scores = f"{score[effect.first]} against {score[effect.second]}, {_size(effect)} ({where})"
    if effect.decided:
        side = "above" if effect.found.mean > 0 else "below"
        said = f"`{effect.first}` ends {side} `{effect.second}` on held-out problems: {scores}."
    elif math.isnan(effect.found.low):
        why = "a single seed, or seeds that agree, do not show how much runs differ"
        said = f"Nothing is decided between arms: {why}. The {largest} is {_pair(effect)}: {scores}."
    else:
        said = f"The {largest} in held-out score is not decided: {_pair(effect)}, {scores}."
    if effect.decided and effect.claim:
        said += f" For these arms the claim “{effect.claim.claim}” is {effect.claim.verdict}."
    if not math.isnan(effect.other_p):
        by_claim, by_table = p_value(effect.found.p), p_value(effect.other_p)
        said += (
            f" This is borderline: p is {by_claim} by the claim's test over seeds, {by_table} over seeds and problems."
        )
    return said


def _others(rest: Sequence[Effect]) -> str:
    """The further decided differences, and how far the intervals of the others reach."""
    decided = [effect for effect in rest if effect.decided]
    said = [
        f"`{effect.first}` {'above' if effect.found.mean > 0 else 'below'} `{effect.second}`, {_size(effect)}"
        for effect in decided[:MOST_NAMED_EFFECTS]
    ]
    if decided[MOST_NAMED_EFFECTS:]:
        said.append(f"and {len(decided) - MOST_NAMED_EFFECTS} more")
    parts = [f"Also decided: {'; '.join(said)}."] if said else []
    known = [effect for effect in rest if not effect.decided and not math.isnan(effect.found.low)]
    if len(known) == 1:
        parts.append(f"Not decided: {_pair(known[0])}, {_size(known[0])}.")
    elif known:
        low, high = min(e.found.low for e in known), max(e.found.high for e in known)
        few = f"{'; '.join(map(_pair, known))}. Their" if len(known) <= MOST_PAIRS else f"{len(known)} others. Their"
        parts.append(f"Not decided: {few} 95 % intervals reach from {100 * low:+.1f} to {100 * high:+.1f} points.")
    if without := len(rest) - len(decided) - len(known):
        parts.append(f"Without an interval: {count(without, 'other difference')}.")
    return " ".join(parts)


def _gains(results: Results, gains: Sequence[Gain]) -> str:
    said = []
    for gain in gains:
        shown = gain.gain_p_holm <= LEVEL
        side = "not decided" if not shown else "above" if gain.gain.mean > 0 else "below"
        said.append(f"`{gain.arm}` {side}, {points(gain.gain)} points")
    base = 100 * results.base.scores[0].avg_at_k
    return f"Against the untrained policy's {base:.1f} %: {'; '.join(said)}."


def _mismatch(results: Results) -> str:
    """The arms with the largest and the smallest mismatch, and the collapsed runs."""
    k3 = {arm: value for arm in results.arms if not math.isnan(value := mean_k3(results, arm))}
    what = "mean k3 between sampler and trainer"
    if not k3:
        said = "The size of the mismatch was not recorded."
    elif short(min(k3.values())) == short(max(k3.values())):
        said = f"The mismatch ({what}) is {short(max(k3.values()))} nats a token."
    else:
        most, least = max(k3, key=k3.__getitem__), min(k3, key=k3.__getitem__)
        ends = f"{short(k3[most])} nats a token in `{most}`, the most, and {short(k3[least])} in `{least}`, the least"
        said = f"The mismatch ({what}) is {ends}."
    fallen, runs = {}, 0
    for arm in results.arms:
        found = collapses(results.runs[arm])
        runs += found.runs
        if found.collapsed:
            fallen[arm] = f"{found.collapsed} of {found.runs} in `{arm}`"
    if not runs:
        return said
    if not fallen:
        return f"{said} No run of {runs} collapsed."
    return f"{said} Collapsed runs: {', '.join(fallen.values())}; none elsewhere."


def _pair(effect: Effect) -> str:
    return f"`{effect.first}` less `{effect.second}`"


def _size(effect: Effect) -> str:
    """The difference in points with its interval; its p too if that alone leaves the difference undecided."""
    found = effect.found
    clear = not effect.decided and not math.isnan(found.p) and not found.low <= 0 <= found.high
    return f"{points(found)} points" + (f", p {p_value(found.p)} after correction" if clear else "")

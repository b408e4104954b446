"""The headline of a study's page, in sentences: what differs under each kind of mismatch, and its size."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tailrl.artifacts.claims import Verdict
from tailrl.artifacts.results import Results
from tailrl.claims.catalogue import CATALOGUE
from tailrl.claims.finding import CONTRADICTED, REPRODUCED
from tailrl.config.arm_kinds import has_exact_engine, is_disturbed, is_matched, is_mismatched
from tailrl.config.jobs import Run
from tailrl.config.policy import ScratchPolicy
from tailrl.config.vocabulary import ByRho, log_rho
from tailrl.config.words import dose, short_remedy
from tailrl.page_parts.number_text import count, p_value, points, short
from tailrl.reports.arm_pairs import references
from tailrl.reports.collapse.numbers import collapses
from tailrl.reports.mismatch.numbers import mean_k3
from tailrl.reports.scores.numbers import Comparison, Gain, greedy_differences, greedy_scores
from tailrl.stats.intervals import LEVEL
from tailrl.stats.tests import Difference

MOST_PAIRS = 6  # a sentence names this many differences, and counts the rest

MOST_NAMED = 8  # the first sentence names this many arms, or the best and the worst

LEVEL_POINTS = 5.0  # arms whose intervals all lie within this many points of each other are said to end level

OWN, MADE, NONE = "the engines' own mismatch", "a mismatch planted on purpose", "no mismatch"
"""The kinds of mismatch, in the order of the sentences."""


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


def headline(
    results: Results, gains: Sequence[Gain], comparisons: Sequence[Comparison], verdicts: Sequence[Verdict]
) -> tuple[str, ...]:
    """The sentences in Markdown: skill, differences by kind of mismatch, few arms' gains, the mismatch, the rest."""
    found = effects(comparisons, verdicts)
    by_kind = {one: [effect for effect in found if _kind(effect, results) == one] for one in (OWN, MADE, NONE)}
    said = [_differences(kind, own, results, gains) for kind, own in by_kind.items() if own]
    if not found:
        said = ["The study has one arm, so no arms are compared."]
    if len(found) <= 1:
        said.append(_gains(results, gains))
    said.append(_mismatch(results))
    # An arm of the user's own may be behind a count.
    if unnamed := [gain for gain in gains if not any(f"`{gain.arm}`" in sentence for sentence in said)]:
        scores = [f"{_named(gain.arm, results)}, {100 * gain.avg.mean:.1f} %" for gain in unnamed]
        said.append(f"The other arms' scores on held-out problems: {'; '.join(scores)}.")
    return (*_skill(results), *said)


def _skill(results: Results) -> tuple[str, ...]:
    """The greedy scores: what each policy can do, however sure it is; nothing where they were not measured."""
    if not (scores := greedy_scores(results)):
        return ()
    untrained, *trained = scores
    trained.sort(key=lambda score: -score.greedy.mean)
    named = trained if len(trained) <= MOST_NAMED else [trained[0], trained[-1]]
    after = "after training" if named is trained else "after training, in the best and the worst arm,"
    each = ", ".join(f"{100 * score.greedy.mean:.1f} % with {_named(score.arm, results)}" for score in named)
    return (
        f"Skill is the greedy score: the held-out problems solved with the most probable token each time. It is "
        f"{100 * untrained.greedy.mean:.1f} % untrained, and {after} {each}. Other scores here are at temperature 1.",
    )


def _kind(effect: Effect, results: Results) -> str:
    runs = [results.settings(arm) for arm in (effect.first, effect.second)]
    if any(map(_planted, runs)):
        return MADE
    return OWN if any(map(is_mismatched, runs)) else NONE


def _planted(run: Run) -> bool:
    return is_disturbed(run) and not is_matched(run)


def _differences(kind: str, found: Sequence[Effect], results: Results, gains: Sequence[Gain]) -> str:
    """The differences under one kind of mismatch: decided ones, then how far the others' intervals reach."""
    score = {gain.arm: f"{100 * gain.avg.mean:.1f} %" for gain in gains}
    greedy = {(one.first, one.second): one.difference for one in greedy_differences(results, references(results))}
    arms = dict.fromkeys(arm for effect in found for arm in (effect.first, effect.second))
    doses = {_dose(run) for run in map(results.settings, arms) if kind == NONE or is_mismatched(run)}
    where = f"Under {kind}" + (f" ({doses.pop()})" if len(doses) == 1 else "")
    decided = [effect for effect in found if effect.decided]
    others = [effect for effect in found if not effect.decided and not math.isnan(effect.found.low)]
    unknown = [effect for effect in found if not effect.decided and math.isnan(effect.found.low)]
    parts = []
    for number, effect in enumerate(decided[:MOST_PAIRS]):
        side = "above" if effect.found.mean > 0 else "below"
        first, second = (_named(arm, results) for arm in (effect.first, effect.second))
        ends = f"{first} ends {side} {second}{_in_seeds(effect, side, results)}{_construction(effect, results)}"
        both = f"{score[effect.first]} against {score[effect.second]} on held-out problems, " if not number else ""
        parts.append(f"{ends}: {both}{_size(effect)}{_greedily(effect, greedy)}{_borderline(effect)}")
    if decided[MOST_PAIRS:]:
        parts.append(f"{count(len(decided) - MOST_PAIRS, 'more difference')} decided")
    if others:
        parts.append(_undecided(others, results, greedy, alone=not decided))
    if unknown:
        parts.append(
            "nothing is decided where a single seed, or seeds that agree, do not show how much runs differ: "
            + "; ".join(
                f"{_pair(effect, results)}, {score[effect.first]} against {score[effect.second]}, {_size(effect)}"
                f"{_construction(effect, results)}"
                for effect in unknown[:MOST_PAIRS]
            )
            + (f"; and {len(unknown) - MOST_PAIRS} more" if unknown[MOST_PAIRS:] else "")
        )
    first, *rest = parts
    return ". ".join([f"{where}, {first}", *(part[0].upper() + part[1:] for part in rest)]) + "."


def _greedily(effect: Effect, greedy: Mapping[tuple[str, str], Difference]) -> str:
    """The same difference in greedy scores, where they were measured."""
    found = greedy.get((effect.first, effect.second))
    return f" (greedy: {points(found)})" if found else ""


def _undecided(
    others: Sequence[Effect], results: Results, greedy: Mapping[tuple[str, str], Difference], *, alone: bool
) -> str:
    low, high = (100 * end for end in (min(e.found.low for e in others), max(e.found.high for e in others)))
    if alone and max(-low, high) <= LEVEL_POINTS:
        said = f"the arms end level, within {LEVEL_POINTS:g} points: "
    else:
        said = "no arm is shown to end above or below another: " if alone else "not decided: "
    if len(others) <= MOST_PAIRS:
        return said + "; ".join(_with_seeds(effect, results) + _greedily(effect, greedy) for effect in others)
    reach = f"{count(len(others), 'difference')}, with 95 % intervals from {low:+.1f} to {high:+.1f} points"
    return f"{said}{reach}; the largest is {_with_seeds(others[0], results)}{_greedily(others[0], greedy)}"


def _with_seeds(effect: Effect, results: Results) -> str:
    seeds = _in_seeds(effect, "above", results)
    return f"{_pair(effect, results)}, {_size(effect)}" + (f", above{seeds}" if seeds else "")


def _borderline(effect: Effect) -> str:
    if math.isnan(effect.other_p):
        return ""
    by_claim, by_table = p_value(effect.found.p), p_value(effect.other_p)
    return f" (borderline: p is {by_claim} by the claim's test over seeds, {by_table} over seeds and problems)"


def _construction(effect: Effect, results: Results) -> str:
    """Why the higher arm wins by construction, where it does: its threshold lies above the floor of random tokens."""
    run = results.settings(effect.first if effect.found.mean > 0 else effect.second)
    vocabulary, floor = run.vocabulary, run.disturbance.floor
    if not isinstance(vocabulary, ByRho) or not floor or is_matched(run) or vocabulary.side == "trainer":
        return ""
    size = run.policy.vocabulary_size if isinstance(run.policy, ScratchPolicy) else 0
    if not size and not vocabulary.rho.endswith("/V"):
        return ""
    above = log_rho(vocabulary.rho, size or 1) > math.log(floor / (size or 1))
    why = "its threshold lies above the floor, so it samples no random token"
    return f", by construction ({why})" if above else ""


def _in_seeds(effect: Effect, side: str, results: Results) -> str:
    """In how many of the seeds that both arms have the first arm is on this side; empty if they share none."""
    arms = (effect.first, effect.second)
    first, second = ({score.seed: score.avg_at_k for score in results.evaluations[arm].scores} for arm in arms)
    differences = [first[seed] - second[seed] for seed in first.keys() & second.keys()]
    on_side = sum(one > 0 if side == "above" else one < 0 for one in differences)
    return f" in {on_side} of {count(len(differences), 'seed')}" if differences else ""


def _dose(run: Run) -> str:
    """The engine and its mismatch in words; of a floor also what it does."""
    floor = run.disturbance.floor
    return dose(run) + (f", so {100 * floor:g} % of the sampled tokens are random" if floor else "")


def _gains(results: Results, gains: Sequence[Gain]) -> str:
    said = []
    for gain in gains:
        shown = gain.gain_p_holm <= LEVEL
        side = "not decided" if not shown else "above" if gain.gain.mean > 0 else "below"
        said.append(f"{_named(gain.arm, results)} {side}, {points(gain.gain)} points")
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
        planted = " (planted)" if _planted(results.settings(most)) else ""
        said = (
            f"The mismatch ({what}) is {short(k3[most])} nats a token{planted} with {_named(most, results)}, the most, "
            f"and {short(k3[least])} with {_named(least, results)}, the least."
        )
    fallen, runs = {}, 0
    for arm in results.arms:
        found = collapses(results.runs[arm])
        runs += found.runs
        if found.collapsed:
            fallen[arm] = f"{found.collapsed} of {found.runs} with {_named(arm, results)}"
    if not runs:
        return said
    if not fallen:
        return f"{said} No run of {runs} collapsed."
    return f"{said} Collapsed runs: {', '.join(fallen.values())}; none elsewhere."


def _named(arm: str, results: Results) -> str:
    """The arm's remedy in words, and its name."""
    run = results.settings(arm)
    words = short_remedy(run)
    if is_matched(run):
        words += ", equally noisy without a mismatch"
    elif has_exact_engine(run):
        words += " without a mismatch"
    return f"{words} (`{arm}`)"


def _pair(effect: Effect, results: Results) -> str:
    return f"{_named(effect.first, results)} minus {_named(effect.second, results)}"


def _size(effect: Effect) -> str:
    """The difference in points with its interval; its p too if that alone leaves the difference undecided."""
    found = effect.found
    clear = not effect.decided and not math.isnan(found.p) and not found.low <= 0 <= found.high
    return f"{points(found)} points" + (f", p {p_value(found.p)} after correction" if clear else "")

"""How claims on held-out scores are measured: the score of one arm minus that of another."""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tailrl.artifacts.results import Results
from tailrl.claims.catalogue import Claim
from tailrl.claims.finding import Finding, measured
from tailrl.page_parts.number_text import points
from tailrl.reports.arm_pairs import pairs_of
from tailrl.reports.scores.numbers import seed_scores
from tailrl.stats.tests import Difference, all_hold, arm_difference, one_sided


def score(claim: Claim, results: Results) -> Iterator[Finding]:
    """avg@k of one arm minus that of another, over seeds (Welch): above 0."""
    for arms in pairs_of(claim, results):
        first_S, second_S = (seed_scores(results, arm) for arm in arms)
        found = arm_difference(first_S, second_S)
        words = f"avg@k of {arms[0]} minus that of {arms[1]} is {points(found)} points"
        if claim.reported is not None and not math.isnan(found.low):
            words += _beside_reported(claim.reported, found, float(np.mean(second_S)))
        yield measured(arms, found, words, *one_sided(found))


def _beside_reported(reported: float, found: Difference, control: float) -> str:
    """Whether the interval contains the paper's effect, as points and relative to the control."""
    sizes = {"as points": reported, "as relative": reported * control}
    said = [f"{'inside' if found.low <= size <= found.high else 'outside'} {how}" for how, size in sizes.items()]
    return f"; of this interval the paper's {100 * reported:g} % is {', '.join(said)}"


def alike(claim: Claim, results: Results) -> Iterator[Finding]:
    """The same difference of scores as in `score`: smaller than the limit in either direction."""
    for found in score(claim, results):
        first_S, second_S = (seed_scores(results, arm) for arm in found.arms)
        low, high = (one_sided(arm_difference(first_S + shift, second_S)) for shift in (claim.limit, -claim.limit))
        p_for, p_against = all_hold(low, high[::-1])
        yield replace(found, p_for=p_for, p_against=p_against)


def above_each(claim: Claim, results: Results) -> Iterator[Finding]:
    """The differences of `score` from an arm of each kind in `against`: all above 0."""
    kinds = [list(score(claim.model_copy(update={"against": (kind,)}), results)) for kind in claim.against]
    for arm in dict.fromkeys(found.arms[0] for found in kinds[0]):
        alone = [[found for found in kind if found.arms[0] == arm] for kind in kinds]
        if all(alone):
            parts = [found for kind in alone for found in kind]
            least = min(parts, key=lambda part: part.effect)
            p_for, p_against = all_hold(*((part.p_for, part.p_against) for part in parts))
            yield replace(
                least,
                arms=(arm, *(part.arms[1] for part in parts)),
                seeds=min(part.seeds for part in parts),
                words="; ".join(part.words for part in parts),
                p_for=p_for,
                p_against=p_against,
            )


ENDPOINTS = (score, alike, above_each)
"""A claim's entry in the catalogue names its function."""

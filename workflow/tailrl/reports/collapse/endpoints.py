"""How claims on collapses are measured."""

import math
from collections.abc import Iterator
from dataclasses import replace

from tailrl.artifacts.results import Results
from tailrl.claims.catalogue import Claim
from tailrl.claims.finding import Finding, measured, nothing
from tailrl.reports.arm_pairs import pairs_of
from tailrl.reports.collapse.numbers import collapses, deepest_loss, tells_collapse
from tailrl.stats.intervals import share_difference
from tailrl.stats.survival import log_rank

HARDER = "problems become harder as the reward rises: a collapse cannot be told from it"


def survival(claim: Claim, results: Results) -> Iterator[Finding]:
    """One arm's runs collapse sooner than another's: log-rank test by permutation of runs."""
    for arms in pairs_of(claim, results):
        first, second = (collapses(results.runs[arm]) for arm in arms)
        counts = [(first.collapsed, first.runs), (second.collapsed, second.runs)]
        if not all(n for _, n in counts):
            harder = any(not tells_collapse(run.metrics) for arm in arms for run in results.runs[arm])
            yield nothing(arms, HARDER) if harder else nothing(arms)
            continue
        share = share_difference(*counts)
        words = "; ".join(f"{k} of {n} runs of {arm} collapsed" for arm, (k, n) in zip(arms, counts, strict=True))
        found = replace(measured(arms, share, words), events=first.collapsed + second.collapsed)
        if not found.events:
            lost = 100 * deepest_loss([run for arm in arms for run in results.runs[arm]])
            deepest = f"; the deepest loss is {lost:.0f} % of a run's best reward" if not math.isnan(lost) else ""
            yield replace(found, words=f"no run collapsed{deepest}")
        else:
            yield replace(found, p_for=log_rank(first, second), p_against=log_rank(second, first))


ENDPOINTS = (survival,)
"""A claim's entry in the catalogue names its function."""

"""Verdicts of a study's trained arms: one line per claim and set of arms to which it applies."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from tailrl.artifacts.claims import Verdict
from tailrl.artifacts.results import Results
from tailrl.claims.catalogue import TRAINED_CLAIMS, Claim
from tailrl.claims.decide import Line, decide, scope_of
from tailrl.claims.finding import Finding, nothing, opposite
from tailrl.reports.collapse.endpoints import ENDPOINTS as OF_COLLAPSE
from tailrl.reports.mismatch.endpoints import ENDPOINTS as OF_MISMATCH
from tailrl.reports.scores.endpoints import ENDPOINTS as OF_SCORES

MEASURES: dict[str, Callable[[Claim, Results], Iterator[Finding]]] = {
    endpoint.__name__: endpoint for endpoint in (*OF_SCORES, *OF_MISMATCH, *OF_COLLAPSE)
}
"""The kinds of endpoints by their names in the catalogue.

Each yields findings, one for each set of arms to which a claim applies: that the endpoint lies above the claim's limit
or control. Arms are found by their settings (`arm_kinds.KINDS`), never by their names.
"""


def judge(results: Results, claims: Iterable[Claim] = TRAINED_CLAIMS) -> list[Verdict]:
    """The verdicts, claim by claim; a claim without suitable arms has one line that says so."""
    lines = []
    for claim in claims:
        for found in list(_found(claim, results)) or [nothing((), f"the study has no {claim.needs}")]:
            run = results.settings((*found.arms, results.arms[0])[0])
            scope = scope_of(run) if found.arms else scope_of(run, dose="", rate="")
            lines.append(Line(claim, scope, found))
    return decide(lines)


def _found(claim: Claim, results: Results) -> Iterator[Finding]:
    """The findings for the claim's own direction."""
    for found in MEASURES[claim.measure](claim, results):
        match claim.direction:
            case "above":
                yield found
            case "below":
                yield opposite(found)
            case "either":
                # Two one-sided tests at half the level: either may hold.
                yield replace(found, p_for=min(found.p_for, found.p_against), p_against=math.nan)

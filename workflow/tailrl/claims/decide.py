"""The papers' claims, decided: one line for each claim and each set of arms that can speak to it."""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tailrl.analysis import arm_kinds
from tailrl.artifacts.results import Results
from tailrl.claims import claims, mechanism, remedies  # noqa: F401 - each puts its own into CLAIMS, in this order
from tailrl.claims.finding import (
    CHANGES,
    CLAIMS,
    CONTRADICTED,
    OPEN,
    REPRODUCED,
    UNDECIDED,
    UNTESTABLE,
    Claim,
    Finding,
    words_of,
)
from tailrl.stats.intervals import LEVEL as TWO_SIDED_LEVEL
from tailrl.stats.intervals import ONE_SIDED_LEVEL as LEVEL
from tailrl.stats.tests import Difference, holm


@dataclass(frozen=True, slots=True)
class Verdict:
    """A line of the report: the claim, its verdict, where that holds, and what was seen.

    Attributes:
        id: of the claim; claim: its words, which are the id's.
        policy, task, dose, arms, seeds: the scope; seeds are the runs of the arm with fewest.
        effect, low, high, unit: the endpoint with its interval over seeds.
        p, p_holm: two-sided, raw and by Holm over the tests of the claim's family; NaN where no test decides.
        seen: the same in words.
        endpoint: the primary endpoint, fixed beforehand.
    """

    id: str
    claim: str = field(init=False)
    source: str
    verdict: str
    policy: str
    task: str
    dose: str
    arms: str
    seeds: int
    effect: float
    low: float
    high: float
    unit: str
    p: float
    p_holm: float
    seen: str
    endpoint: str

    def __post_init__(self) -> None:
        words = words_of(self.id)
        if not words:
            raise ValueError(f"no claim has the id {self.id!r}")
        object.__setattr__(self, "claim", words)


def judge(results: Results) -> list[Verdict]:
    """The verdicts on every claim, claim by claim; a claim that no arm can speak to has one that says so.

    Reproduced: the one-sided p that the claim holds, by Holm over the tests of its family, is at most 2.5 %.
    Contradicted: the same of its opposite. In a family, then, at most 5 % of studies give any wrong verdict of these.
    """
    found = [(claim, finding) for claim in CLAIMS for finding in _findings(results, claim)]
    verdicts: dict[int, Verdict] = {}
    for family in {claim.family for claim in CLAIMS}:
        places = [place for place, (claim, _) in enumerate(found) if claim.family == family]
        p_for = holm([found[place][1].p_for for place in places])
        p_against = holm([found[place][1].p_against for place in places])
        for place, holds, fails in zip(places, p_for.tolist(), p_against.tolist(), strict=True):
            verdicts[place] = _verdict(results, *found[place], holds, fails)
    return [verdicts[place] for place in range(len(found))]


def change_verdict(
    id: str, settings: Mapping[str, Any], arms: str, seeds: int, change: Difference, p_holm: float, *, unit: str,
    seen: str, endpoint: str,
) -> Verdict:  # fmt: skip
    """The line on a question without a direction: whether something changes, by the p of its change."""
    return Verdict(
        id=id,
        source=OPEN,
        verdict=CHANGES if p_holm <= TWO_SIDED_LEVEL else UNDECIDED,
        policy=arm_kinds.policy_name(settings),
        task=_task(settings),
        dose=arm_kinds.dose(settings),
        arms=arms,
        seeds=seeds,
        effect=change.mean,
        low=change.low,
        high=change.high,
        unit=unit,
        p=change.p,
        p_holm=p_holm,
        seen=seen,
        endpoint=endpoint,
    )


def _task(settings: Mapping[str, Any]) -> str:
    return str(settings.get("task.name", "not recorded"))


def _findings(results: Results, claim: Claim) -> list[Finding]:
    words = f"the study has no {claim.needs}"
    return list(claim.find(results)) or [Finding((), 0, math.nan, math.nan, math.nan, words, outcome=UNTESTABLE)]


def _verdict(results: Results, claim: Claim, finding: Finding, p_for: float, p_against: float) -> Verdict:
    tested = REPRODUCED if p_for <= LEVEL else CONTRADICTED if p_against <= LEVEL else UNDECIDED
    settings = arm_kinds.settings_of(results, (*finding.arms, results.arms[0])[0])
    return Verdict(
        id=claim.id,
        source=claim.source,
        verdict=finding.outcome or tested,
        policy=arm_kinds.policy_name(settings),
        task=_task(settings),
        dose=arm_kinds.dose(settings) if finding.arms else "",
        arms=", ".join(finding.arms),
        seeds=finding.seeds,
        effect=finding.effect,
        low=finding.low,
        high=finding.high,
        unit=claim.unit,
        p=_two_sided(finding.p_for, finding.p_against),
        p_holm=_two_sided(p_for, p_against),
        seen=finding.words,
        endpoint=" ".join((inspect.getdoc(claim.find) or "").split()),
    )


def _two_sided(p_for: float, p_against: float) -> float:
    return float(np.minimum(1.0, 2 * np.fmin(p_for, p_against)))

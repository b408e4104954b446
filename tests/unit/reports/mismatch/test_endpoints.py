"""The claims on remedies, conventions of the ratio and the bias bound: each in each of its outcomes."""

import math
from typing import Any

import numpy as np
import pytest
from claims_fixture import (
    DVP,
    DVP_MIS,
    EXACT,
    MATCHED,
    NAIVE,
    NOISE,
    PAPERS_DVP,
    SEEDS,
    STEPS,
    Made,
    around,
    falling,
    made,
    verdicts,
)
from scipy import stats

from tailrl.claims.catalogue import read_claims
from tailrl.claims.finding import CONTRADICTED, MEASURED, NOT_SEEN, REPRODUCED, UNDECIDED, UNTESTABLE
from tailrl.stats.tests import arm_difference

pytestmark = pytest.mark.filterwarnings("error")

TIS: dict[str, Any] = {"correction": {"token": "tis"}}
REJECT, REJECT_K1 = ({"correction": {"sequence": mean}} for mean in ("reject_k3", "reject_k1"))
REJECT_PPO = {"correction": {"sequence": "reject_k3", "rejects": "r_ppo"}}
VETOED_K1 = {"correction": {"sequence": "reject_k1", "veto": 1e-4}}
TIS_REJECT = {"correction": {"token": "tis", "sequence": "reject_k1"}}
MIS = {"correction": {"sequence": "mis", "veto": 1e-4}}
ENTROPY = {"vocabulary": {"rule": "entropy", "rho": "e-5"}}
BUDGET = {"vocabulary": {"rule": "min_p", "rho": "e-5", "adapt": "budget", "budget": 0.1}}
BYPASS, RECOMPUTE = ({"clip": {"ratio": ratio, "low": 0.2, "high": 0.2}} for ratio in ("bypass", "recompute"))
LOW, NEAR, HIGH, WIDE = around(0.3, 0.05), around(0.31, 0.02), around(0.5, 0.05), around(0.4, 0.3)
SPREAD, TENTH = around(1.0, 0.3), [0.1] * SEEDS
HALF = STEPS // 2


def grown(*powers: float) -> list[list[float]]:
    """k3 of runs that end at so many powers of ten times their start."""
    return [[1e-3] * HALF + [1e-3 * 10**power] * (STEPS - HALF) for power in powers]


def some(values: list[float]) -> list[list[float]]:
    """A number in the first step and zeros after it, of each run."""
    return [[value] + [0.0] * (STEPS - 1) for value in values]


def rising(*changes: float) -> list[list[float]]:
    """Rewards of runs that change by so much at half their length."""
    return [[0.5] * HALF + [0.5 + change] * (STEPS - HALF) for change in changes]


def scored(claim: str, better: dict[str, Any], worse: dict[str, Any]) -> list[tuple[str, str, dict[str, Made]]]:
    """The outcomes of a claim that one arm ends above another."""
    return [
        (claim, REPRODUCED, {"a": made(worse, score=LOW), "b": made(better, score=HIGH)}),
        (claim, CONTRADICTED, {"a": made(worse, score=HIGH), "b": made(better, score=LOW)}),
        (claim, UNDECIDED, {"a": made(worse, score=LOW), "b": made(better, score=WIDE)}),
        (claim, UNTESTABLE, {"a": made(worse, score=LOW), "b": made({**better, **NOISE}, score=HIGH)}),
        (claim, UNTESTABLE, {"a": made({**EXACT, **worse}, score=LOW), "b": made({**EXACT, **better}, score=HIGH)}),
    ]


def three(together: list[float], truncated: list[float], rejected: list[float]) -> dict[str, Made]:
    """Truncation, rejection, and both."""
    return {
        "a": made(TIS, score=truncated),
        "b": made(REJECT, score=rejected),
        "c": made(TIS_REJECT, score=together),
    }


OUTCOMES: list[tuple[str, str, dict[str, Made]]] = [
    *scored("vexact.c.tis", TIS, NAIVE),
    *scored("vexact.c.rejection", REJECT, NAIVE),
    *[
        ("vexact.c.both", outcome, three(together, truncated, rejected))
        for outcome, together, truncated, rejected in (
            (REPRODUCED, HIGH, LOW, NEAR),
            (CONTRADICTED, LOW, LOW, HIGH),  # below one of them
            (UNDECIDED, HIGH, LOW, HIGH),  # above one, like the other
            (UNDECIDED, WIDE, LOW, LOW),
        )
    ],
    ("vexact.c.both", UNTESTABLE, {"a": made(TIS, score=LOW), "b": made(TIS_REJECT, score=HIGH)}),
    ("vexact.c.both", UNTESTABLE, {"a": made(REJECT, score=LOW), "b": made(TIS_REJECT, score=HIGH)}),
    ("vexact.c.k1_or_k3", REPRODUCED, {"a": made(REJECT, score=LOW), "b": made(REJECT_K1, score=NEAR)}),
    ("vexact.c.k1_or_k3", CONTRADICTED, {"a": made(REJECT, score=LOW), "b": made(REJECT_K1, score=HIGH)}),
    ("vexact.c.k1_or_k3", CONTRADICTED, {"a": made(REJECT, score=HIGH), "b": made(REJECT_K1, score=LOW)}),
    ("vexact.c.k1_or_k3", UNDECIDED, {"a": made(REJECT, score=LOW), "b": made(REJECT_K1, score=WIDE)}),
    ("vexact.c.k1_or_k3", UNDECIDED, {"a": made(REJECT, score=WIDE), "b": made(REJECT_K1, score=WIDE)}),
    ("vexact.c.k1_or_k3", UNTESTABLE, {"a": made(REJECT, score=LOW), "b": made(REJECT, score=LOW)}),
    ("vexact.c.k1_or_k3", UNTESTABLE, {"a": made(REJECT, score=LOW), "b": made(VETOED_K1, score=LOW)}),
    *scored("vexact.c.r_corr", {**RECOMPUTE, **REJECT}, {**RECOMPUTE, **REJECT_PPO}),
    *scored("dvp.mis.score", MIS, NAIVE),
    *scored("open.dvp_or_mis.score", DVP, MIS),
    *scored("dvp.adaptive.score", ENTROPY, DVP),
    ("dvp.adaptive.score", REPRODUCED, {"a": made(DVP, score=LOW), "b": made(BUDGET, score=HIGH)}),
    ("dvp.veto.catches", REPRODUCED, {"a": made(DVP_MIS, outside=some(SPREAD), vetoed=some(SPREAD))}),
    ("dvp.veto.catches", CONTRADICTED, {"a": made(DVP_MIS, outside=[1.0] * SEEDS, vetoed=some(SPREAD))}),
    ("dvp.veto.catches", UNTESTABLE, {"a": made(DVP_MIS, outside=[0.0] * SEEDS, vetoed=[0.0] * SEEDS)}),
    ("dvp.veto.catches", UNTESTABLE, {"a": made(DVP, outside=some(SPREAD), vetoed=[0.0] * SEEDS)}),
    ("dvp.veto.catches", UNTESTABLE, {"a": made(DVP_MIS, outside=some(SPREAD))}),  # not recorded
    ("open.fair_kl", REPRODUCED, {"a": made(NAIVE, unmasked=SPREAD), "b": made(DVP, unmasked=TENTH)}),
    ("open.fair_kl", CONTRADICTED, {"a": made(NAIVE, unmasked=TENTH), "b": made(DVP, unmasked=SPREAD)}),
    ("open.fair_kl", UNDECIDED, {"a": made(NAIVE, unmasked=SPREAD), "b": made(DVP, unmasked=SPREAD)}),
    ("open.fair_kl", UNTESTABLE, {"a": made(NAIVE, unmasked=SPREAD), "b": made(DVP)}),
    ("open.fair_kl", UNTESTABLE, {"a": made(NAIVE, unmasked=SPREAD), "b": made(MATCHED, unmasked=SPREAD)}),
    (
        "vexact.b.k3",
        REPRODUCED,
        {"a": made(RECOMPUTE, unmasked=grown(*around(0, 0.3))), "b": made(BYPASS, unmasked=grown(*around(2, 0.3)))},
    ),
    (
        "vexact.b.k3",
        CONTRADICTED,
        {"a": made(RECOMPUTE, unmasked=grown(*around(2, 0.3))), "b": made(BYPASS, unmasked=grown(*around(0, 0.3)))},
    ),
    (
        "vexact.b.k3",
        UNDECIDED,
        {"a": made(RECOMPUTE, unmasked=grown(*around(0, 1))), "b": made(BYPASS, unmasked=grown(*around(0.1, 1)))},
    ),
    ("vexact.b.k3", UNTESTABLE, {"a": made(RECOMPUTE), "b": made(BYPASS)}),
    (
        "vexact.b.k1",
        REPRODUCED,  # of either sign
        {"a": made(RECOMPUTE, k1=grown(*around(0, 0.3))), "b": made(BYPASS, k1=-np.array(grown(*around(2, 0.3))))},
    ),
    (
        "vexact.b.k1",
        CONTRADICTED,
        {"a": made(RECOMPUTE, k1=grown(*around(2, 0.3))), "b": made(BYPASS, k1=grown(*around(0, 0.3)))},
    ),
    ("vexact.b.k1", UNDECIDED, {"a": made(RECOMPUTE, k1=[1e-3] * 5), "b": made(BYPASS, k1=[1e-3] * 5)}),
    ("vexact.b.k1", UNTESTABLE, {"a": made(RECOMPUTE, k1=grown(0, 1)), "b": made(BYPASS)}),
    ("vexact.b.k3", UNTESTABLE, {"b": made(BYPASS, unmasked=grown(*around(2, 0.3)))}),
    *[
        ("vexact.b.reward", outcome, {"a": made(RECOMPUTE, reward=falling(*[step] * 4, None), unmasked=k3)})
        for outcome, step, k3 in (
            (REPRODUCED, 20, grown(*around(0, 0.3, 5))),
            (CONTRADICTED, 20, grown(*around(3, 0.3, 5))),  # it falls, and k3 rises
            (UNDECIDED, 20, grown(*around(0.3, 1, 5))),
            (UNTESTABLE, 20, [math.nan] * 5),
        )
    ],
    ("vexact.b.reward", NOT_SEEN, {"a": made(RECOMPUTE, reward=rising(0.1, 0.101), unmasked=[1.0] * 2)}),
    (
        "vexact.b.reward",
        CONTRADICTED,
        {"a": made(RECOMPUTE, reward=rising(*around(0.2, 0.21)), unmasked=[1.0] * SEEDS)},
    ),
    ("vexact.b.reward", UNDECIDED, {"a": made(RECOMPUTE, reward=rising(-0.1, 0, 0.1), unmasked=[1.0] * 3)}),
    ("vexact.b.reward", UNDECIDED, {"a": made(RECOMPUTE, reward=rising(-0.1), unmasked=[1.0])}),
    ("vexact.b.reward", UNTESTABLE, {"a": made(BYPASS, reward=rising(0.1, 0.2), unmasked=[1.0] * 2)}),
    ("vexact.b.skew", REPRODUCED, {"a": made(RECOMPUTE, positive=SPREAD, negative=TENTH)}),
    ("vexact.b.skew", REPRODUCED, {"a": made(RECOMPUTE, positive=TENTH, negative=[-x for x in SPREAD])}),
    ("vexact.b.skew", UNDECIDED, {"a": made(RECOMPUTE, positive=SPREAD, negative=[-x for x in SPREAD[::-1]])}),
    ("vexact.b.skew", UNTESTABLE, {"a": made(RECOMPUTE)}),
    ("vexact.b.skew", UNTESTABLE, {"a": made(BYPASS, positive=SPREAD, negative=TENTH)}),
    *[
        (claim, outcome, {"a": made(other, seconds=first), "b": made(own, seconds=SPREAD)})
        for claim, own, other in (("price.remedies", DVP, NAIVE), ("price.zero_mismatch", EXACT, NAIVE))
        for outcome, first in ((MEASURED, TENTH), (UNTESTABLE, [math.nan] * SEEDS))
    ],
    ("dvp.prop5_5.bound", REPRODUCED, {"a": made(DVP, bound=[0.1 * x for x in SPREAD], lost=SPREAD)}),
    ("dvp.prop5_5.bound", CONTRADICTED, {"a": made(DVP, bound=[3 * x for x in SPREAD], lost=SPREAD)}),
    ("dvp.prop5_5.bound", UNDECIDED, {"a": made(DVP, bound=around(0.9, 0.8), lost=SPREAD)}),
    ("dvp.prop5_5.bound", UNTESTABLE, {"a": made(DVP)}),
    ("dvp.prop5_5.bound", UNTESTABLE, {"a": made(NAIVE, bound=SPREAD)}),
    ("open.rho.binds", REPRODUCED, {"a": made(PAPERS_DVP, kept=around(0.999, 1e-4), length=[20] * SEEDS)}),
    ("open.rho.binds", CONTRADICTED, {"a": made(PAPERS_DVP, kept=around(0.9999, 1e-5), length=[20] * SEEDS)}),
    ("open.rho.binds", UNDECIDED, {"a": made(PAPERS_DVP, kept=around(0.9995, 3e-4), length=[20] * SEEDS)}),
    ("open.rho.binds", UNTESTABLE, {"a": made(PAPERS_DVP)}),
    ("open.rho.binds", UNTESTABLE, {"a": made(DVP, kept=around(0.999, 1e-4), length=[20] * SEEDS)}),
    ("open.rho.binds", UNTESTABLE, {"a": made(NAIVE, kept=[0.9] * SEEDS, length=[20] * SEEDS)}),
]  # fmt: skip


@pytest.mark.parametrize(("claim", "outcome", "arms"), OUTCOMES)
def test_outcomes(claim: str, outcome: str, arms: dict[str, Made]) -> None:
    (verdict,) = verdicts(claim, **arms)
    assert verdict.verdict == outcome, verdict.seen
    assert "nan" not in verdict.seen


def test_every_claim_is_seen_in_every_outcome() -> None:
    """What the veto does is a fact, and never undecided; a price is told; a skew of either sign is one."""
    own, decided = read_claims("mechanism", "remedies"), (REPRODUCED, CONTRADICTED, UNDECIDED)
    some = {
        "dvp.veto.catches": (REPRODUCED, CONTRADICTED),
        "vexact.b.skew": (REPRODUCED, UNDECIDED),
        **{claim: (MEASURED,) for claim in own if claim.startswith("price.")},
    }
    every = {(claim, outcome) for claim in own for outcome in (*some.get(claim, decided), UNTESTABLE)}
    every.add(("vexact.b.reward", NOT_SEEN))
    assert {(claim, outcome) for claim, outcome, _ in OUTCOMES} == every


def test_arms_are_alike_where_the_difference_lies_within_five_points() -> None:
    first, second = (np.round(around(*arm), 4) for arm in ((0.3, 0.04), (0.32, 0.02)))  # shares of 10,000 problems
    (line,) = verdicts("vexact.c.k1_or_k3", a=made(REJECT, score=second), b=made(REJECT_K1, score=first))
    above, below = (stats.ttest_ind(first + shift, second, equal_var=False, alternative=side).pvalue
                    for shift, side in ((0.05, "greater"), (-0.05, "less")))  # fmt: skip
    assert line.p == pytest.approx(2 * max(above, below), rel=1e-6)


def test_one_run_has_no_p_and_no_place_in_a_family() -> None:
    (line,) = verdicts("vexact.b.reward", a=made(RECOMPUTE, reward=rising(-0.1), unmasked=[1.0]))
    assert math.isnan(line.p) and math.isnan(line.p_holm)


def test_a_flat_k3_and_a_falling_reward_must_both_hold() -> None:
    change, powers = np.array([-0.3, -0.1, -0.2, -0.25]), np.array([0.05, 0.2, 0.15, 0.1])
    (line,) = verdicts("vexact.b.reward", a=made(RECOMPUTE, reward=rising(*change), unmasked=grown(*powers)))
    parts = [
        stats.ttest_1samp(change, 0, alternative="less"),
        stats.ttest_1samp(powers, math.log10(2), alternative="less"),
    ]
    assert line.p == pytest.approx(2 * max(part.pvalue for part in parts), rel=1e-6)
    assert line.effect == pytest.approx(change.mean())


def test_ratios_are_of_geometric_means() -> None:
    (line,) = verdicts("open.fair_kl", a=made(NAIVE, unmasked=[0.1, 1, 10]), b=made(DVP, unmasked=[0.1, 0.1, 0.1]))
    assert line.effect == pytest.approx(0.1)
    expected = arm_difference([-1.0] * 3, [-1.0, 0.0, 1.0])
    assert (line.p, math.log10(line.high)) == pytest.approx((expected.p, expected.high))


@pytest.mark.slow
def test_the_null_of_the_unmasked_divergence_holds_its_level() -> None:
    rng, trials, wrong = np.random.default_rng(3), 100, 0
    for _ in range(trials):
        arms = {
            name: made(settings, unmasked=10 ** rng.normal(-3, 0.5, 4)) for name, settings in (("a", NAIVE), ("b", DVP))
        }
        (line,) = verdicts("open.fair_kl", **arms)
        wrong += line.verdict != UNDECIDED
    assert wrong <= trials * (0.05 + 3.3 * math.sqrt(0.05 * 0.95 / trials))


def test_above_both_takes_the_larger_p_and_below_one_the_smaller() -> None:
    (line,) = verdicts("vexact.c.both", **three(WIDE, LOW, NEAR))
    above, below = (
        # Shares of 10,000 problems.
        [stats.ttest_ind(*np.round([WIDE, own], 4), equal_var=False, alternative=side).pvalue for own in (LOW, NEAR)]
        for side in ("greater", "less")
    )
    assert line.p == pytest.approx(min(1, 2 * min(max(above), 2 * min(below))))
    assert line.arms == "c, a, b"
    assert line.effect == pytest.approx(np.mean(WIDE) - np.mean(NEAR), abs=1e-4)


def test_a_finding_with_nothing_to_test_has_no_p() -> None:
    """A reward that rises in every run counts in no family."""
    arms = {"a": made(RECOMPUTE, reward=rising(*around(0.2, 0.01)), unmasked=[1.0] * SEEDS)}
    (line,) = verdicts("vexact.b.reward", **arms)
    assert line.verdict == NOT_SEEN and math.isnan(line.p) and math.isnan(line.p_holm)

"""Each claim in each outcome, the arms to which it applies, and how often it is reproduced if false."""

import math
from collections import Counter
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
    SEEDS,
    STEPS,
    Made,
    around,
    falling,
    made,
    results_of,
    verdicts,
)

from tailrl.claims.catalogue import TRAINED_CLAIMS, read_claims
from tailrl.claims.finding import CONTRADICTED, NOT_SEEN, REPRODUCED, UNDECIDED, UNTESTABLE
from tailrl.reports.collapse.endpoints import HARDER
from tailrl.reports.overview.verdicts import judge
from tailrl.stats.intervals import share_difference
from tailrl.stats.tests import arm_difference, holm

pytestmark = pytest.mark.filterwarnings("error")


def deltas(head: list[float], tail: list[float]) -> dict[str, list[list[float]]]:
    """Δ of one likely and one unlikely token a run."""
    return {"delta": [list(pair) for pair in zip(head, tail, strict=True)]}


def ends(start: float, end: float) -> list[float]:
    return [start] * (STEPS // 2) + [end] * (STEPS - STEPS // 2)


ALIVE, SPREAD = falling(*[None] * SEEDS), around(1.0, 0.3)
DEAD = falling(*range(20, 20 + SEEDS))
LAST, UNKNOWN, TINY = ends(0.0, 1.0), ends(0.0, math.nan), ends(1e-9, 0.0)
"""Updates that were skipped from half a run on; what they leave of a number that is 0; one that is not 0 at first."""
ONE_DEAD = falling(20, *[None] * (SEEDS - 1))
MATCHED_DVP = {**DVP, **MATCHED}
SCORED_BEFORE = {"training": {"minibatches": 2}, "clip": {"ratio": "recompute"}}
GROWN = {"unmasked": [ends(1e-3, 0.1 * factor) for factor in SPREAD]}
STEADY = {"unmasked": [ends(1e-3, 1e-3 * factor) for factor in SPREAD]}
MIXED = {"unmasked": [ends(1e-3, 1e-3 * 10**power) for power in around(1.0, 1.0)]}
SMALL, LARGE = [1e-4 * factor for factor in SPREAD], [1e-2 * factor for factor in SPREAD[::-1]]
LOW, HIGH, WIDE = around(0.3, 0.05), around(0.5, 0.05), around(0.4, 0.3)

OUTCOMES: list[tuple[str, str, dict[str, Made]]] = [
    ("dvp.prop4_2.growth", REPRODUCED, {"a": made(NAIVE, **deltas(SMALL, LARGE))}),
    ("dvp.prop4_2.growth", REPRODUCED, {"a": made(NAIVE, **deltas(SMALL, [-x for x in LARGE]))}),
    ("dvp.prop4_2.growth", REPRODUCED, {"a": made(NAIVE, **deltas([0.0] * SEEDS, LARGE))}),
    ("dvp.prop4_2.growth", CONTRADICTED, {"a": made(NAIVE, **deltas(LARGE, SMALL))}),
    ("dvp.prop4_2.growth", UNDECIDED, {"a": made(NAIVE, **deltas(SMALL, [1e-4 * 10**x for x in around(0, 1)]))}),
    ("dvp.prop4_2.growth", UNTESTABLE, {"a": made(DVP, **deltas(SMALL, LARGE))}),
    ("dvp.prop4_2.growth", UNTESTABLE, {"a": made(NAIVE, nats=[[0.01]] * SEEDS, delta=[[0.1]] * SEEDS)}),
    ("dvp.prop4_3.sign", REPRODUCED, {"a": made(NAIVE, **deltas(LARGE, [-x for x in SMALL]))}),
    ("dvp.prop4_3.sign", CONTRADICTED, {"a": made(NAIVE, **deltas([-x for x in LARGE], SMALL))}),
    ("dvp.prop4_3.sign", UNDECIDED, {"a": made(NAIVE, **deltas(SMALL, around(0.01, 0.1)))}),
    ("dvp.prop4_3.sign", UNTESTABLE, {"a": made({**NAIVE, **NOISE}, **deltas(SMALL, LARGE))}),
    ("dvp.small_kl", REPRODUCED, {"a": made(DVP, masked=SMALL)}),
    ("dvp.small_kl", REPRODUCED, {"a": made(DVP, masked=[0.0] * SEEDS)}),
    ("dvp.small_kl", CONTRADICTED, {"a": made(DVP, masked=LARGE)}),
    ("dvp.small_kl", CONTRADICTED, {"a": made(DVP, masked=[math.inf] * SEEDS)}),
    ("dvp.small_kl", UNDECIDED, {"a": made(DVP, masked=[10**x for x in around(-3.1, 1)])}),
    ("dvp.small_kl", UNTESTABLE, {"a": made({**DVP, **MATCHED}, masked=SMALL)}),
    ("dvp.small_kl", UNTESTABLE, {"a": made(DVP)}),
    ("dvp.figure1.explosion", REPRODUCED, {"a": made(NAIVE, **GROWN), "b": made(DVP, **STEADY)}),
    ("dvp.figure1.explosion", CONTRADICTED, {"a": made(NAIVE, **GROWN), "b": made(DVP, **GROWN)}),
    ("dvp.figure1.explosion", CONTRADICTED, {"a": made(NAIVE, **STEADY), "b": made(DVP, **GROWN)}),
    ("dvp.figure1.explosion", UNDECIDED, {"a": made(NAIVE, **MIXED), "b": made(DVP, **STEADY)}),
    ("dvp.figure1.explosion", UNDECIDED, {"a": made(NAIVE, **GROWN), "b": made(DVP, **MIXED)}),
    ("dvp.figure1.explosion", NOT_SEEN, {"a": made(NAIVE, **STEADY), "b": made(DVP, **STEADY)}),
    ("dvp.figure1.explosion", UNTESTABLE, {"a": made(NAIVE, **GROWN)}),
    ("dvp.figure1.explosion", UNTESTABLE, {"a": made(NAIVE, **GROWN), "b": made(DVP)}),
    ("vexact.a.collapse", REPRODUCED, {"a": made(NAIVE, reward=DEAD), "b": made(EXACT, reward=ALIVE)}),
    ("vexact.a.collapse", REPRODUCED, {"a": made(NOISE, reward=DEAD), "b": made(EXACT, reward=ALIVE)}),
    ("vexact.a.collapse", CONTRADICTED, {"a": made(NAIVE, reward=ALIVE), "b": made(EXACT, reward=DEAD)}),
    ("vexact.a.collapse", UNDECIDED, {"a": made(NAIVE, reward=ONE_DEAD), "b": made(EXACT, reward=ALIVE)}),
    ("vexact.a.collapse", UNDECIDED, {"a": made(NAIVE, reward=DEAD), "b": made(EXACT, reward=DEAD)}),
    ("vexact.a.collapse", NOT_SEEN, {"a": made(NAIVE, reward=ALIVE), "b": made(EXACT, reward=ALIVE)}),
    ("vexact.a.collapse", UNTESTABLE, {"a": made(NAIVE, reward=DEAD), "b": made(EXACT)}),
    ("vexact.a.collapse.matched", REPRODUCED, {"a": made(NOISE, reward=DEAD), "b": made(MATCHED, reward=ALIVE)}),
    ("vexact.a.collapse.matched", CONTRADICTED, {"a": made(NOISE, reward=ALIVE), "b": made(MATCHED, reward=DEAD)}),
    ("vexact.a.collapse.matched", UNDECIDED, {"a": made(NOISE, reward=ONE_DEAD), "b": made(MATCHED, reward=ALIVE)}),
    ("vexact.a.collapse.matched", NOT_SEEN, {"a": made(NOISE, reward=ALIVE), "b": made(MATCHED, reward=ALIVE)}),
    ("vexact.a.collapse.matched", UNTESTABLE, {"a": made(NAIVE, reward=DEAD), "b": made(MATCHED, reward=ALIVE)}),
    ("dvp.figure1.collapse", REPRODUCED, {"a": made(NAIVE, reward=DEAD), "b": made(DVP, reward=ALIVE)}),
    ("dvp.figure1.collapse", CONTRADICTED, {"a": made(NAIVE, reward=ALIVE), "b": made(DVP, reward=DEAD)}),
    ("dvp.figure1.collapse", UNDECIDED, {"a": made(NAIVE, reward=ONE_DEAD), "b": made(DVP, reward=ALIVE)}),
    ("dvp.figure1.collapse", NOT_SEEN, {"a": made(NAIVE, reward=ALIVE), "b": made(DVP, reward=ALIVE)}),
    ("dvp.figure1.collapse", UNTESTABLE, {"a": made(NOISE, reward=DEAD), "b": made(DVP, reward=ALIVE)}),
    ("dvp.figure1.collapse", UNTESTABLE, {"a": made(MATCHED, reward=DEAD), "b": made(MATCHED_DVP, reward=ALIVE)}),
    ("vexact.a.score", REPRODUCED, {"a": made(NAIVE, score=LOW), "b": made(EXACT, score=HIGH)}),
    ("vexact.a.score", REPRODUCED, {"a": made({**EXACT, **NOISE}, score=LOW), "b": made(EXACT, score=HIGH)}),
    ("vexact.a.score", CONTRADICTED, {"a": made(NAIVE, score=HIGH), "b": made(EXACT, score=LOW)}),
    ("vexact.a.score", UNDECIDED, {"a": made(NAIVE, score=LOW), "b": made(EXACT, score=WIDE)}),
    ("vexact.a.score", UNTESTABLE, {"a": made(NAIVE, score=LOW), "b": made({**EXACT, **DVP}, score=HIGH)}),
    ("vexact.a.score.matched", REPRODUCED, {"a": made(NOISE, score=LOW), "b": made(MATCHED, score=HIGH)}),
    ("vexact.a.score.matched", CONTRADICTED, {"a": made(NOISE, score=HIGH), "b": made(MATCHED, score=LOW)}),
    ("vexact.a.score.matched", UNDECIDED, {"a": made(NOISE, score=WIDE), "b": made(MATCHED, score=HIGH)}),
    ("vexact.a.score.matched", UNTESTABLE, {"a": made(NAIVE, score=LOW), "b": made(MATCHED, score=HIGH)}),
    ("open.zero_mismatch.score", REPRODUCED, {"a": made(EXACT, score=LOW), "b": made({**EXACT, **DVP}, score=HIGH)}),
    ("open.zero_mismatch.score", CONTRADICTED, {"a": made(EXACT, score=HIGH), "b": made({**EXACT, **DVP}, score=LOW)}),
    ("open.zero_mismatch.score", UNDECIDED, {"a": made(EXACT, score=HIGH), "b": made({**EXACT, **DVP}, score=WIDE)}),
    ("open.zero_mismatch.score", UNTESTABLE, {"a": made(NAIVE, score=LOW), "b": made({**EXACT, **DVP}, score=HIGH)}),
    ("open.matched_noise.score", REPRODUCED, {"a": made(MATCHED, score=LOW), "b": made(MATCHED_DVP, score=HIGH)}),
    ("open.matched_noise.score", CONTRADICTED, {"a": made(MATCHED, score=HIGH), "b": made(MATCHED_DVP, score=LOW)}),
    ("open.matched_noise.score", UNDECIDED, {"a": made(MATCHED, score=LOW), "b": made(MATCHED_DVP, score=WIDE)}),
    ("open.matched_noise.score", UNTESTABLE, {"a": made(NOISE, score=LOW), "b": made(MATCHED_DVP, score=HIGH)}),
    ("dvp.score", UNTESTABLE, {"a": made(EXACT, score=LOW), "b": made({**EXACT, **DVP}, score=HIGH)}),
    ("dvp.score", REPRODUCED, {"a": made(NAIVE, score=LOW), "b": made(DVP, score=HIGH)}),
    ("dvp.score", CONTRADICTED, {"a": made(NAIVE, score=HIGH), "b": made(DVP, score=LOW)}),
    ("dvp.score", UNDECIDED, {"a": made(NAIVE, score=LOW), "b": made(DVP, score=WIDE)}),
    ("dvp.score", UNDECIDED, {"a": made(NAIVE, score=[0.2]), "b": made(DVP, score=[0.8])}),
    ("dvp.score", UNTESTABLE, {"a": made(NAIVE, score=LOW), "b": made(DVP_MIS, score=HIGH)}),
    ("dvp.with_mis.score", REPRODUCED, {"a": made(NAIVE, score=LOW), "b": made(DVP_MIS, score=HIGH)}),
    ("dvp.with_mis.score", CONTRADICTED, {"a": made(NAIVE, score=HIGH), "b": made(DVP_MIS, score=LOW)}),
    ("dvp.with_mis.score", UNDECIDED, {"a": made(NAIVE, score=LOW), "b": made(DVP_MIS, score=WIDE)}),
    ("dvp.with_mis.score", UNTESTABLE, {"a": made(NAIVE, score=LOW), "b": made(DVP, score=HIGH)}),
    ("vexact.zero_mismatch.k3", REPRODUCED, {"a": made(EXACT, masked=[0.0], unmasked=[0.0])}),
    ("vexact.zero_mismatch.k3", CONTRADICTED, {"a": made(EXACT, masked=[0.0], unmasked=[ends(0.0, 1e-12)])}),
    ("vexact.zero_mismatch.k3", CONTRADICTED, {"a": made(EXACT, masked=[ends(0.0, math.nan)], unmasked=[0.0])}),
    ("vexact.zero_mismatch.k3", REPRODUCED, {"a": made(EXACT, skipped=[LAST], masked=[UNKNOWN], unmasked=[UNKNOWN])}),
    ("vexact.zero_mismatch.k3", CONTRADICTED, {"a": made(EXACT, skipped=[LAST], masked=[TINY], unmasked=[0.0])}),
    ("vexact.zero_mismatch.k3", UNDECIDED, {"a": made(EXACT, skipped=[1.0], masked=[math.nan], unmasked=[math.nan])}),
    ("vexact.zero_mismatch.k3", UNDECIDED, {"a": made(EXACT)}),
    ("vexact.zero_mismatch.k3", UNTESTABLE, {"a": made({**EXACT, **NOISE}, masked=[0.0], unmasked=[0.0])}),
    ("vexact.zero_mismatch.k3", UNTESTABLE, {"a": made({**EXACT, "training": {"minibatches": 2}}, masked=[1.0])}),
    ("vexact.zero_mismatch.k3", REPRODUCED, {"a": made({**EXACT, **SCORED_BEFORE}, masked=[0.0], unmasked=[0.0])}),
]  # fmt: skip


@pytest.mark.parametrize(("claim", "outcome", "arms"), OUTCOMES)
def test_outcomes(claim: str, outcome: str, arms: dict[str, Made]) -> None:
    (verdict,) = verdicts(claim, **arms)
    assert verdict.verdict == outcome, verdict.seen
    assert "nan" not in verdict.seen


def test_every_claim_is_seen_in_every_outcome() -> None:
    """What the exact engine does is a fact: there, not decided is not recorded. An event may not be seen."""
    events = ("dvp.figure1.explosion", "dvp.figure1.collapse", "vexact.a.collapse", "vexact.a.collapse.matched")
    assert {(claim, outcome) for claim, outcome, _ in OUTCOMES} == {
        (claim, outcome)
        for claim in read_claims("mismatch")
        for outcome in (REPRODUCED, CONTRADICTED, UNDECIDED, UNTESTABLE)
    } | {(claim, NOT_SEEN) for claim in events}


def test_a_line_has_its_scope_and_what_was_seen() -> None:
    (line,) = verdicts("dvp.with_mis.score", a=made(NOISE, score=LOW), b=made({**DVP_MIS, **NOISE}, score=HIGH))
    assert (line.arms, line.seeds, line.task) == ("b, a", SEEDS, "arithmetic")
    assert line.dose == "vllm in bfloat16, disturbed sampler: noise of 0.5 nats"
    assert line.policy == "from scratch, 4 layers of 128, V = 2048"
    assert (line.rate, line.where) == ("1e-4", f"{line.dose}; learning rate 1e-4")
    expected = arm_difference(HIGH, LOW)
    assert (line.effect, line.low, line.high) == pytest.approx((expected.mean, expected.low, expected.high), abs=1e-4)
    assert line.p == pytest.approx(expected.p, abs=1e-6)
    assert line.endpoint.startswith("Held-out avg@k of DVP + MIS minus that of naive at the same dose, over seeds")
    # 26.55 % of naive's 0.3 is 8 points, the difference 20 with an interval of 4 on either side
    assert line.seen.startswith("avg@k of b minus that of a is +20.0 [")
    assert line.seen.endswith("; of this interval the paper's 26.55 % is outside as points, outside as relative")
    (line,) = verdicts("dvp.with_mis.score", a=made(NAIVE, score=LOW), b=made(DVP_MIS, score=around(0.5666, 0.05)))
    assert line.seen.endswith("is inside as points, outside as relative")


def test_effects_are_geometric_means_over_runs() -> None:
    (line,) = verdicts("dvp.prop4_2.growth", a=made(NAIVE, **deltas([0.1] * 3, [0.1, 1.0, 10.0])))
    assert line.effect == pytest.approx(10)
    assert (line.effect / line.low, line.high / line.effect) == pytest.approx((10 ** (4.302653 / math.sqrt(3)),) * 2)
    (line,) = verdicts("dvp.figure1.explosion", a=made(NAIVE, **GROWN), b=made(DVP, **STEADY))
    assert line.effect == pytest.approx(100 * np.prod(SPREAD) ** (1 / SEEDS))
    assert f"explodes in {SEEDS} of {SEEDS} runs; b: k3" in line.seen
    assert f"explodes in 0 of {SEEDS} runs" in line.seen


def test_small_means_small_in_every_tenth() -> None:
    brief = [[1e-5] * 20 + [1e-2 * factor] * 5 + [1e-5] * 25 for factor in SPREAD]
    (line,) = verdicts("dvp.small_kl", a=made(DVP, masked=brief))
    assert line.verdict == CONTRADICTED
    assert line.effect == pytest.approx(1e-2 * np.prod(SPREAD) ** (1 / SEEDS))


def test_an_untestable_line_gives_the_largest_effect() -> None:
    sunk = [[0.5] * (STEPS - 5) + [0.4] * 5, *ALIVE[1:]]
    (line,) = verdicts("vexact.a.collapse", a=made(NAIVE, reward=sunk), b=made(EXACT, reward=ALIVE))
    assert line.seen == "no run collapsed; the deepest loss is 20 % of a run's best reward"
    (line,) = verdicts("dvp.figure1.explosion", a=made(NAIVE, **STEADY), b=made(DVP, **STEADY))
    assert line.seen == "k3 explodes in no run; where it grows most, it ends at 1.3 times its start"
    (line,) = verdicts("dvp.score", a=made(NAIVE))
    assert line.seen == "the study has no DVP arm beside a naive arm under the same mismatch"
    assert (line.dose, line.arms, line.seeds) == ("", "", 0)


def test_collapse_is_compared_by_shares_and_log_rank() -> None:
    (line,) = verdicts("vexact.a.collapse", a=made(NAIVE, reward=DEAD), b=made(EXACT, reward=ONE_DEAD))
    expected = share_difference((SEEDS, SEEDS), (1, SEEDS))
    assert (line.effect, line.low, line.high) == pytest.approx((expected.mean, expected.low, expected.high))
    assert line.seen == f"{SEEDS} of {SEEDS} runs of a collapsed; 1 of {SEEDS} runs of b collapsed"


def test_with_three_seeds_no_collapse_is_decided() -> None:
    """Of 20 splits into three and three, one is the most extreme: p is 0.05 at least."""
    dead, alive = falling(20, 21, 22), falling(None, None, None)
    (line,) = verdicts("vexact.a.collapse", a=made(NAIVE, reward=dead), b=made(EXACT, reward=alive))
    assert line.verdict == UNDECIDED
    assert line.p == pytest.approx(0.1)


# --- which arms speak --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"estimator": "grpo"},
        {"clip": {"ratio": "recompute"}},
        {"training": {"learning_rate": 1.0}},
        {"sampler": {"dtype": "float16"}},
        {"disturbance": {"noise": 0.1}},
    ],
)
def test_only_arms_alike_in_all_else_are_compared(changes: dict[str, Any]) -> None:
    for own in (DVP, DVP_MIS):
        alike, other = ({"a": made(NAIVE), "b": made({**own, **different})} for different in ({}, changes))
        claims = ("dvp.score", "dvp.with_mis.score", "dvp.figure1.explosion")
        spoken = [[line.arms for claim in claims for line in verdicts(claim, **arms)] for arms in (alike, other)]
        assert any(spoken[0])
        assert not any(spoken[1])


def test_a_control_is_of_the_same_training_and_dose() -> None:
    other = {"training": {"learning_rate": 1.0}}
    for control in ({**EXACT, **other}, {**EXACT, **NOISE}):
        (line,) = verdicts("vexact.a.collapse", a=made(NAIVE, reward=DEAD), b=made(control, reward=ALIVE))
        assert line.verdict == UNTESTABLE
    for control in ({**MATCHED, **other}, {"disturbance": {"noise": 0.4, "side": "both"}}):
        (line,) = verdicts("vexact.a.collapse.matched", a=made(NOISE, reward=DEAD), b=made(control, reward=ALIVE))
        assert line.verdict == UNTESTABLE


def test_every_dose_has_its_line() -> None:
    doses = {f"x{noise}": made({"disturbance": {"noise": noise}}, reward=DEAD) for noise in (0.1, 0.2)}
    lines = verdicts("vexact.a.collapse", **doses, y=made(NAIVE, reward=ALIVE), z=made(EXACT, reward=ALIVE))
    assert [line.arms for line in lines] == ["x0.1, z", "x0.2, z", "y, z"]
    assert [line.verdict for line in lines] == [REPRODUCED, REPRODUCED, NOT_SEEN]
    assert [line.dose.partition(", ")[2] for line in lines] == [
        "disturbed sampler: noise of 0.1 nats",
        "disturbed sampler: noise of 0.2 nats",
        "undisturbed",
    ]


# --- how often it is wrong ---------------------------------------------------------------------------


def test_a_family_shares_its_level() -> None:
    """Alone the difference is claimed; beside another test of the family, which shows nothing, it is not."""
    naive, dvp = around(0.4, 0.1), around(0.48, 0.1)
    p = arm_difference(dvp, naive).p
    assert 0.025 < p < 0.05
    (alone,) = verdicts("dvp.score", a=made(NAIVE, score=naive), b=made(DVP, score=dvp))
    assert (alone.verdict, alone.p_holm) == (REPRODUCED, alone.p)
    arms = {"a": made(NAIVE, score=naive), "b": made(DVP, score=dvp), "c": made(DVP_MIS, score=naive)}
    (beside,), (other,) = (verdicts(claim, **arms) for claim in ("dvp.score", "dvp.with_mis.score"))
    assert (beside.verdict, other.verdict) == (UNDECIDED, UNDECIDED)
    assert [beside.p_holm, other.p_holm] == pytest.approx(holm([p, 1.0]), abs=1e-3)


def test_survival_comparisons_are_one_family() -> None:
    dead = falling(20, 21, 22, 23)
    alive = falling(*[None] * 4)
    arms = {"a": made(NOISE, reward=dead), "b": made(EXACT, reward=alive)}
    (alone,) = verdicts("vexact.a.collapse", **arms)
    both = [
        line
        for claim in ("vexact.a.collapse", "vexact.a.collapse.matched")
        for line in verdicts(claim, **arms, c=made(MATCHED, reward=alive))
    ]
    assert (alone.verdict, alone.p_holm) == (REPRODUCED, alone.p)
    assert alone.p == pytest.approx(2 / math.comb(8, 4))
    assert [(line.verdict, line.p_holm) for line in both] == [(UNDECIDED, pytest.approx(2 * alone.p))] * 2


def test_no_collapse_is_judged_where_problems_become_harder() -> None:
    level = [1.0] * 4
    arms = {
        "a": made(NOISE, reward=falling(*[20] * 4), level=level),
        "b": made(EXACT, reward=falling(*[None] * 4), level=level),
    }
    (line,) = verdicts("vexact.a.collapse", **arms)
    assert (line.verdict, line.seeds, line.seen) == (UNTESTABLE, 0, HARDER)


def null_study(rng: np.random.Generator, seeds: int = 4) -> dict[str, Made]:
    """No claim holds, each at the edge of where it would: no effect, a k3 of 0.001, a growth of 10 times."""

    def rewards(runs: int) -> list[Any]:
        return falling(*(int(step) if step < STEPS - 6 else None for step in rng.integers(6, 80, runs)))

    def scores(runs: int = seeds) -> list[float]:
        return list(rng.normal(0.5, 0.05, runs))

    delta = rng.normal(0, 0.01, (seeds, 2)).tolist()
    grown = [ends(1e-4, 1e-4 * 10**power) for power in rng.normal(1, 0.5, seeds)]
    masked = list(10 ** rng.normal(-3, 0.5, seeds))
    return {
        "naive": made(NAIVE, delta=delta, unmasked=grown, reward=rewards(seeds), score=scores()),
        "dvp": made(DVP, masked=masked, unmasked=[1e-4] * seeds, score=scores()),
        "dvp_mis": made(DVP_MIS, score=scores()),
        "exact": made(EXACT, reward=rewards(5), score=scores(5)),
        "exact_dvp": made({**EXACT, **DVP}, score=scores(5)),
        "noise": made(NOISE, reward=rewards(5), score=scores(5)),
        "matched": made(MATCHED, reward=rewards(5), score=scores(5)),
    }


@pytest.mark.slow
def test_few_claims_are_decided_if_none_holds() -> None:
    """At the level of 2.5 % for either verdict in each family of tests, within 3.3 standard errors of 400 studies."""
    rng, trials = np.random.default_rng(11), 400
    # In these studies DVP's k3 is not naive's, which the claim on the unmasked one is about.
    family_of = {claim.id: claim.family or claim.id for claim in TRAINED_CLAIMS if claim.id != "open.fair_kl"}
    wrong: Counter[tuple[str, str]] = Counter()
    for _ in range(trials):
        lines = [line for line in judge(results_of(**null_study(rng))) if line.id in family_of]
        wrong.update({(family_of[line.id], line.verdict) for line in lines})
    most = trials * (0.025 + 3.3 * math.sqrt(0.025 * 0.975 / trials))
    for family in family_of.values():
        assert max(wrong[family, REPRODUCED], wrong[family, CONTRADICTED]) <= most, family
    # Without one in 400 the level would be far below 2.5 %; permutations of few runs may well be.
    alone = (
        "dvp.prop4_2.growth",
        "dvp.prop4_3.sign",
        "dvp.small_kl",
        "dvp.figure1.explosion",
        "open.zero_mismatch.score",
    )
    assert all(wrong[family, REPRODUCED] for family in (*alone, "score", "harm"))

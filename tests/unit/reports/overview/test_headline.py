"""A page's headline against results made by hand: each outcome, one seed, arms that are not there."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from claims_fixture import DVP, DVP_MIS, EXACT, MATCHED, NAIVE, NOISE, Made, around, falling, line_of, made, results_of

from tailrl.artifacts.claims import Verdict
from tailrl.artifacts.evaluation import ArmScores
from tailrl.artifacts.results import Results
from tailrl.claims.finding import CONTRADICTED, REPRODUCED, UNDECIDED
from tailrl.reports import arm_pairs
from tailrl.reports.overview.headline import effects, headline
from tailrl.reports.overview.verdicts import judge
from tailrl.reports.scores.numbers import Comparison, compare_arms, gains_over_base
from tailrl.stats.tests import Difference

NOISY = "exact in float32, disturbed sampler: noise of 0.5 nats"
NAN = math.nan


def said(**arms: Made) -> tuple[str, ...]:
    results = results_of(**arms)
    compared = compare_arms(results, arm_pairs.references(results))
    return headline(results, gains_over_base(results), compared, judge(results))


def noisy(remedy: dict[str, object], **numbers: list[float]) -> Made:
    return made({**EXACT, **NOISE, **remedy}, **numbers)


def scored(first: float, second: float, width: float = 0.01, seeds: int = 8) -> dict[str, Made]:
    """Naive and DVP under one made mismatch, with these scores."""
    return {
        "naive": noisy(NAIVE, score=around(first, width, seeds)),
        "dvp": noisy(DVP, score=around(second, width, seeds)),
    }


DVP_WORDS, NAIVE_WORDS = "DVP at ρ = e-5 (`dvp`)", "naive (`naive`)"


def test_a_decided_difference_has_its_mismatch_its_remedies_in_words_and_its_scores() -> None:
    first, second, third = said(**scored(0.4, 0.7))
    assert first.startswith(
        f"Under a mismatch planted on purpose ({NOISY}), {DVP_WORDS} ends above {NAIVE_WORDS} in 8 of 8 seeds: "
        "70.0 % against 40.0 % on held-out problems, +30.0 [+29."
    )
    assert first.endswith("] points.") and "construction" not in first
    assert second.startswith(f"Against the untrained policy's 50.0 %: {NAIVE_WORDS} below, -10.0 [")
    assert third == "The size of the mismatch was not recorded."
    assert (
        f"{DVP_WORDS} ends below {NAIVE_WORDS} in 8 of 8 seeds: 40.0 % against 70.0 % on held-out problems, -30.0 ["
        in said(**scored(0.7, 0.4))[0]
    )


def greedily(results: Results, **shares: float) -> tuple[str, ...]:
    """The headline where each arm, and the untrained policy as `base`, solves this share of the problems greedily."""

    def greedy(scores: ArmScores, share: float) -> ArmScores:
        solved_P = (np.arange(10_000) < 10_000 * share).astype(np.float64)
        return replace(scores, scores=tuple(replace(score, greedy_P=solved_P) for score in scores.scores))

    evaluations = {arm: greedy(results.evaluations[arm], shares[arm]) for arm in results.arms}
    results = replace(results, evaluations=evaluations, base=greedy(results.base, shares["base"]))
    compared = compare_arms(results, arm_pairs.references(results))
    return headline(results, gains_over_base(results), compared, judge(results))


def test_a_decided_difference_has_that_of_the_greedy_scores_beside_it() -> None:
    """Greedily naive solves 60 % of the problems and DVP 65 %: 5 points, of the 30 at temperature 1."""
    skill, first, *_ = greedily(results_of(**scored(0.4, 0.7)), naive=0.6, dvp=0.65, base=0.55)
    assert skill == (
        "Skill is the greedy score: the held-out problems solved with the most probable token each time. It is 55.0 % "
        f"untrained, and after training 65.0 % with {DVP_WORDS}, 60.0 % with {NAIVE_WORDS}. Other scores here are at "
        "temperature 1."
    )
    assert re.search(r"\+30\.0 \[[^]]*\] points \(greedy: \+5\.0 \[", first)


def test_an_undecided_difference_has_that_of_the_greedy_scores_beside_it() -> None:
    _, first, *_ = greedily(results_of(**scored(0.5, 0.52, width=0.3, seeds=3)), naive=0.6, dvp=0.65, base=0.55)
    assert re.search(r"above in \d of 3 seeds \(greedy: \+5\.0 \[", first)


def test_of_many_arms_the_best_and_the_worst_are_named_by_skill() -> None:
    arms = {f"arm{number}": made(NAIVE, score=around(0.5, 0.1)) for number in range(9)}
    shares = {arm: 0.5 + number / 100 for number, arm in enumerate(arms)}
    skill, *rest = greedily(results_of(**arms), base=0.4, **shares)
    best, worst = "58.0 % with naive (`arm8`)", "50.0 % with naive (`arm0`)"
    assert f"after training, in the best and the worst arm, {best}, {worst}. " in skill and "arm4" not in skill
    assert any("arm4" in sentence for sentence in rest)


def test_the_engines_own_mismatch_comes_first_and_each_kind_has_its_sentence() -> None:
    own = {"own": made(NAIVE, score=around(0.6, 0.01)), "own_dvp": made(DVP, score=around(0.601, 0.01))}
    control = made({**EXACT, **MATCHED}, score=around(0.65, 0.01))
    exact = made(EXACT, score=around(0.6, 0.01))
    natural, dialled, clean, _ = said(**scored(0.4, 0.7), **own, control=control, exact=exact)
    assert natural.startswith("Under the engines' own mismatch (vllm in bfloat16, undisturbed), the arms end level, ")
    assert "within 5 points: DVP at ρ = e-5 (`own_dvp`) minus naive (`own`), +0.1 [" in natural
    assert dialled.startswith("Under a mismatch planted on purpose (") and f"{DVP_WORDS} ends above" in dialled
    control_words = "naive, equally noisy without a mismatch (`control`)"
    assert f". Naive (`naive`) ends below {control_words} in 8 of 8 seeds: -25.0 [" in dialled
    assert clean.startswith(f"Under no mismatch, {control_words} ends above naive without a mismatch (`exact`) in 8 of")


@pytest.mark.parametrize(
    ("rho", "floor", "where", "wins"),
    [("0.34/V", 0.03, "sampler", True), ("0.02/V", 0.03, "sampler", False), ("e-13", 0.03, "sampler", False),
     ("0.34/V", 0.03, "both", False)],
)  # fmt: skip
def test_what_wins_by_construction_is_said(rho: str, floor: float, where: str, wins: bool) -> None:
    """Of V tokens a floor η gives each at least η/V; a threshold above that keeps them from being sampled."""
    dialled = {**EXACT, "disturbance": {"floor": floor, "side": where}}
    arms = {
        "naive": made(dialled, score=around(0.4, 0.01)),
        "dvp": made({**dialled, "vocabulary": {"rule": "min_p", "rho": rho}}, score=around(0.7, 0.01)),
    }
    words = " in 8 of 8 seeds, by construction (its threshold lies above the floor, so it samples no random token): 70"
    assert words in said(**arms)[0] if wins else "construction" not in said(**arms)[0]
    assert ": floor of 0.03, so 3 % of the sampled tokens are random), " in said(**arms)[0]
    once = {name: (settings, {"score": numbers["score"][:1]}) for name, (settings, numbers) in arms.items()}
    assert (", by construction (" in said(**once)[0]) == wins, "a single seed"
    lower = {**arms, "dvp": (arms["dvp"][0], {"score": around(0.2, 0.01)})}
    assert "construction" not in said(**lower)[0], "an arm that loses wins nothing"


@pytest.mark.parametrize("gap", [0.02, 0.0])
def test_a_wide_interval_is_never_no_difference(gap: float) -> None:
    first, *_ = said(**scored(0.5, 0.5 + gap, width=0.3, seeds=3))
    start = f"Under a mismatch planted on purpose ({NOISY}), no arm is shown to end above or below another: "
    assert first.startswith(f"{start}{DVP_WORDS} minus {NAIVE_WORDS}, {100 * gap:+.1f} [-")
    for sentence in said(**scored(0.5, 0.5 + gap, width=0.3, seeds=3)):
        for words in ("no difference", "no effect", "no detectable", "level"):
            assert words not in sentence.lower()


def test_seeds_are_counted_that_both_arms_have() -> None:
    """Naive has six of DVP's eight, and is above in the first two of them. Equal scores are not above."""
    wide = {"naive": noisy(NAIVE, score=[0.9, 0.9, 0.4, 0.4, 0.4, 0.4]), "dvp": noisy(DVP, score=[0.6] * 8)}
    assert ", above in 4 of 6 seeds." in said(**wide)[0]
    equal = {"naive": noisy(NAIVE, score=[0.5, 0.5, 0.4]), "dvp": noisy(DVP, score=[0.5, 0.5, 0.6])}
    assert ", above in 1 of 3 seeds." in said(**equal)[0]


def test_a_single_seed_decides_nothing() -> None:
    first, second, _ = said(**scored(0.2, 0.9, width=0.0, seeds=1))
    assert f"({NOISY}), nothing is decided where a single seed, or seeds that agree, do not show how much" in first
    assert first.endswith(f"{DVP_WORDS} minus {NAIVE_WORDS}, 90.0 % against 20.0 %, +70.0 points.")
    assert f"{DVP_WORDS} not decided, +40.0 points" in second


def test_one_arm_is_held_against_the_untrained_policy() -> None:
    first, second, _ = said(only=made(NAIVE, score=around(0.7, 0.01)))
    assert first == "The study has one arm, so no arms are compared."
    assert second.startswith("Against the untrained policy's 50.0 %: naive (`only`) above, +20.0 [")


def test_without_a_naive_arm_the_first_one_is_the_reference() -> None:
    """No claim speaks of the pair: the table of differences decides."""
    first, *_ = said(mis=made(DVP_MIS, score=around(0.4, 0.01)), tis=made({"correction": {"token": "tis"}},
                     score=around(0.6, 0.01)))  # fmt: skip
    assert first.startswith(
        "Under the engines' own mismatch (vllm in bfloat16, undisturbed), token TIS (`tis`) ends above DVP at ρ = e-5 "
        "+ MIS (`mis`) in 8 of 8 seeds: 60.0 % against 40.0 % on held-out problems, +20.0 ["
    )


@pytest.mark.slow  # the tests beside it, with fewer arms
def test_the_other_differences_are_named_or_counted() -> None:
    doses = {f"floor{n}": {**EXACT, "disturbance": {"floor": 0.1 * n}} for n in range(1, 4)}
    arms: dict[str, Made] = {}
    for number, (name, dose) in enumerate(doses.items()):
        arms[name] = made(dose, score=around(0.5, 0.01))
        arms[f"dvp_{name}"] = made({**dose, **DVP}, score=around(0.9 - 0.1 * number, 0.01))
    first, _ = said(**arms)
    assert first.startswith("Under a mismatch planted on purpose, DVP at ρ = e-5 (`dvp_floor1`) ends above naive (`flo")
    assert "(`dvp_floor2`) ends above naive (`floor2`) in 8 of 8 seeds, by" in first
    assert "(`dvp_floor3`) ends above" in first
    few = {f"more{n}": made({**EXACT, **NOISE, **DVP}, score=around(0.5 + n / 50, 0.4)) for n in range(3)}
    assert ". Not decided: " in said(**arms, naive=noisy(NAIVE, score=around(0.5, 0.4)), **few)[0]
    wide = {f"more{n}": made({**EXACT, **NOISE, **DVP}, score=around(0.5 + n / 50, 0.4)) for n in range(7)}
    counted, _, others = said(naive=noisy(NAIVE, score=around(0.5, 0.4)), **wide)
    assert "no arm is shown to end above or below another: 7 differences, with 95 % intervals from -" in counted
    assert "points; the largest is DVP at ρ = e-5 (`more6`) minus naive (`naive`), +11.7 [" in counted
    assert others.startswith("The other arms' scores on held-out problems: DVP at ρ = e-5 (`more0`), 50.0 %; ")
    assert "(`more5`), 60.0 %." in others and "`more6`" not in others


def test_the_mismatch_and_the_collapses() -> None:
    arms = {
        "naive": noisy(NAIVE, unmasked=[1.3] * 3, reward=falling(10, None, None)),
        "exact": made(EXACT, unmasked=[0.0] * 3, reward=falling(None, None, None)),
    }
    size = "The mismatch (mean k3 between sampler and trainer) is "
    assert said(**arms)[-1] == (
        f"{size}1.3 nats a token (planted) with naive (`naive`), the most, and 0 with naive without a mismatch "
        "(`exact`), the least. Collapsed runs: 1 of 3 with naive (`naive`); none elsewhere."
    )
    assert said(exact=arms["exact"])[2] == f"{size}0 nats a token. No run of 3 collapsed."


def comparison(p_holm: float, mean: float = 0.3) -> Comparison:
    both = Difference(mean, mean - 0.2, mean + 0.2, p_holm / 2, 3)
    return Comparison("dvp", "naive", "naive", both, p_holm, both, p_holm, both, p_holm, 3.0, 0.1)


def claimed(verdict: str, p_holm: float) -> Verdict:
    return line_of("dvp.score", claim="DVP ends above naive", verdict=verdict, arms="dvp, naive", effect=0.25, low=0.01,
                   high=0.49, p_holm=p_holm)  # fmt: skip


@pytest.mark.parametrize(
    ("verdict", "by_claim", "by_table", "decided", "borderline"),
    [
        (REPRODUCED, 0.049, 0.054, True, True),
        (REPRODUCED, 0.01, 0.02, True, False),
        (UNDECIDED, 0.06, 0.04, False, True),
        (UNDECIDED, 0.06, 0.07, False, False),
        (CONTRADICTED, 0.01, 0.02, True, False),
    ],
)
def test_the_claim_decides_and_another_answer_of_the_table_is_said(
    verdict: str, by_claim: float, by_table: float, decided: bool, borderline: bool
) -> None:
    (effect,) = effects([comparison(by_table)], [claimed(verdict, by_claim)])
    assert (effect.decided, effect.found.mean, effect.found.p) == (decided, 0.25, by_claim)
    assert math.isnan(effect.other_p) != borderline
    results: Results = results_of(**scored(0.4, 0.7))
    first, *_ = headline(results, gains_over_base(results), [comparison(by_table)], [claimed(verdict, by_claim)])
    words = f" (borderline: p is {by_claim:.3f} by the claim's test over seeds, {by_table:.3f} over seeds and"
    assert (words in first) == (borderline and decided)
    assert ("p 0.060 after correction" in first) == (not decided)


def test_what_was_not_measured_is_no_effect() -> None:
    silent = replace(claimed(UNDECIDED, NAN), effect=NAN, low=NAN, high=NAN)
    assert effects([], [silent, line_of("dvp.score", arms=""), line_of("dvp.small_kl", arms="dvp, naive")]) == []
    assert effects([replace(comparison(0.01), why="")], []) == [], "a pair that the report does not ask about"

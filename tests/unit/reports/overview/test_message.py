"""The three sentences against results made by hand: each outcome, one seed, arms that are not there."""

import math
from dataclasses import replace

import pytest
from claims_fixture import DVP, DVP_MIS, EXACT, NAIVE, NOISE, Made, around, falling, line_of, made, results_of

from tailrl.artifacts.claims import Verdict
from tailrl.artifacts.results import Results
from tailrl.claims.finding import CONTRADICTED, REPRODUCED, UNDECIDED
from tailrl.reports import arm_pairs
from tailrl.reports.overview.message import effects, three_sentences
from tailrl.reports.overview.verdicts import judge
from tailrl.reports.scores.numbers import Comparison, compare_arms, gains_over_base
from tailrl.stats.tests import Difference

NOISY = "exact in float32, disturbed sampler: noise of 0.5 nats"
NAN = math.nan


def said(**arms: Made) -> tuple[str, str, str]:
    results = results_of(**arms)
    compared = compare_arms(results, arm_pairs.references(results))
    return three_sentences(results, gains_over_base(results), compared, judge(results))


def noisy(remedy: dict[str, object], **numbers: list[float]) -> Made:
    return made({**EXACT, **NOISE, **remedy}, **numbers)


def scored(first: float, second: float, width: float = 0.01, seeds: int = 8) -> dict[str, Made]:
    """Naive and DVP under one mismatch, with these scores."""
    return {
        "naive": noisy(NAIVE, score=around(first, width, seeds)),
        "dvp": noisy(DVP, score=around(second, width, seeds)),
    }


def test_a_decided_difference_has_its_scores_interval_and_dose() -> None:
    first, second, third = said(**scored(0.4, 0.7))
    assert first.startswith("`dvp` ends above `naive` on held-out problems: 70.0 % against 40.0 %, +30.0 [+29.")
    assert f"] points ({NOISY}). For these arms the claim “DVP ends above naive” is reproduced." in first
    assert second.startswith("Against the untrained policy's 50.0 %: `naive` below, -10.0 [")
    assert third == "The size of the mismatch was not recorded."


def test_the_opposite_of_a_claim_is_said() -> None:
    first, *_ = said(**scored(0.7, 0.4))
    assert first.startswith("`dvp` ends below `naive` on held-out problems: 40.0 % against 70.0 %, -30.0 [")
    assert first.endswith("For these arms the claim “DVP ends above naive” is contradicted.")


@pytest.mark.parametrize("gap", [0.02, 0.0])
def test_a_wide_interval_is_never_no_difference(gap: float) -> None:
    first, *_ = said(**scored(0.5, 0.5 + gap, width=0.3, seeds=3))
    assert first.startswith("The difference in held-out score is not decided: `dvp` less `naive`, ")
    assert f"against 50.0 %, {100 * gap:+.1f} [-" in first
    for sentence in said(**scored(0.5, 0.5 + gap, width=0.3, seeds=3)):
        assert "no difference" not in sentence.lower() and "no effect" not in sentence.lower()
        assert "no detectable" not in sentence.lower()


def test_a_single_seed_decides_nothing() -> None:
    first, second, _ = said(**scored(0.2, 0.9, width=0.0, seeds=1))
    assert first.startswith("Nothing is decided between arms: a single seed, or seeds that agree, do not show how much")
    assert first.endswith(f"The difference is `dvp` less `naive`: 90.0 % against 20.0 %, +70.0 points ({NOISY}).")
    assert "`dvp` not decided, +40.0 points" in second


def test_one_arm_is_held_against_the_untrained_policy() -> None:
    first, second, _ = said(only=made(NAIVE, score=around(0.7, 0.01)))
    assert first == "The study has one arm, so no arms are compared."
    assert second.startswith("Against the untrained policy's 50.0 %: `only` above, +20.0 [")


def test_without_a_naive_arm_the_first_one_is_the_reference() -> None:
    """No claim speaks of the pair: the table of differences decides."""
    first, *_ = said(mis=made(DVP_MIS, score=around(0.4, 0.01)), tis=made({"correction": {"token": "tis"}},
                     score=around(0.6, 0.01)))  # fmt: skip
    assert first.startswith("`tis` ends above `mis` on held-out problems: 60.0 % against 40.0 %, +20.0 [")
    assert first.endswith("(vllm in bfloat16, undisturbed).")


@pytest.mark.slow  # the tests beside it, with fewer arms
def test_the_other_differences_are_named_or_counted() -> None:
    doses = {f"floor{n}": {**EXACT, "disturbance": {"floor": 0.1 * n}} for n in range(1, 4)}
    arms: dict[str, Made] = {}
    for number, (name, dose) in enumerate(doses.items()):
        arms[name] = made(dose, score=around(0.5, 0.01))
        arms[f"dvp_{name}"] = made({**dose, **DVP}, score=around(0.9 - 0.1 * number, 0.01))
    _, second, _ = said(**arms)
    assert second.startswith("Also decided: `dvp_floor2` above `floor2`, +30.0 [") and "`dvp_floor3` above" in second
    wide = {f"more{n}": made({**EXACT, **NOISE, **DVP}, score=around(0.5 + n / 50, 0.4)) for n in range(6)}
    wide_alone = said(naive=noisy(NAIVE, score=around(0.5, 0.4)), **wide)
    assert wide_alone[0].startswith(
        "The largest difference in held-out score is not decided: `more5` less `naive`, 60.0 %"
    )
    _, second, _ = said(**arms, naive=noisy(NAIVE, score=around(0.5, 0.4)), **wide)
    assert "Not decided: 6 others. Their 95 % intervals reach from -" in second
    _, second, _ = said(**arms, naive=noisy(NAIVE, score=around(0.5, 0.4)), more0=wide["more0"], more1=wide["more1"])
    assert "Not decided: `more1` less `naive`; `more0` less `naive`. Their 95 % intervals" in second


def test_the_mismatch_and_the_collapses() -> None:
    arms = {
        "naive": noisy(NAIVE, unmasked=[1.3] * 3, reward=falling(10, None, None)),
        "exact": made(EXACT, unmasked=[0.0] * 3, reward=falling(None, None, None)),
    }
    size = "The mismatch (mean k3 between sampler and trainer) is "
    assert said(**arms)[2] == (
        f"{size}1.3 nats a token in `naive`, the most, and 0 in `exact`, the least. "
        "Collapsed runs: 1 of 3 in `naive`; none elsewhere."
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
    first, *_ = three_sentences(results, gains_over_base(results), [comparison(by_table)], [claimed(verdict, by_claim)])
    words = f"This is borderline: p is {by_claim:.3f} by the claim's test over seeds, {by_table:.3f} over seeds and"
    assert (words in first) == borderline
    assert ("p 0.060 after correction" in first) == (not decided)


def test_what_was_not_measured_is_no_effect() -> None:
    silent = replace(claimed(UNDECIDED, NAN), effect=NAN, low=NAN, high=NAN)
    assert effects([], [silent, line_of("dvp.score", arms=""), line_of("dvp.small_kl", arms="dvp, naive")]) == []
    assert effects([replace(comparison(0.01), why="")], []) == [], "a pair that the report does not ask about"

"""Adapted thresholds: against made-up responses of the lost mass, and against the interpolation by hand."""

import itertools
import math

import numpy as np
import pytest

from tailrl.config.vocabulary import Vocabulary
from tailrl.objective.adaptive_rho import LOWEST_LOG_RHO, TOLERANCE, Thresholds

BUDGET = Vocabulary(rule="min_p", rho="e-13", adapt="budget", budget=0.02)
DIFFICULTY = Vocabulary(rule="min_p", rho="e-12", adapt="difficulty", rho_easy="e-4")


@pytest.mark.parametrize(
    ("vocabulary", "number"),
    [
        (Vocabulary(), 0.0),
        (Vocabulary(rule="min_p", rho="e-13"), -13.0),
        (Vocabulary(rule="entropy", rho="10/V"), math.log(1 / 60)),
        (Vocabulary(rule="top_k", k=20), 20.0),
        (Vocabulary(rule="top_p", p=0.9), 0.9),
    ],
)
def test_a_fixed_threshold_stays(vocabulary: Vocabulary, number: float) -> None:
    thresholds = Thresholds(vocabulary, 600)
    assert thresholds.of(3) == pytest.approx(number)
    thresholds.observe([3, 4], [1.0, 0.0], lost_mass=0.3)
    assert thresholds.of(3) == thresholds.of(4) == pytest.approx(number)


# --- the budget ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [0.3, 0.7, 1.0, 1.5])
@pytest.mark.parametrize("rho", ["e-40", "e-13", "e-1"])
def test_the_budget_is_met_where_the_lost_mass_is_a_power_of_rho(power: float, rho: str) -> None:
    """From far above and far below; the error of ln(lost) shrinks by 1 − power / 2 a step once it is small."""
    thresholds = Thresholds(BUDGET.model_copy(update={"rho": rho}), 600)
    lost = []
    for _ in range(60):
        lost.append(24 * min(1.0, math.exp(power * thresholds.of(0)) / 2))
        thresholds.observe([0], [0.5], lost[-1])
    assert lost[-1] == pytest.approx(0.02, rel=0.02)
    assert abs(math.log(lost[0] / 0.02)) > 1
    errors = [abs(math.log(value / 0.02)) for value in lost]
    assert all(after <= before + 1e-9 for before, after in itertools.pairwise(errors))


def test_the_budget_follows_a_policy_that_becomes_sure() -> None:
    """The mass of the tail halves every ten steps: ρ rises, and the lost mass stays near its target."""
    thresholds = Thresholds(BUDGET, 600)
    for step in range(80):
        lost = 200 * math.exp(thresholds.of(0)) * 0.5 ** (step / 10)
        if step >= 40:
            assert lost == pytest.approx(0.02, rel=0.15)
        thresholds.observe([0], [0.5], lost)


@pytest.mark.parametrize("power", [3.0, 4.0, 6.0, 12.0, 40.0, 150.0])
@pytest.mark.parametrize("rho", ["e-9", "e-2"])
def test_the_budget_is_met_where_the_lost_mass_falls_steeply(power: float, rho: str) -> None:
    """Half of the error, whatever the slope, would swing around the target for ever from a power of 4 on."""
    thresholds = Thresholds(BUDGET.model_copy(update={"rho": rho}), 600)
    errors = []
    for _ in range(80):
        lost = 24 * min(1.0, math.exp(power * (thresholds.of(0) + 5)))
        errors.append(abs(math.log(lost / 0.02)))
        thresholds.observe([0], [0.5], lost)
    assert max(errors[-20:]) <= TOLERANCE


@pytest.mark.parametrize("above", [24.0, 0.03])
@pytest.mark.parametrize("below", [0.0, 1e-9, 0.012])
def test_the_threshold_settles_at_a_jump(above: float, below: float) -> None:
    """Many tokens of one probability: no ρ loses the budget. It stays where the loss jumps over it, within 0.1."""
    thresholds, found = Thresholds(BUDGET, 600), []
    for _ in range(160):
        found.append(thresholds.of(0))
        thresholds.observe([0], [0.5], above if found[-1] > -5 else below)
    assert max(abs(value + 5) for value in found[-40:]) < 0.1


@pytest.mark.parametrize("drift", [0.0, 0.07])
@pytest.mark.parametrize("power", [0.5, 1.0, 4.0, 20.0])
def test_noise_and_drift_do_not_drive_the_threshold_away(power: float, drift: float) -> None:
    """Measured with an error of 30 %, of a policy whose tail halves every ten steps: rms within the tolerance."""
    rng, thresholds, errors = np.random.default_rng(0), Thresholds(BUDGET.model_copy(update={"rho": "e-50"}), 600), []
    for step in range(300):
        lost = 0.02 * math.exp(power * (thresholds.of(0) + 50) - drift * step)
        errors.append(math.log(lost / 0.02))
        thresholds.observe([0], [0.5], lost * math.exp(rng.normal(0, 0.3)))
    assert np.sqrt(np.mean(np.square(errors[100:]))) < TOLERANCE


def test_the_gain_comes_back_when_the_target_moves() -> None:
    """After a steep stretch has made it small, a flat one that has moved by five nats is met within forty steps."""
    thresholds = Thresholds(BUDGET, 600)
    gains = []
    for power, centre in ((60.0, -12.9), (1.0, -8.0)):
        for _ in range(40):
            lost = 0.02 * math.exp(power * (thresholds.of(0) - centre))
            thresholds.observe([0], [0.5], lost)
        gains.append(thresholds.gain)
        assert abs(math.log(lost / 0.02)) <= TOLERANCE
    assert gains[0] < 0.05 < gains[1]


def test_one_step_moves_the_threshold_by_half_the_error_and_at_most_e_squared() -> None:
    for lost, change in ((0.02, 0.0), (0.02 * math.e, -0.5), (0.02 / math.e, 0.5), (1e9, -2.0), (1e-12, 2.0), (0.0, 1)):
        thresholds = Thresholds(BUDGET, 600)
        thresholds.observe([0], [0.0], lost)
        assert thresholds.of(0) == pytest.approx(-13 + change), lost


def test_the_threshold_stays_within_its_bounds() -> None:
    thresholds = Thresholds(BUDGET, 600)
    for lost, end in ((0.0, 0.0), (1e9, LOWEST_LOG_RHO), (1e-12, 0.0)):
        for _ in range(80):
            thresholds.observe([0], [0.5], lost)
            assert LOWEST_LOG_RHO <= thresholds.of(0) <= 0
        assert thresholds.of(0) == end


# --- difficulty ------------------------------------------------------------------------------------------


def test_a_threshold_is_interpolated_by_how_often_the_prompt_is_solved() -> None:
    thresholds = Thresholds(DIFFICULTY, 600)
    assert thresholds.of(0) == -12, "before the first step every prompt counts as unsolved"
    thresholds.observe([0, 1, 2], [0.0, 1.0, 0.25], lost_mass=0.5)
    assert [thresholds.of(i) for i in (0, 1, 2)] == pytest.approx([-12, -4, -10])
    # One that was not seen yet is taken to be the average one.
    assert thresholds.of(9) == pytest.approx(-12 + 8 * (1.25 / 3))


def test_only_the_last_rewards_of_a_prompt_count() -> None:
    thresholds = Thresholds(DIFFICULTY, 600)
    thresholds.observe([0, 1], [0.0, 0.0], 0.1)
    thresholds.observe([0], [0.5], 0.1)
    assert [thresholds.of(i) for i in (0, 1, 2)] == pytest.approx([-8, -12, -10])


def test_the_easy_threshold_may_be_the_smaller_one() -> None:
    thresholds = Thresholds(DIFFICULTY.model_copy(update={"rho": "0.3/V", "rho_easy": "e-20"}), 600)
    thresholds.observe([0, 1], [1.0, 0.0], 0.0)
    assert [thresholds.of(0), thresholds.of(1)] == pytest.approx([-20, math.log(0.3 / 600)])

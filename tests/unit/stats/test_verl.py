"""verl's metrics against fractions worked out by hand; `make peers` holds them to verl's own function."""

import math

import numpy as np
import pytest

from tailrl.stats.verl import verl_metrics


def of_ratios(responses: list[list[float]], most: float, by_response: bool) -> dict[str, float]:
    """The metrics of responses whose tokens have these ratios."""
    with np.errstate(divide="ignore"):
        log_ratio_T = np.log(np.concatenate(responses))
    sequence_T = np.repeat(np.arange(len(responses)), [len(response) for response in responses])
    return verl_metrics(log_ratio_T, sequence_T, len(responses), most, by_response)


def test_weights_of_tokens() -> None:
    """The weights are 2 (truncated), 1/4 and 1; the mean weights of the responses are 9/8, 1 and 0."""
    assert of_ratios([[4, 1 / 4], [1], []], most=2.0, by_response=False) == pytest.approx(
        {
            "rollout_is_mean": 13 / 12,
            "rollout_is_std": math.sqrt(74) / 12,
            "rollout_is_min": 1 / 4,
            "rollout_is_max": 2,
            "rollout_is_eff_sample_size": 169 / 243,
            "rollout_is_ratio_fraction_high": 1 / 3,
            "rollout_is_ratio_fraction_low": 1 / 3,
            "rollout_is_seq_mean": 17 / 24,
            "rollout_is_seq_std": math.sqrt(219) / 24,
            "rollout_is_seq_min": 0,
            "rollout_is_seq_max": 9 / 8,
            "rollout_is_seq_max_deviation": 1,
            "rollout_is_seq_fraction_high": 1 / 3,  # before truncation: 17/8
            "rollout_is_seq_fraction_low": 1 / 3,
            "chi2_token": 75 / 16,
            "chi2_seq": 0,
        },
        rel=1e-7,
    )


def test_weights_of_responses() -> None:
    """The responses' ratios are 4, 1/4 and 1 of no token; the first one's two tokens weigh 2 each."""
    assert of_ratios([[8, 1 / 2], [1 / 4], []], most=2.0, by_response=True) == pytest.approx(
        {
            "rollout_is_mean": 17 / 12,
            "rollout_is_std": math.sqrt(98) / 12,
            "rollout_is_min": 1 / 4,
            "rollout_is_max": 4,  # before truncation
            "rollout_is_eff_sample_size": 289 / 387,
            "rollout_is_ratio_fraction_high": 1 / 3,
            "rollout_is_ratio_fraction_low": 1 / 3,
            "rollout_is_seq_mean": 3 / 4,
            "rollout_is_seq_std": math.sqrt(19) / 4,
            "rollout_is_seq_min": 0,
            "rollout_is_seq_max": 2,
            "rollout_is_seq_max_deviation": 1,
            "rollout_is_seq_fraction_high": 1 / 3,
            "rollout_is_seq_fraction_low": 2 / 3,
            "chi2_token": 327 / 16,
            "chi2_seq": 75 / 16,
        },
        rel=1e-7,
    )


@pytest.mark.parametrize("by_response", [False, True])
def test_one_token_of_a_huge_ratio(by_response: bool) -> None:
    """Its log-ratio of 30 nats counts as 20 before truncation."""
    metrics = of_ratios([[math.exp(30)]], most=5.0, by_response=by_response)
    assert metrics["rollout_is_mean"] == 5 and metrics["rollout_is_std"] == metrics["rollout_is_seq_std"] == 0
    assert metrics["rollout_is_eff_sample_size"] == pytest.approx(1)
    assert metrics["rollout_is_max"] == pytest.approx(math.exp(20) if by_response else 5)
    assert metrics["chi2_token"] == metrics["chi2_seq"] == pytest.approx(math.expm1(40))


def test_a_token_that_the_trainer_cannot_sample() -> None:
    by_token, by_response = (of_ratios([[0, 1], [1]], most=2.0, by_response=kind) for kind in (False, True))
    assert by_token["rollout_is_min"] == pytest.approx(math.exp(-20)) and by_response["rollout_is_min"] == 0
    assert by_token["rollout_is_mean"] == pytest.approx(2 / 3) and by_response["rollout_is_mean"] == pytest.approx(
        1 / 3
    )


def test_no_truncation() -> None:
    metrics = of_ratios([[3], [5]], most=math.inf, by_response=True)
    assert metrics["rollout_is_mean"] == pytest.approx(4) and metrics["rollout_is_ratio_fraction_high"] == 0

"""Every diagnostic against its definition, written out one token and one sequence at a time."""

import math

import numpy as np
import pytest
import torch

from tailrl.objective.diagnostics import advantage_skew, log_ratio_metrics, weight_metrics
from tailrl.stats.verl import verl_metrics


def definition(sequences: list[tuple[list[float], list[float]]]) -> dict[str, float]:
    """From (log π_train, log π_infer) of each sequence."""
    sequences = [s for s in sequences if s[0]]
    ratios = [t - i for train, infer in sequences for t, i in zip(train, infer, strict=True)]
    train_ppl = [math.exp(-np.mean(train)) for train, _ in sequences]
    infer_ppl = [math.exp(-np.mean(infer)) for _, infer in sequences]
    log_diff = [math.log(t) - math.log(i) for t, i in zip(train_ppl, infer_ppl, strict=True)]
    return {
        "kl": -np.mean(ratios),
        "k3_kl": np.mean([math.exp(r) - r - 1 for r in ratios]),
        "delta_abs_mean": np.mean(np.abs(ratios)),
        "delta_abs_max": max(map(abs, ratios)),
        "rollout_is_ratio_fraction_high": np.mean([math.exp(r) > 2 for r in ratios]),
        "rollout_is_ratio_fraction_low": np.mean([math.exp(r) < 0.5 for r in ratios]),
        "training_ppl": np.mean(train_ppl),
        "rollout_ppl": np.mean(infer_ppl),
        "ppl_ratio": np.mean([t / i for t, i in zip(train_ppl, infer_ppl, strict=True)]),
        "log_ppl_diff": np.mean(log_diff),
        "log_ppl_abs_diff": np.mean(np.abs(log_diff)),
        "training_log_ppl": np.mean(np.log(train_ppl)),
        "rollout_log_ppl": np.mean(np.log(infer_ppl)),
        "log_ppl_diff_max": max(log_diff),
        "log_ppl_diff_min": min(log_diff),
        "chi2_token": np.mean([math.exp(r) ** 2 for r in ratios]) - 1,
        "chi2_seq": np.mean([math.exp(sum(train) - sum(infer)) ** 2 for train, infer in sequences]) - 1,
        "delta_seq_abs_mean": np.mean([abs(sum(train) - sum(infer)) for train, infer in sequences]),
    }


def measure(sequences: list[tuple[list[float], list[float]]]) -> dict[str, float]:
    """The same through the package, with the tokens shuffled: their order must not matter."""
    flat = [(t, i, n) for n, (train, infer) in enumerate(sequences) for t, i in zip(train, infer, strict=True)]
    np.random.default_rng(0).shuffle(flat)
    train, infer, index = zip(*flat, strict=True)
    float32 = torch.tensor([train, infer], dtype=torch.float64)
    return log_ratio_metrics(float32[0], float32[1], torch.tensor(index).long(), len(sequences))


def random_sequences(lengths: list[int], seed: int = 0) -> list[tuple[list[float], list[float]]]:
    rng = np.random.default_rng(seed)
    train = [-rng.exponential(2.0, n) for n in lengths]
    return [(t.tolist(), np.minimum(t + rng.normal(0, 0.3, len(t)), 0.0).tolist()) for t in train]


@pytest.mark.parametrize("lengths", [[5, 3, 9], [1], [0, 4, 0, 1], [0, 0, 7]])
def test_it_is_the_definition(lengths: list[int]) -> None:
    sequences = random_sequences(lengths)
    assert measure(sequences) == pytest.approx(definition(sequences), rel=1e-10)


def test_large_ratios_are_counted_on_either_side() -> None:
    found = measure([([-1.0, -1.0, -2.0], [-2.0, -1.5, -1.0]), ([-3.0], [-2.5])])
    assert found["rollout_is_ratio_fraction_high"] == found["rollout_is_ratio_fraction_low"] == 0.25


def test_equal_log_probs_give_exact_zeros() -> None:
    sequences = [(train, train) for train, _ in random_sequences([4, 0, 6])]
    found = measure(sequences)
    assert found.pop("training_ppl") == found.pop("rollout_ppl")
    assert found.pop("training_log_ppl") == found.pop("rollout_log_ppl")
    assert found.pop("ppl_ratio") == 1.0
    assert set(found.values()) == {0.0}


def test_a_tiny_difference_is_not_lost_in_rounding() -> None:
    """float32 log-probs that differ by one bit: e^ℓ − 1 in float32 would be noise."""
    train = torch.tensor([-1.0, -2.0])
    infer = torch.nextafter(train, torch.zeros(2))
    ratio = (train.double() - infer.double()).numpy()
    found = log_ratio_metrics(train, infer, torch.tensor([0, 0]), 1)
    assert found["k3_kl"] == pytest.approx(np.mean(ratio**2 / 2), rel=1e-3)
    assert found["kl"] == pytest.approx(-np.mean(ratio), rel=1e-12)
    assert found["chi2_token"] == pytest.approx(np.mean(2 * ratio), rel=1e-5)


def test_no_token_gives_nan_and_no_error() -> None:
    nothing = torch.zeros(0)
    found = log_ratio_metrics(nothing, nothing, torch.zeros(0, dtype=torch.int64), 3)
    assert all(math.isnan(value) for value in found.values())
    assert found.keys() == definition([([-1.0], [-1.0])]).keys()


@pytest.mark.parametrize("masked", [True, False])
def test_a_response_with_an_outside_token_keeps_its_whole_ratio(masked: bool) -> None:
    """Its other tokens count in the means; its ratio is 0 where the token has no probability, and never partial."""
    sequences = random_sequences([3, 1, 0, 2, 1])
    outside = [[False, True, False], [True], [], [False, False], [False]]
    inside = [
        tuple([x for x, out in zip(side, flags, strict=True) if not out] for side in pair)
        for pair, flags in zip(sequences, outside, strict=True)
    ]
    expected = definition(inside)  # type: ignore[arg-type]
    squares = [
        0.0 if masked and any(flags) else math.exp(2 * (sum(train) - sum(infer)))
        for (train, infer), flags in zip(sequences, outside, strict=True)
        if train
    ]
    expected["chi2_seq"] = np.mean(squares) - 1
    expected["delta_seq_abs_mean"] = np.mean(
        [
            abs(sum(train) - sum(infer))
            for (train, infer), flags in zip(sequences, outside, strict=True)
            if train and not (masked and any(flags))
        ]
    )
    flat = [(t, i, n) for n, pair in enumerate(sequences) for t, i in zip(*pair, strict=True)]
    train, infer, index = (torch.tensor(values) for values in zip(*flat, strict=True))
    outside_T = torch.tensor([flag for flags in outside for flag in flags])
    if masked:
        train = train.masked_fill(outside_T, -torch.inf)
    found = log_ratio_metrics(train.double(), infer.double(), index, len(sequences), outside_T)
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_step_of_outside_tokens_alone() -> None:
    found = log_ratio_metrics(
        torch.full((2,), -torch.inf), torch.zeros(2), torch.tensor([0, 1]), 2, torch.ones(2, dtype=torch.bool)
    )
    assert found.pop("chi2_seq") == -1.0
    assert all(math.isnan(value) for value in found.values())


def test_weights_are_the_definition() -> None:
    weights = np.random.default_rng(1).exponential(1.0, 50)
    found = weight_metrics(torch.tensor(weights))
    assert found == pytest.approx(
        {
            "rollout_is_mean": weights.mean(),
            "rollout_is_std": weights.std(),
            "rollout_is_min": weights.min(),
            "rollout_is_max": weights.max(),
            "rollout_is_eff_sample_size": weights.sum() ** 2 / (weights**2).sum() / 50,
        },
        rel=1e-12,
    )


@pytest.mark.parametrize(
    ("weights", "size"), [([1.0, 1.0, 1.0, 1.0], 1.0), ([0.0, 0.0, 3.0, 0.0], 0.25), ([0.0, 0.0], 0.0), ([2.5], 1.0)]
)
def test_effective_sample_size(weights: list[float], size: float) -> None:
    assert weight_metrics(torch.tensor(weights))["rollout_is_eff_sample_size"] == size


def test_skew_is_the_definition_and_adds_up_to_the_mean() -> None:
    """C(r) = −(r − 1) A of each token; a token without advantage adds nothing but counts in the mean."""
    rng = np.random.default_rng(2)
    train, infer, advantage = rng.normal(-3, 1, 60), rng.normal(-3, 1, 60), rng.normal(size=60)
    advantage[::7] = 0.0
    each = [-(math.exp(t - i) - 1) * a for t, i, a in zip(train, infer, advantage, strict=True)]
    found = advantage_skew(*map(torch.tensor, (train, infer, advantage)))
    positive = sum(c for c, a in zip(each, advantage, strict=True) if a > 0) / 60
    negative = sum(c for c, a in zip(each, advantage, strict=True) if a < 0) / 60
    assert found == pytest.approx({"c_positive_advantage": positive, "c_negative_advantage": negative}, rel=1e-12)
    assert sum(found.values()) == pytest.approx(np.mean(each), rel=1e-12)


def test_a_mismatch_independent_of_the_advantage_gives_opposite_skews() -> None:
    """All ratios are 1.1: positive and negative advantages are overweighted by the same factor."""
    advantage = torch.tensor([1.0, -1.0, 2.0, -2.0])
    found = advantage_skew(torch.full((4,), math.log(1.1), dtype=torch.float64), torch.zeros(4), advantage)
    assert found == pytest.approx({"c_positive_advantage": -0.1 * 3 / 4, "c_negative_advantage": 0.1 * 3 / 4})
    assert set(advantage_skew(torch.zeros(0), torch.zeros(0), torch.zeros(0)).values()) == {0.0}


# --- verl's own definitions are in tests/unit/stats/test_verl.py ------------------------------------------


def test_verl_weights_a_response_by_its_tokens_and_ours_does_not() -> None:
    """The case for two names: a long response of small ratio beside a short one of large ratio."""
    log_ratio, of = np.array([-0.2] * 9 + [0.4]), np.array([0] * 9 + [1])
    ours = weight_metrics(torch.tensor([math.exp(-1.8), math.exp(0.4)]))["rollout_is_mean"]
    theirs = verl_metrics(log_ratio, of, 2, most=2.0, by_response=True)["rollout_is_mean"]
    assert ours == pytest.approx((math.exp(-1.8) + math.exp(0.4)) / 2)
    assert theirs == pytest.approx(0.9 * math.exp(-1.8) + 0.1 * math.exp(0.4))

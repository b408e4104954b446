"""verl's metrics of importance weights, as `verl/trainer/ppo/rollout_corr_helper.py` of verl 0.9.1 defines them.

The training loop logs them of a step, and `tailrl diagnose` computes them of a log. Before version 0.8 verl took mean,
largest weight and the means of responses before truncation, and the rest of weights in [1/C, C].
"""

import math

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

BOUND = 20.0  # nats; verl clamps log-ratios to ±20 before it exponentiates them
TINY = 1e-8  # verl adds it to the mean weight that it divides by


def bounded_ratio(log_ratio_X: FloatArray) -> FloatArray:
    """e^ℓ of log-ratios in nats, any shape, with ℓ clamped to ±20; e⁻²⁰ for −inf."""
    ratio_X: FloatArray = np.exp(np.clip(log_ratio_X, -BOUND, BOUND))
    return ratio_X


def truncated_ratio(log_ratio_X: FloatArray, most: float) -> FloatArray:
    """The weight that verl applies, in (0, C]: `bounded_ratio`, at most C = `most`."""
    return np.minimum(bounded_ratio(log_ratio_X), most)


def effective_sample_size(mean: float, mean_square: float) -> float:
    """1 / mean((w / mean w)²) of weights with this mean and mean square, a fraction of their number."""
    return (mean + TINY) ** 2 / mean_square


@np.errstate(over="ignore")  # verl exponentiates the least ratio of a response as it is
def verl_metrics(
    log_ratio_T: FloatArray, sequence_T: NDArray[np.int64], count: int, most: float, by_response: bool
) -> dict[str, float]:
    """What verl logs as `rollout_corr/rollout_is_*` and χ², with `rollout_is_threshold` C.

    Args:
        log_ratio_T: [T] nats, log π_train − log π_infer, at least one; −inf for a token that the trainer gives
            probability 0.
        sequence_T: [T], each token's response, 0 to count − 1.
        count: number of responses. As in verl, one without a token counts: its mean weight is 0, its ratio is 1.
        most: C, above 0; inf for no truncation.
        by_response: a token weighs its whole response's ratio (`rollout_is: sequence`), not its own (`token`).

    Returns:
        rollout_is_mean, _std (population), _eff_sample_size: over tokens, of weights truncated at C.
        rollout_is_max, _min: of tokens' truncated weights; by response of the ratios before truncation.
        rollout_is_ratio_fraction_high, _low: share of ratios above C, below 1/C, of tokens or of responses.
        rollout_is_seq_mean, _std (sample), _max, _min, _max_deviation (from 1): of a response's mean truncated weight.
        rollout_is_seq_fraction_high, _low: share of responses whose mean weight before truncation is above C, below
            1/C.
        chi2_token, chi2_seq: mean squared ratio − 1, per token and per response.
    """
    tokens_N = np.bincount(sequence_T, minlength=count).astype(np.float64)
    whole_N: FloatArray = np.bincount(sequence_T, log_ratio_T, count).astype(np.float64)

    def response_mean(values_T: FloatArray) -> FloatArray:
        mean_N: FloatArray = np.bincount(sequence_T, values_T, count) / np.maximum(tokens_N, 1)
        return mean_N

    log_weight_T = whole_N[sequence_T] if by_response else log_ratio_T
    weight_T = truncated_ratio(log_weight_T, most)
    applied_N = response_mean(weight_T)
    raw_N = response_mean(bounded_ratio(log_weight_T))
    judged_X = whole_N if by_response else log_ratio_T
    largest = math.exp(min(float(whole_N.max()), BOUND)) if by_response else weight_T.max()
    least = np.exp(whole_N.min()) if by_response else weight_T.min()
    metrics = {
        "rollout_is_mean": weight_T.mean(),
        "rollout_is_std": weight_T.std(),
        "rollout_is_min": least,
        "rollout_is_max": largest,
        "rollout_is_eff_sample_size": effective_sample_size(weight_T.mean(), np.square(weight_T).mean()),
        "rollout_is_ratio_fraction_high": (judged_X > math.log(most)).mean(),
        "rollout_is_ratio_fraction_low": (judged_X < -math.log(most)).mean(),
        "rollout_is_seq_mean": applied_N.mean(),
        "rollout_is_seq_std": applied_N.std(ddof=1) if count > 1 else 0.0,
        "rollout_is_seq_min": applied_N.min(),
        "rollout_is_seq_max": applied_N.max(),
        "rollout_is_seq_max_deviation": np.abs(applied_N - 1).max(),
        "rollout_is_seq_fraction_high": (raw_N > most).mean(),
        "rollout_is_seq_fraction_low": (raw_N < 1 / most).mean(),
        "chi2_token": np.square(bounded_ratio(log_ratio_T)).mean() - 1,
        "chi2_seq": np.square(bounded_ratio(whole_N)).mean() - 1,
    }
    return {name: float(value) for name, value in metrics.items()}

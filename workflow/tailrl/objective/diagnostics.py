"""Diagnostics of the training-inference mismatch, from the log-probs of sampled tokens.

Names follow verl's `rollout_corr/*`. So do the definitions of `log_ratio_metrics`, except that ours clamp nothing and
call a ratio large above 2; `weight_metrics` is about responses. `tailrl.stats.verl` has verl's own definitions of what
differs. With ℓ_t = log π_train − log π_infer, K1 = −ℓ and K3 = e^ℓ − ℓ − 1 estimate KL(π_infer ‖ π_train). Everything
is computed in float64.
"""

import math

import torch
from torch import Tensor

from tailrl.objective.corrections import Weights
from tailrl.objective.kl_estimates import k3
from tailrl.objective.sequences import check_logprobs, check_packed, sequence_mean, sequence_sum
from tailrl.runtime.older_names import accepts_older_names
from tailrl.tracking import metrics as keys
from tailrl.tracking.metrics import ROUTING

LARGE_RATIO = torch.tensor(2.0)
"""A token ratio outside [1/2, 2] counts as large."""


@accepts_older_names(logp_train_T="logp_trainer_T", logp_infer_T="logp_sampler_T")
def log_ratio_metrics(
    logp_trainer_T: Tensor, logp_sampler_T: Tensor, sequence_T: Tensor, count: int, outside_T: Tensor | None = None
) -> dict[str, float]:
    """Mismatch metrics from two sets of log-probs of the same sampled tokens.

    Args:
        logp_trainer_T: [T] nats, the trainer's; −inf for a token of probability 0.
        logp_sampler_T: [T] nats, the sampler's, finite.
        sequence_T: int64 [T], each token's sequence, 0 to count − 1.
        count: number of sequences; means over sequences leave out those without a token.
        outside_T: bool [T], tokens to leave out; None: no token. `chi2_seq` and `delta_seq_abs_mean` still count them,
            since a response's ratio is the product over all its tokens.

    Returns:
        kl (mean K1), k3_kl (mean K3), delta_abs_mean, delta_abs_max: over tokens, nats.
        rollout_is_ratio_fraction_high, _low: fraction of tokens with a ratio above 2, below 1/2.
        training_ppl, rollout_ppl: means over sequences of perplexities exp(−mean_t log π).
        training_log_ppl, rollout_log_ppl: means over sequences of −mean_t log π, nats.
        log_ppl_diff_max, log_ppl_diff_min: extremes over sequences of d.
        ppl_ratio, log_ppl_diff, log_ppl_abs_diff: means over sequences of e^d, d and |d|, with d = mean_t(−ℓ_t).
        chi2_token, chi2_seq: E[(π_train/π_infer)²] − 1 per token and per sequence; a sequence with a token of −inf
            counts as −1.
        delta_seq_abs_mean: mean of |log ratio| over sequences without a token of −inf, nats; nan where there are none.
        All are nan without a token.

    Raises:
        StudyError: not one entry a token, no such sequence, or a number above 0, as probabilities are.
    """
    check_packed(count, sequence_T, logp_trainer_T=logp_trainer_T, logp_sampler_T=logp_sampler_T)
    check_logprobs(logp_trainer_T)
    check_logprobs(logp_sampler_T)
    logp_trainer_T, logp_sampler_T = logp_trainer_T.double(), logp_sampler_T.double()
    whole_N = sequence_sum(logp_trainer_T - logp_sampler_T, sequence_T, count)
    whole_N = whole_N[sequence_sum(torch.ones_like(logp_trainer_T), sequence_T, count) > 0]
    if outside_T is not None:
        logp_trainer_T, logp_sampler_T, sequence_T = (
            x[~outside_T] for x in (logp_trainer_T, logp_sampler_T, sequence_T)
        )
    log_ratio_T = logp_trainer_T - logp_sampler_T
    real_N = sequence_sum(torch.ones_like(log_ratio_T), sequence_T, count) > 0
    trainer_N, sampler_N = (sequence_mean(x, sequence_T, count)[real_N] for x in (logp_trainer_T, logp_sampler_T))
    return {
        "kl": -log_ratio_T.mean().item(),
        "k3_kl": k3(log_ratio_T).mean().item(),
        "delta_abs_mean": log_ratio_T.abs().mean().item(),
        "delta_abs_max": log_ratio_T.abs().max().item() if len(log_ratio_T) else math.nan,
        "rollout_is_ratio_fraction_high": (log_ratio_T > LARGE_RATIO.log()).double().mean().item(),
        "rollout_is_ratio_fraction_low": (log_ratio_T < -LARGE_RATIO.log()).double().mean().item(),
        "training_ppl": (-trainer_N).exp().mean().item(),
        "rollout_ppl": (-sampler_N).exp().mean().item(),
        "ppl_ratio": (sampler_N - trainer_N).exp().mean().item(),
        "log_ppl_diff": (sampler_N - trainer_N).mean().item(),
        "log_ppl_abs_diff": (sampler_N - trainer_N).abs().mean().item(),
        "training_log_ppl": -trainer_N.mean().item(),
        "rollout_log_ppl": -sampler_N.mean().item(),
        "log_ppl_diff_max": (sampler_N - trainer_N).max().item() if len(sampler_N) else math.nan,
        "log_ppl_diff_min": (sampler_N - trainer_N).min().item() if len(sampler_N) else math.nan,
        "chi2_token": (2 * log_ratio_T).expm1().mean().item(),
        "chi2_seq": (2 * whole_N).expm1().mean().item(),
        "delta_seq_abs_mean": whole_N[whole_N.isfinite()].abs().mean().item(),
    }


@accepts_older_names(logp_train_T="logp_trainer_T", logp_infer_T="logp_sampler_T")
def loss_metrics(
    logp_trainer_T: Tensor, log_kept_T: Tensor, logp_sampler_T: Tensor, sequence_T: Tensor, weights: Weights
) -> dict[str, float]:
    """What a loss was made of and what it left out, under the keys of `tailrl metrics`.

    Args:
        logp_trainer_T: [T] nats, the trainer's before the first update on these responses; −inf outside its safe set.
        log_kept_T: [T] nats, log Z, the mass that the trainer's safe set keeps.
        logp_sampler_T: [T] nats, the sampler's, finite.
        sequence_T: int64 [T], each token's sequence.
        weights: as `correct` made them.

    Returns:
        `dvp/kept_mass_train_mean`; the fraction and the number of sampled tokens outside the trainer's set;
        `rollout_corr/k3_kl` of those inside; the mean weight that was used; the fractions of responses that a weight's
        threshold and the veto rejected. nan for a mean of nothing.

    Raises:
        StudyError: not one entry a token, or a log-prob above 0.
    """
    outside_T = logp_trainer_T.isneginf()
    ratios = log_ratio_metrics(logp_trainer_T, logp_sampler_T, sequence_T, len(weights.raw_N), outside_T)
    return {
        keys.KEPT_MASS_TRAIN: log_kept_T.exp().mean().item(),
        keys.OUTSIDE: outside_T.float().mean().item(),
        keys.OUTSIDE_COUNT: outside_T.float().sum().item(),
        keys.K3_MASKED: ratios["k3_kl"],
        keys.WEIGHT_USED: weights.used_N.mean().item(),
        keys.REJECTED: weights.rejected_N.float().mean().item(),
        keys.VETOED: weights.vetoed_N.float().mean().item(),
    }


def advantage_skew(logp_trainer_T: Tensor, logp_sampler_T: Tensor, advantage_T: Tensor) -> dict[str, float]:
    """VeXact's C(r) = −(r − 1) A, r = π_train/π_infer, split by the sign of A (arXiv 2605.14220).

    Each is a mean over all tokens, so that the two add up to the mean of C(r). A mismatch independent of A gives them
    opposite signs; one that skews the objective does not.
    """
    skew_T = -(logp_trainer_T.double() - logp_sampler_T.double()).expm1() * advantage_T.double()
    tokens = max(1, len(skew_T))
    return {
        "c_positive_advantage": skew_T[advantage_T > 0].sum().item() / tokens,
        "c_negative_advantage": skew_T[advantage_T < 0].sum().item() / tokens,
    }


def routing_metrics(flips_TL: Tensor, log_ratio_T: Tensor) -> dict[str, float]:
    """How many tokens have other experts in the trainer than in the sampler, and how their log-probs differ.

    Args:
        flips_TL: bool [T, L], whether a layer's set of experts differs where the token is predicted.
        log_ratio_T: [T] nats, ℓ.

    Returns:
        The metrics of `tracking.metrics.ROUTING` by key; nan where there is no such token.
    """
    flipped_T, log_ratio_T = flips_TL.any(1), log_ratio_T.double()
    k3_T, by_layer_L = k3(log_ratio_T), flips_TL.double().mean(0)
    of_tokens = {
        "flip_fraction": flipped_T.double(),
        "flipped_k3_kl": k3_T[flipped_T],
        "unflipped_k3_kl": k3_T[~flipped_T],
        "flipped_k3_share": k3_T[flipped_T].sum() / k3_T.sum(),
    }
    layers = {"mean": by_layer_L.mean(), "first": by_layer_L[0], "last": by_layer_L[-1], "max": by_layer_L.max()}
    named = of_tokens | {f"layer_flip_fraction_{name}": value for name, value in layers.items()}
    return {key: named[key.rpartition("/")[2]].mean().item() for key in ROUTING}


def weight_metrics(weight_N: Tensor) -> dict[str, float]:
    """Mean, standard deviation (population), extremes and effective sample size of importance weights [N].

    The effective sample size is a fraction of N, 1 / mean((w / mean w)²), and 0 where every weight is 0.
    """
    weight_N = weight_N.double()
    mean = weight_N.mean()
    return {
        "rollout_is_mean": mean.item(),
        "rollout_is_std": weight_N.std(correction=0).item(),
        "rollout_is_min": weight_N.min().item(),
        "rollout_is_max": weight_N.max().item(),
        "rollout_is_eff_sample_size": (mean.square() / weight_N.square().mean()).item() if mean > 0 else 0.0,
    }

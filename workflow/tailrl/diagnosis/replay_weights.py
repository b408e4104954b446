"""Each token's weight under a remedy, in NumPy: of a correction, of DVP, and of a loss of the ratio.

The definitions are those of `corrections.py`, `rejections.py`, `ratio_losses.py` and `safe_set.py` in `objective/`.
Those need torch, and a diagnosis does not; `tests/unit/diagnosis/test_replay_weights.py` holds both to the same
numbers. Where a loss is not linear in log π, its derivative is written out here.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tailrl.artifacts.metrics import FloatArray
from tailrl.config.arm import LIMITED, Clip, Correction
from tailrl.config.rejection import LOG_STATISTICS, Rejection
from tailrl.config.vocabulary import Vocabulary
from tailrl.diagnosis.log import Log, sound
from tailrl.diagnosis.parts import part_of
from tailrl.objective.kl_estimates import k1, k2, k3

BoolArray = NDArray[np.bool_]
ReplaySettings = Correction | Vocabulary | Clip

SAPO_TEMPERATURES = (1.0, 1.05)
VESPO_POSITIVE, VESPO_NEGATIVE = (2.0, 3.0), (3.0, 2.0)
VESPO_BOUNDS = (np.log(1e-8), 20.0)
SATURATED = 80.0  # nats; SAPO's sigmoid is flat there


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """Weights of T tokens; `ratio_X`: the weights whose mean over the batch divides them, None without `normalise`."""

    weight_T: FloatArray
    ratio_X: FloatArray | None = None


def sound_tokens(log: Log) -> Log:
    """The tokens with two sound log-probs, none above 0. `recomputed_T` is the trainer's from the update's begin: its
    only one where no other is logged."""
    begin_T = np.where(np.isnan(log.recomputed_T), log.trainer_T, log.recomputed_T)
    tokens = part_of(replace(log, recomputed_T=begin_T), sound(log) & sound(replace(log, trainer_T=begin_T)))
    begin_T = np.minimum(tokens.recomputed_T, 0.0)
    return replace(
        tokens,
        sampler_T=np.minimum(tokens.sampler_T, 0.0),
        trainer_T=tokens.trainer_T - (tokens.recomputed_T - begin_T),
        recomputed_T=begin_T,
    )


def moved(tokens: Log) -> FloatArray:
    """How far the trainer's log-probs moved since the update's begin, [T] nats, of `sound_tokens`."""
    return tokens.trainer_T - tokens.recomputed_T


def by_advantage(settings: ReplaySettings) -> bool:
    """Whether a weight depends on the advantage's sign."""
    if isinstance(settings, Clip):
        return settings.loss != "cispo"
    return isinstance(settings, Correction) and any(rule.when != "always" for rule in settings.reject)


@np.errstate(over="ignore", invalid="ignore", divide="ignore")  # an overflow is an answer here
def token_weights(tokens: Log, settings: ReplaySettings) -> TokenWeights | None:
    """Each token's weight, of `sound_tokens`; None: one overflows float64. DVP keeps what lies in both sides' sets."""
    if isinstance(settings, Vocabulary):
        found = TokenWeights(_dvp(tokens, settings))
    elif isinstance(settings, Clip):
        found = TokenWeights(RATIO_LOSSES[settings.loss](tokens, settings))
    else:
        found = _correction(tokens, settings)
    return found if np.isfinite(found.weight_T).all() else None


# --- sums over responses ---------------------------------------------------------------------------------


def _sum(values_T: FloatArray, tokens: Log) -> FloatArray:
    """Sums over each response, [N]."""
    return np.bincount(tokens.sequence_T, values_T, len(tokens.start_S)).astype(np.float64)


def _mean(values_T: FloatArray, tokens: Log) -> FloatArray:
    """Means over each response, [N]; every response here has a token."""
    return _sum(values_T, tokens) / np.bincount(tokens.sequence_T, minlength=len(tokens.start_S))


def _largest(values_T: FloatArray, tokens: Log) -> FloatArray:
    """Largest value of each response, [N]."""
    largest_N = np.full(len(tokens.start_S), -np.inf)
    np.maximum.at(largest_N, tokens.sequence_T, values_T)
    return largest_N


def _limited(log_ratio: FloatArray, limit: float | None) -> FloatArray:
    """Log-ratios within ± `limit` nats; None: as they are."""
    return log_ratio if limit is None else np.clip(log_ratio, -limit, limit)


# --- corrections -----------------------------------------------------------------------------------------


def _correction(tokens: Log, correction: Correction) -> TokenWeights:
    """A token's weight times its response's; 0 where either is rejected, and in a response with a veto."""
    delta_T = tokens.recomputed_T - tokens.sampler_T
    token_T, sequence_N = _token_ratio(delta_T, correction), _sequence_ratio(tokens, delta_T, correction)
    normalised_by = sequence_N if correction.token == "none" else token_T
    dropped_N = np.zeros(len(tokens.start_S), bool)
    for rule in correction.reject:
        falls_X = _rejected(rule, tokens, correction.log_ratio_limit)
        if rule.by in ("token", "segment"):
            token_T = np.where(falls_X, 0.0, token_T)
        else:
            dropped_N |= falls_X
    if correction.veto is not None:
        dropped_N |= _largest(-delta_T, tokens) > -np.log(correction.veto)
    if correction.veto_above is not None:
        dropped_N |= _largest(delta_T, tokens) > np.log(correction.veto_above)
    sequence_T = np.where(dropped_N, 0.0, sequence_N)[tokens.sequence_T]
    # A zero wins over an infinity: what is dropped weighs 0, whatever its ratio.
    weight_T = np.where((token_T == 0) | (sequence_T == 0), 0.0, token_T * sequence_T)
    return TokenWeights(weight_T, normalised_by if correction.normalise else None)


def _token_ratio(delta_T: FloatArray, correction: Correction) -> FloatArray:
    delta_T = _limited(delta_T, correction.log_ratio_limit)
    most, least = correction.token_threshold, correction.token_lower
    if correction.token == "none":
        return np.ones(len(delta_T))
    if correction.token == "tis":
        return np.clip(np.exp(delta_T), least, most)
    if correction.token == "mask":
        return np.where(_within(delta_T, most, least), np.exp(delta_T), 0.0)
    return np.exp(delta_T)


def _sequence_ratio(tokens: Log, delta_T: FloatArray, correction: Correction) -> FloatArray:
    name, most, least = correction.sequence, correction.limit, correction.sequence_lower
    if name == "none":
        return np.ones(len(tokens.start_S))
    judged_T = delta_T if correction.rejects == "r_corr" else moved(tokens)
    if name in LIMITED:
        ratio_N = np.exp(_limited(_sum(judged_T, tokens), correction.log_ratio_limit))
        if name == "tis":
            return np.clip(ratio_N, least, most)
        outside_N = (ratio_N > most) | (ratio_N < (least or 0.0))
        return np.where(outside_N, 0.0, ratio_N) if name == "mis" else ratio_N
    if name == "geometric":
        kept_N = _within(_mean(judged_T, tokens), most, least)
    elif name == "reject_k1":
        kept_N = np.abs(_mean(judged_T, tokens)) <= most
    elif name == "reject_k3":
        kept_N = _mean(k3(judged_T), tokens) <= most
    elif name in REMEDY_WEIGHTS:
        return REMEDY_WEIGHTS[name](judged_T, tokens, most)
    else:
        raise NotImplementedError(f"a remedy of objective/remedies is not replayed: {name}")
    return kept_N.astype(np.float64)


def _geometric_mis(judged_T: FloatArray, tokens: Log, most: float) -> FloatArray:
    ratio_N = np.exp(_mean(judged_T, tokens))
    return np.where(ratio_N > most, 0.0, ratio_N)


REMEDY_WEIGHTS: dict[str, Callable[[FloatArray, Log, float], FloatArray]] = {
    "geometric_tis": lambda judged_T, tokens, most: np.minimum(np.exp(_mean(judged_T, tokens)), most),
    "geometric_mis": _geometric_mis,
}
"""Those of `objective/remedies`."""


def _within(log_ratio: FloatArray, most: float, least: float | None) -> BoolArray:
    """Where a ratio lies within [1/C, C], or [least, C]; the bounds themselves count."""
    lower = -np.log(most) if least is None else np.log(least)
    within: BoolArray = (log_ratio >= lower) & (log_ratio <= np.log(most))
    return within


# --- rejections ------------------------------------------------------------------------------------------


def _tv(ratio_T: FloatArray, logq_T: FloatArray) -> FloatArray:
    """p − q; far from 1 the difference of the two, since 0 × ∞ is no number."""
    gap_T = np.exp(logq_T) * np.expm1(ratio_T)
    return np.where(np.isfinite(gap_T), gap_T, np.exp(logq_T + ratio_T) - np.exp(logq_T))


def _kl(ratio_T: FloatArray, logq_T: FloatArray) -> FloatArray:
    """KL of (q, 1−q) from (p, 1−p), with the sign of p − q."""
    p_T, q_T = (np.exp(np.minimum(x, 0.0)) for x in (logq_T + ratio_T, logq_T))
    others_T = np.where(q_T == 1, 0.0, (1 - q_T) * np.log1p(-q_T) - (1 - q_T) * np.log1p(-p_T))
    signed_T: FloatArray = np.sign(ratio_T) * (others_T - q_T * ratio_T)
    return signed_T


def _kl_both(ratio_T: FloatArray, logq_T: FloatArray) -> FloatArray:
    """The larger of the binary KL and its reverse."""
    larger_T: FloatArray = np.maximum(np.abs(_kl(ratio_T, logq_T)), np.abs(_kl(-ratio_T, logq_T + ratio_T)))
    return larger_T


STATISTICS: dict[str, Callable[[FloatArray, FloatArray], FloatArray]] = {
    "k1": lambda ratio_T, _: k1(ratio_T),
    "k2": lambda ratio_T, _: k2(ratio_T),
    "k3": lambda ratio_T, _: k3(ratio_T),
    "tv": _tv,
    "kl": _kl,
    "abs_tv": lambda ratio_T, logq_T: np.abs(_tv(ratio_T, logq_T)),
    "abs_kl": lambda ratio_T, logq_T: np.abs(_kl(ratio_T, logq_T)),
    "kl_both": _kl_both,
}
"""How far two policies are apart at a token: from log r = log p/q and log q, [T]."""

REDUCTIONS = {"sum": _sum, "mean": _mean, "max": _largest}


def _rejected(rule: Rejection, tokens: Log, limit: float | None) -> BoolArray:
    """Which tokens, [T], or responses, [N], a rule drops."""
    delta_T = tokens.recomputed_T - tokens.sampler_T
    ratio_T = {"r_corr": delta_T, "r_ppo": moved(tokens), "r_rollout": delta_T + moved(tokens)}[rule.ratio]
    if rule.of in LOG_STATISTICS:
        ratio_T = _limited(ratio_T, limit)
    logq_T = tokens.sampler_T + delta_T if rule.ratio == "r_ppo" else tokens.sampler_T
    value_X, advantage_X = STATISTICS[rule.of](ratio_T, logq_T), tokens.advantage_T
    if rule.by == "batch":
        raise NotImplementedError("by: batch is of all tokens of an update, and a log is read in parts")
    if rule.by == "segment":  # no log says where a turn ends: a response is one segment
        value_X = _mean(value_X, tokens)[tokens.sequence_T]
    elif rule.by != "token":
        value_X, advantage_X = REDUCTIONS[rule.by](value_X, tokens), _mean(advantage_X, tokens)
    above_X = value_X > (np.inf if rule.above is None else rule.above)
    below_X = value_X < (-np.inf if rule.below is None else rule.below)
    if rule.when == "outward":
        return np.where(advantage_X > 0, above_X, below_X)
    return (above_X | below_X) & (advantage_X < 0) if rule.when == "negative" else above_X | below_X


# --- losses of the ratio: the factor of A ∇ log π in their gradients ---------------------------------------


def _positive(tokens: Log) -> BoolArray:
    """Where the advantage is above 0; at 0 nothing is learned, and it counts as negative."""
    return tokens.advantage_T > 0


def _log_ratio(tokens: Log) -> FloatArray:
    """log r of the trainer's present policy to the sampler."""
    return tokens.recomputed_T - tokens.sampler_T + moved(tokens)


def _unclipped(ratio_T: FloatArray, tokens: Log, clip: Clip) -> FloatArray:
    """The ratio, 0 where min(r A, clip(r) A) is the clipped one."""
    low, high = clip.bounds
    acts_T = np.where(_positive(tokens), ratio_T > 1 + high, ratio_T < 1 - low)
    return np.where(acts_T, 0.0, ratio_T)


def _ppo(tokens: Log, clip: Clip) -> FloatArray:
    log_T = _log_ratio(tokens)
    weight_T = _unclipped(np.exp(log_T), tokens, clip)
    flat_T = np.zeros(len(log_T), bool) if clip.limit is None else np.abs(log_T) > clip.limit
    if clip.dual_bound is not None:
        flat_T |= ~_positive(tokens) & (log_T > np.log(clip.dual_bound))
    return np.where(flat_T, 0.0, weight_T)


def _free(tokens: Log, clip: Clip) -> FloatArray:
    log_T = _log_ratio(tokens)
    return np.where(np.abs(log_T) > (clip.limit or np.inf), 0.0, np.exp(log_T))


def _gspo(tokens: Log, clip: Clip) -> FloatArray:
    mean_T = _mean(_log_ratio(tokens), tokens)[tokens.sequence_T]
    flat_T = mean_T > (clip.limit or np.inf)
    return np.where(flat_T, 0.0, _unclipped(np.exp(mean_T), tokens, clip))


def _cispo(tokens: Log, clip: Clip) -> FloatArray:
    low, high = clip.bounds
    return np.clip(np.exp(_log_ratio(tokens)), 1 - low, 1 + high)


def _sapo(tokens: Log, clip: Clip) -> FloatArray:
    """d/dlog r of (4/τ) σ(τ (r − 1))."""
    log_T = _log_ratio(tokens)
    tau_T = np.where(_positive(tokens), *SAPO_TEMPERATURES)
    ratio_T = np.exp(np.minimum(log_T, SATURATED))
    gate_T = 1 / (1 + np.exp(-tau_T * (ratio_T - 1)))
    flat_T = (np.abs(log_T) > (clip.limit or np.inf)) | (log_T > SATURATED)
    return np.where(flat_T, 0.0, 4 * gate_T * (1 - gate_T) * ratio_T)


def _vespo(tokens: Log, clip: Clip) -> FloatArray:
    """φ(w) = w^k e^{λ (1 − w)}, w the response's ratio."""
    log_w_N = np.clip(_sum(_limited(_log_ratio(tokens), clip.limit), tokens), *VESPO_BOUNDS)
    log_w_T = log_w_N[tokens.sequence_T]
    (k_positive, lambda_positive), (k_negative, lambda_negative) = VESPO_POSITIVE, VESPO_NEGATIVE
    k_T = np.where(_positive(tokens), k_positive, k_negative)
    lambda_T = np.where(_positive(tokens), lambda_positive, lambda_negative)
    phi_T: FloatArray = np.exp(k_T * log_w_T + lambda_T * (1 - np.exp(log_w_T)))
    return phi_T


RATIO_LOSSES: dict[str, Callable[[Log, Clip], FloatArray]] = {
    "ppo": _ppo,
    "free": _free,
    "gspo": _gspo,
    "cispo": _cispo,
    "sapo": _sapo,
    "vespo": _vespo,
}


# --- DVP -------------------------------------------------------------------------------------------------


def _dvp(tokens: Log, settings: Vocabulary) -> FloatArray:
    """1 where log π is at least that of the most likely token plus ln ρ, on both sides; an unknown one counts as 1."""
    kept_T = np.ones(len(tokens.recomputed_T), bool)
    for logp_T, top_T in ((tokens.recomputed_T, tokens.trainer_top_T), (tokens.sampler_T, tokens.sampler_top_T)):
        kept_T &= logp_T >= np.maximum(np.nan_to_num(top_T), logp_T) + settings.threshold(1)
    return kept_T.astype(np.float64)

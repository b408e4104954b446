"""Every metric that training logs: its key, unit, meaning, and the function that computes it.

No other module writes a key as a string. `tailrl metrics` prints the table, docs/metrics.md.
"""

from collections.abc import Mapping
from functools import partial
from typing import Self

NOTATION = """\
π_infer is the sampler, π_train the trainer before the step's first update, and ℓ = log π_train − log π_infer of a
sampled token. One case differs: with several minibatches and nothing that scores the rollouts before the first update
(no clip, or bypass), a later minibatch is scored after the updates on the earlier ones. What is read as mismatch then
holds the policy's own movement too.

Constrained distributions are renormalised on the safe set, each side on its own; unmasked ones are the full ones. A
fraction is of the tokens, responses or prompts that the meaning names.
"""


class Metric(str):
    """The key of a metric, with its description. As text, in JSON and in a pickle it is the key alone.

    Attributes:
        unit: of its values.
        meaning: what a value says.
        computed_by: dotted name of the function or method that computes it.
    """

    __slots__ = ("computed_by", "meaning", "unit")
    unit: str
    meaning: str
    computed_by: str

    def __new__(cls, key: str, unit: str, meaning: str, computed_by: str) -> Self:
        metric = super().__new__(cls, key)
        metric.unit, metric.meaning, metric.computed_by = unit, meaning, computed_by
        return metric

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


METRICS: dict[str, Metric] = {}
"""All metrics by their keys, in the order in which a step logs them."""

VERIFICATION: dict[str, Metric] = {}
"""Logged besides where the trainer verifies what the engine draws."""

CORR, CORR_UNMASKED, CORR_RAW, TIME = "rollout_corr", "rollout_corr_unmasked", "rollout_corr_raw", "time"
"""Groups, whose keys are <group>/<name>."""


def in_group(group: str, name: str) -> Metric:
    """The metric of this name in a group; raises KeyError where there is none."""
    return METRICS[f"{group}/{name}"]


def _metric(catalogue: dict[str, Metric], computed_by: str, key: str, unit: str, meaning: str) -> Metric:
    catalogue[key] = metric = Metric(key, unit, meaning, computed_by)
    return metric


_step = partial(_metric, METRICS, "tailrl.training.loop.take_step")
_update = partial(_metric, METRICS, "tailrl.training.step.update")
_optimizer = partial(_metric, METRICS, "tailrl.training.optimizer.optimizer_step")
_rewards = partial(_metric, METRICS, "tailrl.training.step_record.reward_metrics")
_responses = partial(_metric, METRICS, "tailrl.training.step_record.response_metrics")
_phases = partial(_metric, METRICS, "tailrl.training.step_record.Stopwatch.phase")
_record = partial(_metric, METRICS, "tailrl.training.step_record.StepRecord.metrics")
_lost = partial(_metric, METRICS, "tailrl.training.step_record.StepRecord.lost_mass_per_response")
_bounds = partial(_metric, METRICS, "tailrl.training.step_record.StepRecord.bias_bounds")
_ratios = partial(_metric, METRICS, "tailrl.objective.diagnostics.log_ratio_metrics")
_weights = partial(_metric, METRICS, "tailrl.objective.diagnostics.weight_metrics")
_skew = partial(_metric, METRICS, "tailrl.objective.diagnostics.advantage_skew")
_verified = partial(_metric, VERIFICATION, "tailrl.rollout.verified.VerifiedSampler.metrics")

# --- training ----------------------------------------------------------------------------------------

STEP = _step("train/step", "steps", "number of the step, from 0")
LOSS = _update("train/loss", "reward", "policy-gradient loss; its value says little, its gradient is the estimator")
GRADIENT_NORM = _optimizer("train/grad_norm", "norm", "2-norm of the gradient before it is scaled down")
SKIPPED = _step(
    "train/skipped",
    "0 or 1",
    "1 where the update was skipped for a NaN or Inf in log-probs, loss or gradient; what is measured in the update is "
    "null then, and minibatches before the one at fault have had theirs",
)
LEARNING_RATE = _step("train/learning_rate", "rate", "the optimizer's rate in this step")
REWARD = _rewards("reward/mean", "reward", "mean reward of the step's responses")
ALL_RIGHT = _rewards("reward/all_right_fraction", "fraction", "prompts whose responses all earn 1 (no gradient)")
ALL_WRONG = _rewards("reward/all_wrong_fraction", "fraction", "prompts whose responses all earn 0 (no gradient)")
LENGTH = _responses("response/length_mean", "tokens", "mean length of a response")
LENGTH_MAX = _responses("response/length_max", "tokens", "length of the longest response")
STOPPED = _responses("response/stopped_fraction", "fraction", "responses that ended by the end token")
CLIPPED = _record("policy/clip_fraction", "fraction", "tokens whose ratio is clipped (no gradient)")
ENTROPY = _record("policy/entropy", "nats", "entropy of the trainer's constrained distribution, mean over tokens")

# --- mismatch ----------------------------------------------------------------------------------------

_OF_RATIOS = {
    "kl": ("nats", "K1 estimate of KL(π_infer ‖ π_train): mean over tokens of −ℓ"),
    "k3_kl": ("nats", "K3 estimate of KL(π_infer ‖ π_train): mean over tokens of e^ℓ − ℓ − 1"),
    "delta_abs_mean": ("nats", "mean over tokens of |ℓ|"),
    "delta_abs_max": ("nats", "largest |ℓ| of a token"),
    "rollout_is_ratio_fraction_high": ("fraction", "tokens with π_train/π_infer above 2"),
    "rollout_is_ratio_fraction_low": ("fraction", "tokens with π_train/π_infer below 1/2"),
    "training_ppl": ("perplexity", "perplexity of a response under the trainer, mean over responses"),
    "rollout_ppl": ("perplexity", "perplexity of a response under the sampler, mean over responses"),
    "ppl_ratio": ("ratio", "training perplexity over rollout perplexity, mean over responses"),
    "log_ppl_diff": ("nats", "log of training perplexity over rollout perplexity, mean over responses"),
    "log_ppl_abs_diff": ("nats", "absolute log of training perplexity over rollout perplexity, mean over responses"),
    "chi2_token": ("ratio", "mean over tokens of (π_train/π_infer)² − 1"),
}
_OF_WEIGHTS = {
    "rollout_is_mean": ("ratio", "mean weight of a response"),
    "rollout_is_std": ("ratio", "standard deviation of the responses' weights"),
    "rollout_is_min": ("ratio", "smallest weight of a response"),
    "rollout_is_max": ("ratio", "largest weight of a response"),
    "rollout_is_eff_sample_size": ("fraction", "effective sample size over the responses, 1 / mean((w / mean w)²)"),
}


def _group(make: partial[Metric], group: str, described: Mapping[str, tuple[str, str]], ending: str) -> None:
    for name, (unit, meaning) in described.items():
        make(f"{group}/{name}", unit, meaning + ending)


_group(_ratios, CORR, _OF_RATIOS, " (constrained distributions, tokens inside the trainer's set)")
# The trainer gives such a response no probability: the weights' ratio is 0 too, and any other would be partial.
_ratios(
    "rollout_corr/chi2_seq",
    "ratio",
    "mean over responses of (π_train/π_infer)² − 1 (constrained distributions); a response with a token outside the "
    "trainer's set has ratio 0",
)
_group(_ratios, CORR_UNMASKED, _OF_RATIOS, " (unmasked distributions, tokens inside the trainer's set)")
_ratios(
    "rollout_corr_unmasked/chi2_seq",
    "ratio",
    "mean over responses of (π_train/π_infer)² − 1 (unmasked distributions, all tokens)",
)
_ratios(
    "rollout_corr/delta_seq_abs_mean",
    "nats",
    "mean over responses of |Σ_t ℓ| (constrained distributions), without those that have a token outside the trainer's "
    "set",
)
DELTA_SEQUENCE_UNMASKED = _ratios(
    "rollout_corr_unmasked/delta_seq_abs_mean",
    "nats",
    "mean over responses of |Σ_t ℓ| (unmasked distributions, all tokens)",
)
K3_MASKED, K3_UNMASKED = in_group(CORR, "k3_kl"), in_group(CORR_UNMASKED, "k3_kl")
K1_UNMASKED = in_group(CORR_UNMASKED, "kl")

# --- corrections -------------------------------------------------------------------------------------

_group(_weights, CORR_RAW, _OF_WEIGHTS, ", before clipping, rejection and veto")
_group(_weights, CORR, _OF_WEIGHTS, ", as used in the loss")
WEIGHT_USED, WEIGHT_RAW = in_group(CORR, "rollout_is_mean"), in_group(CORR_RAW, "rollout_is_mean")
WEIGHT_RAW_MIN = in_group(CORR_RAW, "rollout_is_min")
SAMPLE_SIZE_RAW = in_group(CORR_RAW, "rollout_is_eff_sample_size")
SKEW_POSITIVE = _skew(
    "rollout_corr/c_positive_advantage",
    "reward",
    "C(r) = −(r − 1) A with r = π_train/π_infer, over the tokens with A > 0, as a mean over all tokens",
)
SKEW_NEGATIVE = _skew("rollout_corr/c_negative_advantage", "reward", "the same C(r) over the tokens with A < 0")
MASKED_TOKENS = _record(
    "rollout_corr/rollout_rs_masked_fraction", "fraction", "tokens that the correction's token threshold masks"
)
REJECTED = _record(
    "rollout_corr/rollout_rs_seq_masked_fraction", "fraction", "responses that the correction's threshold rejects"
)
VETOED = _record("rollout_corr/veto_seq_fraction", "fraction", "responses that the veto discards")

# --- pruning: DVP's safe sets ------------------------------------------------------------------------

KEPT_MASS_TRAIN = _record(
    "dvp/kept_mass_train_mean", "fraction", "Z, probability mass of the trainer's safe set, mean over tokens"
)
KEPT_MASS_TRAIN_MIN = _record("dvp/kept_mass_train_min", "fraction", "smallest Z of a token")
KEPT_MASS_ROLLOUT = _record(
    "dvp/kept_mass_rollout_mean", "fraction", "Z', probability mass of the sampler's safe set, mean over tokens"
)
KEPT_MASS_ROLLOUT_MIN = _record("dvp/kept_mass_rollout_min", "fraction", "smallest Z' of a token")
LOST_MASS = _lost(
    "dvp/lost_mass_per_response",
    "rewards' range",
    "Σ_t (1 − Z_t) in the trainer, mean over responses: the bias bound of Prop. 5.5",
)
BIAS_BOUND = _bounds(
    "dvp/bias_bound_paper",
    "rewards' range",
    "the bias bound as the paper has it, T (1 − Z_min): the longest response and the smallest Z",
)
TOTAL_VARIATION = _bounds(
    "dvp/total_variation",
    "rewards' range",
    "1 − Π_t Z_t in the trainer, mean over responses: the chance that a response of the full policy leaves the set, "
    "and the sharpest bound of |J_mp − J|",
)
THRESHOLD = _step("dvp/threshold", "ln ρ, k or p", "the number of the safe set's rule, mean over responses")
KEPT_VOCAB_TRAIN = _record(
    "dvp/kept_vocab_per_token_train", "tokens", "|V_S|, size of the trainer's safe set, mean over tokens"
)
KEPT_VOCAB_ROLLOUT = _record(
    "dvp/kept_vocab_per_token_rollout", "tokens", "|V'_S|, size of the sampler's safe set, mean over tokens"
)
OUTSIDE = _record(
    "dvp/sampled_outside_train_support_fraction", "fraction", "sampled tokens outside the trainer's safe set"
)
OUTSIDE_COUNT = _record("dvp/sampled_outside_train_support_count", "tokens", "number of sampled tokens outside it")
OUTSIDE_DELTA = _record(
    "dvp/outside_delta_abs_mean",
    "nats",
    "mean |ℓ| of sampled tokens outside it (unmasked distributions); null without any",
)

# --- time --------------------------------------------------------------------------------------------

_PHASES = {
    "rollout": "generation",
    "reward": "decoding and scoring the responses",
    "forward": "packing, forward and loss",
    "backward": "backward",
    "optimizer": "clipping and the optimizer",
    "weights": "handing the weights to the engine",
    "metrics": "the diagnostics, and logging and saving after the step before",
}
PHASES = tuple(_PHASES)
"""The phases that a step is timed by; the rest of the whole step is `other`."""

_group(_phases, TIME, {name: ("seconds", what) for name, what in _PHASES.items()}, "")
STEP_SECONDS = _step("time/step", "seconds", "the whole step")
TOKENS_PER_SECOND = _step("throughput/tokens_per_second", "tokens per second", "response tokens over the whole step")

# --- where the trainer verifies ----------------------------------------------------------------------

VERIFY_ROUNDS = _verified(
    "verification/rounds", "count", "rounds of proposal and scoring until every response was done"
)
VERIFY_AGREEMENT = _verified(
    "verification/agreement", "fraction", "judged tokens that the engine and the trainer drew alike"
)
VERIFY_PROPOSED = _verified(
    "verification/proposed_per_kept", "ratio", "tokens that the engine proposed for each token of the responses"
)
VERIFY_SECONDS = _verified("verification/seconds", "seconds", "the scoring passes, a part of time/rollout")

"""Every metric that training logs: its key as a constant, with the description that `metrics.yaml` holds.

No other module writes a key as a string. `tailrl metrics` prints the table.
"""

import math
from typing import Self

from tailrl.runtime.data_files import yaml_beside

NOTATION = """\
π_infer is the sampler, π_train the trainer before the step's first update, and ℓ = log π_train − log π_infer of a
sampled token. Runs of before 2026-11-27 differ in one case. With several minibatches and no clip, or clip.ratio:
bypass, they scored a later minibatch after the updates on the earlier ones. Their mismatch holds the policy's movement
too.

Constrained distributions are renormalised on the safe set, each side on its own; unmasked ones are the full ones. A
fraction is of the tokens, responses or prompts that the meaning names.

rollout_corr_verl/ has the definitions of verl 0.9.1. A token weighs its ratio, or its response's where the arm weights
responses (is, tis, mis). C is the threshold of that weight, 2 without one. Log-ratios are clamped to ±20 nats. Runs of
before 2026-11-27 have these keys as verl defined them before its version 0.8: rollout_is_mean, _max and _seq_* are of
weights before truncation, _std and _eff_sample_size of weights in [1/C, C].
"""

FLOAT32_MAX = (2 - 2**-23) * 2.0**127

ROUNDING = 1e-3
"""By how much rounding may take a value out of its range: a mass of probability, summed in float32."""


class Metric(str):
    """The key of a metric, with its description. As text, in JSON and in a pickle it is the key alone.

    Attributes:
        unit: of its values.
        meaning: what a value says.
        computed_by: dotted name of the function or method that computes it.
        least, most: the range of its values.
    """

    __slots__ = ("computed_by", "least", "meaning", "most", "unit")
    unit: str
    meaning: str
    computed_by: str
    least: float
    most: float

    def __new__(cls, key: str, unit: str, meaning: str, computed_by: str, range: list[float | None]) -> Self:
        metric = super().__new__(cls, key)
        metric.unit, metric.meaning, metric.computed_by = unit, meaning, computed_by
        least, most = range
        metric.least = -FLOAT32_MAX if least is None else least
        metric.most = FLOAT32_MAX if most is None else most
        return metric

    def refusal(self, value: float) -> str | None:
        """Why the metric cannot have this value, in words; None where it can."""
        if not math.isfinite(value):
            return "a value that is not finite is written as null"
        if not self.least - ROUNDING <= value <= self.most + ROUNDING:
            return f"it lies between {self.least:g} and {self.most:g}"
        return None

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


CORR, CORR_UNMASKED, CORR_RAW = "rollout_corr", "rollout_corr_unmasked", "rollout_corr_raw"
CORR_VERL, TIME = "rollout_corr_verl", "time"
"""Groups, whose keys are <group>/<name>."""

CATALOGUE = {key: Metric(key, **described) for key, described in yaml_beside(__file__, "metrics.yaml").items()}
"""Every metric by its key."""

VERIFICATION = {key: metric for key, metric in CATALOGUE.items() if key.startswith("verification/")}
"""Logged besides where the trainer verifies the engine's tokens."""

ROUTING = {key: metric for key, metric in CATALOGUE.items() if key.startswith("routing/")}
"""Logged besides where the sampler says which experts it chose (`sampler.routes`)."""

CURRICULUM = {key: metric for key, metric in CATALOGUE.items() if key.startswith("curriculum/")}
"""Logged besides where a study has a curriculum."""

METRICS = {key: metric for key, metric in CATALOGUE.items() if key not in {*VERIFICATION, *ROUTING, *CURRICULUM}}
"""All other metrics by their keys, in the order in which a step logs them."""


def in_group(group: str, name: str) -> Metric:
    """The metric of this name in a group; raises KeyError for an unknown one."""
    return METRICS[f"{group}/{name}"]


STEP = METRICS["train/step"]
LOSS = METRICS["train/loss"]
GRADIENT_NORM = METRICS["train/grad_norm"]
SKIPPED = METRICS["train/skipped"]
LEARNING_RATE = METRICS["train/learning_rate"]
REWARD = METRICS["reward/mean"]
ALL_RIGHT = METRICS["reward/all_right_fraction"]
ALL_WRONG = METRICS["reward/all_wrong_fraction"]
LENGTH = METRICS["response/length_mean"]
LENGTH_MAX = METRICS["response/length_max"]
STOPPED = METRICS["response/stopped_fraction"]
CLIPPED = METRICS["policy/clip_fraction"]
ENTROPY = METRICS["policy/entropy"]
REFERENCE_K1 = METRICS["policy/reference_k1"]
REFERENCE_K3 = METRICS["policy/reference_k3"]
K3_MASKED = METRICS["rollout_corr/k3_kl"]
WEIGHT_USED = METRICS["rollout_corr/rollout_is_mean"]
SKEW_POSITIVE = METRICS["rollout_corr/c_positive_advantage"]
SKEW_NEGATIVE = METRICS["rollout_corr/c_negative_advantage"]
TRUNCATED = METRICS["rollout_corr/truncated_fraction"]
NORMALISER = METRICS["rollout_corr/rollout_is_batch_norm_factor"]
MASKED_TOKENS = METRICS["rollout_corr/rollout_rs_masked_fraction"]
REJECTED = METRICS["rollout_corr/rollout_rs_seq_masked_fraction"]
VETOED = METRICS["rollout_corr/veto_seq_fraction"]
K1_UNMASKED = METRICS["rollout_corr_unmasked/kl"]
K3_UNMASKED = METRICS["rollout_corr_unmasked/k3_kl"]
DELTA_SEQUENCE_UNMASKED = METRICS["rollout_corr_unmasked/delta_seq_abs_mean"]
WEIGHT_RAW = METRICS["rollout_corr_raw/rollout_is_mean"]
SAMPLE_SIZE_RAW = METRICS["rollout_corr_raw/rollout_is_eff_sample_size"]
KEPT_MASS_TRAIN = METRICS["dvp/kept_mass_train_mean"]
KEPT_MASS_TRAIN_MIN = METRICS["dvp/kept_mass_train_min"]
KEPT_MASS_ROLLOUT = METRICS["dvp/kept_mass_rollout_mean"]
KEPT_MASS_ROLLOUT_MIN = METRICS["dvp/kept_mass_rollout_min"]
LOST_MASS = METRICS["dvp/lost_mass_per_response"]
BIAS_BOUND = METRICS["dvp/bias_bound_paper"]
TOTAL_VARIATION = METRICS["dvp/total_variation"]
THRESHOLD = METRICS["dvp/threshold"]
KEPT_VOCAB_TRAIN = METRICS["dvp/kept_vocab_per_token_train"]
KEPT_VOCAB_ROLLOUT = METRICS["dvp/kept_vocab_per_token_rollout"]
OUTSIDE = METRICS["dvp/sampled_outside_train_support_fraction"]
OUTSIDE_COUNT = METRICS["dvp/sampled_outside_train_support_count"]
OUTSIDE_DELTA = METRICS["dvp/outside_delta_abs_mean"]
STEP_SECONDS = METRICS["time/step"]
TOKENS_PER_SECOND = METRICS["throughput/tokens_per_second"]
CURRICULUM_LEVEL = CURRICULUM["curriculum/level"]
VERIFY_ROUNDS = VERIFICATION["verification/rounds"]
VERIFY_AGREEMENT = VERIFICATION["verification/agreement"]
VERIFY_PROPOSED = VERIFICATION["verification/proposed_per_kept"]
VERIFY_SECONDS = VERIFICATION["verification/seconds"]

PHASES = ("rollout", "reward", "forward", "backward", "optimizer", "weights", "metrics")
"""The phases of a step that are timed; the rest of the whole step is `other`."""

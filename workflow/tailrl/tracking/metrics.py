"""Every metric that training logs: its key as a constant, with the description that `metrics.yaml` holds.

No other module writes a key as a string. `tailrl metrics` prints the table.
"""

import math
from dataclasses import dataclass

from tailrl.runtime.data_files import yaml_beside

FLOAT32_MAX = (2 - 2**-23) * 2.0**127
ROUNDING = 1e-3  # by so much rounding may take a value out of its range: a mass of probability, summed in float32


@dataclass(frozen=True, slots=True)
class Metric:
    """What a metric is."""

    unit: str  # of its values
    meaning: str
    computed_by: str  # dotted name of the function or method
    least: float  # of the range of its values
    most: float

    def refusal(self, value: float) -> str | None:
        """Why the metric cannot have this value, in words; None where it can."""
        if not math.isfinite(value):
            return "a value that is not finite is written as null"
        if not self.least - ROUNDING <= value <= self.most + ROUNDING:
            return f"it lies between {self.least:g} and {self.most:g}"
        return None


def _read() -> dict[str, Metric]:
    catalogue = {}
    for key, described in yaml_beside(__file__, "metrics.yaml").items():
        least, most = described.pop("range")
        least = -FLOAT32_MAX if least is None else least
        catalogue[key] = Metric(**described, least=least, most=FLOAT32_MAX if most is None else most)
    return catalogue


CATALOGUE = _read()  # every metric by its key
# These are logged only if the trainer verifies the engine's tokens, if the sampler says which experts it chose
# (`sampler.routes`), or if the study has a curriculum.
VERIFICATION = {key: metric for key, metric in CATALOGUE.items() if key.startswith("verification/")}
ROUTING = {key: metric for key, metric in CATALOGUE.items() if key.startswith("routing/")}
CURRICULUM = {key: metric for key, metric in CATALOGUE.items() if key.startswith("curriculum/")}
# All others, in the order in which a step logs them.
METRICS = {key: metric for key, metric in CATALOGUE.items() if key not in {*VERIFICATION, *ROUTING, *CURRICULUM}}

# Groups, whose keys are <group>/<name>.
CORR = "rollout_corr"
CORR_UNMASKED = "rollout_corr_unmasked"
CORR_RAW = "rollout_corr_raw"
CORR_VERL = "rollout_corr_verl"
TIME = "time"


def in_group(group: str, name: str) -> str:
    """The key of this name in a group; raises KeyError for an unknown one."""
    key = f"{group}/{name}"
    if key not in METRICS:
        raise KeyError(key)
    return key


STEP = "train/step"
LOSS = "train/loss"
GRADIENT_NORM = "train/grad_norm"
SKIPPED = "train/skipped"
LEARNING_RATE = "train/learning_rate"
REWARD = "reward/mean"
ALL_RIGHT = "reward/all_right_fraction"
ALL_WRONG = "reward/all_wrong_fraction"
LENGTH = "response/length_mean"
LENGTH_MAX = "response/length_max"
STOPPED = "response/stopped_fraction"
CLIPPED = "policy/clip_fraction"
ENTROPY = "policy/entropy"
REFERENCE_K1 = "policy/reference_k1"
REFERENCE_K3 = "policy/reference_k3"
K3_MASKED = "rollout_corr/k3_kl"
WEIGHT_USED = "rollout_corr/rollout_is_mean"
SKEW_POSITIVE = "rollout_corr/c_positive_advantage"
SKEW_NEGATIVE = "rollout_corr/c_negative_advantage"
TRUNCATED = "rollout_corr/truncated_fraction"
NORMALISER = "rollout_corr/rollout_is_batch_norm_factor"
MASKED_TOKENS = "rollout_corr/rollout_rs_masked_fraction"
REJECTED = "rollout_corr/rollout_rs_seq_masked_fraction"
VETOED = "rollout_corr/veto_seq_fraction"
K1_UNMASKED = "rollout_corr_unmasked/kl"
K3_UNMASKED = "rollout_corr_unmasked/k3_kl"
DELTA_SEQUENCE_UNMASKED = "rollout_corr_unmasked/delta_seq_abs_mean"
WEIGHT_RAW = "rollout_corr_raw/rollout_is_mean"
SAMPLE_SIZE_RAW = "rollout_corr_raw/rollout_is_eff_sample_size"
KEPT_MASS_TRAIN = "dvp/kept_mass_train_mean"
KEPT_MASS_TRAIN_MIN = "dvp/kept_mass_train_min"
KEPT_MASS_ROLLOUT = "dvp/kept_mass_rollout_mean"
KEPT_MASS_ROLLOUT_MIN = "dvp/kept_mass_rollout_min"
LOST_MASS = "dvp/lost_mass_per_response"
BIAS_BOUND = "dvp/bias_bound_paper"
TOTAL_VARIATION = "dvp/total_variation"
THRESHOLD = "dvp/threshold"
KEPT_VOCAB_TRAIN = "dvp/kept_vocab_per_token_train"
KEPT_VOCAB_ROLLOUT = "dvp/kept_vocab_per_token_rollout"
OUTSIDE = "dvp/sampled_outside_train_support_fraction"
OUTSIDE_COUNT = "dvp/sampled_outside_train_support_count"
OUTSIDE_DELTA = "dvp/outside_delta_abs_mean"
STEP_SECONDS = "time/step"
TOKENS_PER_SECOND = "throughput/tokens_per_second"
CURRICULUM_LEVEL = "curriculum/level"
VERIFY_ROUNDS = "verification/rounds"
VERIFY_AGREEMENT = "verification/agreement"
VERIFY_PROPOSED = "verification/proposed_per_kept"
VERIFY_SECONDS = "verification/seconds"

SKEW = "c_skew"  # |C(r)|, summed over tokens of either sign of the advantage: 0 if the mismatch does not depend on it
SKEWED = (SKEW_POSITIVE, SKEW_NEGATIVE)  # the two parts of it
SIGNALS = (*METRICS, SKEW)  # what `training.stop_when` may follow

PHASES = ("rollout", "reward", "forward", "backward", "optimizer", "weights", "metrics")
"""The phases of a step that are timed; the rest of the whole step is `other`."""

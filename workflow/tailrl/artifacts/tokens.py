"""tokens.npz: the sampled tokens of the steps that a run keeps. The only reader and writer of these files."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrl.artifacts.files import parse_arrays
from tailrl.artifacts.manifest import read_vouched
from tailrl.artifacts.metrics import FloatArray, Metrics
from tailrl.runtime.errors import DataError
from tailrl.tracking import metrics as keys

ARRAYS = (
    *("step", "logp_train", "logp_infer", "logp_train_masked", "logp_infer_masked", "outside"),
    *("token", "position", "sequence", "advantage", "reward"),
)
"""The file's arrays, (T,). int32: the training step. float32, nats: log π_train and log π_infer of the sampled token,
unmasked and masked. bool: whether it lies outside the trainer's safe set. int32: its id, its position, and the
response's number in the step (number // group_size is the prompt's). float32: the response's advantage and reward.
With `sampler.routes` there is one more, flips, int64: bit l is set where layer l of experts has another set of them in
the trainer than in the sampler, for the first 63 layers."""


TokenArrays = dict[str, NDArray[Any]]
"""The arrays of a step or of a file, by name."""

TRAIN_LOG_PPL, INFER_LOG_PPL = (
    keys.in_group(keys.CORR_UNMASKED, f"{side}_log_ppl") for side in ("training", "rollout")
)
"""What a step's metrics say of its log-probs. Other tokens have other ones, but for a chance in many millions."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The arrays that statistics use, of the T tokens that one run kept.

    Attributes:
        step_T: int32, the training step.
        logp_trainer_T: float64, nats: unmasked log π_train of the sampled token.
        logp_sampler_T: float64, nats: unmasked log π_infer of the same token.
        sequence_T: int32, the response's number in its step.
    """

    step_T: NDArray[np.int32]
    logp_trainer_T: FloatArray
    logp_sampler_T: FloatArray
    sequence_T: NDArray[np.int32]

    def responses(self) -> NDArray[np.intp]:
        """Each token's response, numbered from 0 over all kept steps, (T,)."""
        return _responses(self.step_T, self.sequence_T)[1]


def write_tokens(job: Path, arrays: Mapping[str, NDArray[np.generic]]) -> None:
    """Write the arrays into a job's folder."""
    np.savez_compressed(job / "tokens.npz", allow_pickle=False, **arrays)


def read_token_arrays(job: Path, names: Sequence[str] = ARRAYS) -> dict[str, NDArray[Any]]:
    """Arrays in a job's folder, by name; raises StudyError if the file is missing, unreadable, empty or ragged."""
    path = job / "tokens.npz"
    arrays = parse_arrays(read_vouched(path), names, path)
    if any(array.ndim > 1 for array in arrays.values()):
        raise DataError(f"{path}: its arrays do not hold one number a token")
    return arrays


def read_tokens(job: Path, metrics: Metrics, keep_every: int) -> Tokens:
    """The tokens in a job's folder, of a run with these metrics that keeps every `keep_every`-th step.

    Raises:
        StudyError: as `read_token_arrays` does; a step that the run does not keep; rewards or log-probs that differ
            from those in the metrics of their step.
    """
    path = job / "tokens.npz"
    names = ("step", "logp_train", "logp_infer", "outside", "sequence", "reward")
    step_T, trainer_T, sampler_T, outside_T, sequence_T, reward_T = read_token_arrays(job, names).values()
    # Of numbers that fit no type the casts give any number, which is then refused.
    with np.errstate(all="ignore"):
        step_T, sequence_T = step_T.astype(np.int32), sequence_T.astype(np.int32)
    trainer_T, sampler_T, inside_T = trainer_T.astype(np.float64), sampler_T.astype(np.float64), ~outside_T.astype(bool)
    steps_N = np.unique(step_T)
    # Besides every `keep_every`-th step, a run keeps the first step whose update was not skipped.
    if steps_N[0] < 0 or steps_N[-1] >= len(metrics[keys.STEP]) or (steps_N[1:] % keep_every).any():
        raise DataError(f"{path}: holds tokens of steps that its run does not keep")
    whole_T = np.ones(len(step_T), bool)
    for key, values_T, of_T in (
        (keys.REWARD, reward_T, whole_T),
        (TRAIN_LOG_PPL, -trainer_T, inside_T),
        (INFER_LOG_PPL, -sampler_T, inside_T),
    ):
        recorded_N = metrics[key][steps_N] if key in metrics else np.full(len(steps_N), math.nan)
        found_N = _means(values_T[of_T], np.searchsorted(steps_N, step_T[of_T]), sequence_T[of_T], len(steps_N))
        # Both are sums of the same float32 numbers.
        other_N = ~np.isnan(recorded_N) & ~np.isclose(found_N, recorded_N, rtol=1e-5, atol=1e-6)
        for step, found, recorded in zip(steps_N[other_N], found_N[other_N], recorded_N[other_N], strict=True):
            raise DataError(f"{path}: in step {step} {key} is {found:.6g}, and metrics.jsonl says {recorded:.6g}")
    return Tokens(step_T, trainer_T, sampler_T, sequence_T)


def _means(values_T: NDArray[Any], step_T: NDArray[Any], sequence_T: NDArray[np.int32], steps: int) -> FloatArray:
    """For each of so many steps the mean over its responses of their tokens' means, (N,); NaN without a token."""
    step_R, of_T = _responses(step_T, sequence_T)
    with np.errstate(all="ignore"):
        mean_R = np.bincount(of_T, values_T.astype(np.float64)) / np.bincount(of_T)
        return np.bincount(step_R, mean_R, steps) / np.bincount(step_R, minlength=steps)


def _responses(step_T: NDArray[Any], sequence_T: NDArray[np.int32]) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """The step of each response, and the response of each token."""
    response_R, of_T = np.unique((step_T.astype(np.int64) << 32) + sequence_T.view(np.uint32), return_inverse=True)
    return response_R >> 32, of_T

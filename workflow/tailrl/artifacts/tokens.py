"""tokens.npz: the sampled tokens of the steps that a run keeps. The only reader and writer of these files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrl.artifacts.files import parse_arrays
from tailrl.artifacts.manifest import read_vouched
from tailrl.artifacts.metrics import FloatArray
from tailrl.runtime.errors import StudyError

ARRAYS = (
    *("step", "logp_train", "logp_infer", "logp_train_masked", "logp_infer_masked", "outside"),
    *("token", "position", "sequence", "advantage", "reward"),
)
"""The file's arrays, (T,). int32: the training step. float32, nats: log π_train and log π_infer of the sampled token,
unmasked and masked. bool: whether it lies outside the trainer's safe set. int32: its id, its position, and the
response's number in the step (number // group_size is the prompt's). float32: the response's advantage and reward."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The arrays that statistics use, of the T tokens that one run kept.

    Attributes:
        step_T: int32, the training step.
        logp_train_T: float64, nats: unmasked log π_train of the sampled token.
        logp_infer_T: float64, nats: unmasked log π_infer of the same token.
    """

    step_T: NDArray[np.int32]
    logp_train_T: FloatArray
    logp_infer_T: FloatArray


def write_tokens(job: Path, arrays: Mapping[str, NDArray[np.generic]]) -> None:
    """Write the arrays into a job's folder."""
    np.savez_compressed(job / "tokens.npz", allow_pickle=False, **arrays)


def read_token_arrays(job: Path, names: Sequence[str] = ARRAYS) -> dict[str, NDArray[Any]]:
    """Arrays in a job's folder, by name; raises StudyError if the file is missing, unreadable, empty or ragged."""
    path = job / "tokens.npz"
    arrays = parse_arrays(read_vouched(path), names, path)
    if any(array.ndim > 1 for array in arrays.values()):
        raise StudyError(f"{path}: its arrays do not hold one number a token")
    return arrays


def read_tokens(job: Path) -> Tokens:
    """The tokens in a job's folder; raises StudyError like `read_token_arrays`."""
    step, train, infer = read_token_arrays(job, ("step", "logp_train", "logp_infer")).values()
    return Tokens(step.astype(np.int32), train.astype(np.float64), infer.astype(np.float64))

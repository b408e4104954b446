"""Gathers the ranks' samples: every rank then has the rollouts and rewards of the whole step."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrl.rollout.types import Request, Rollout
from tailrl.runtime import distributed


def of_all_ranks(
    requests: Sequence[Request], rollouts: Sequence[Rollout], rewards: NDArray[np.float32], together: int = 1
) -> tuple[list[Rollout], NDArray[np.float32]]:
    """The rollouts of a step and their rewards, in the order of its requests.

    Each rank scores its own responses: a judge with a time limit might decide differently on another rank.

    Args:
        requests: of the whole step.
        rollouts: of this rank's share (`distributed.share`), without kept logits.
        rewards: one for each of these rollouts.
        together: ranks with the same share; the first one's counts.
    """
    if distributed.count() == 1:
        return list(rollouts), rewards
    given = distributed.gathered(_tensors(rollouts, rewards))[::together]
    sampled = [rollout for tensors in given for rollout in _sampled(tensors)]
    whole = [Rollout(request.prompt_tokens, *rollout) for request, rollout in zip(requests, sampled, strict=True)]
    return whole, torch.cat([tensors["rewards"] for tensors in given]).numpy()


def _tensors(rollouts: Sequence[Rollout], rewards: NDArray[np.float32]) -> dict[str, Tensor]:
    """Arrays of all responses' tokens, concatenated, and of one number per response."""

    def joined(arrays: Iterable[NDArray[np.generic]], dtype: type[np.generic]) -> Tensor:
        # A rank may have no response.
        return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *arrays]))

    return {
        "lengths": torch.tensor([len(rollout.tokens) for rollout in rollouts], dtype=torch.int64),
        "tokens": joined((np.array(rollout.tokens, np.int64) for rollout in rollouts), np.int64),
        "logp_infer": joined((rollout.logp_infer_T for rollout in rollouts), np.float32),
        "log_kept_infer": joined((rollout.log_kept_infer_T for rollout in rollouts), np.float32),
        "kept_vocab_infer": joined((rollout.kept_vocab_infer_T for rollout in rollouts), np.int32),
        "stopped": torch.tensor([rollout.stopped for rollout in rollouts], dtype=torch.bool),
        "rewards": torch.from_numpy(rewards),
    }


def _sampled(tensors: dict[str, Tensor]) -> Iterator[tuple[Any, ...]]:
    """The fields of a rollout after its prompt, for each response."""
    lengths = tensors["lengths"].tolist()
    names = ("tokens", "logp_infer", "log_kept_infer", "kept_vocab_infer")
    of_tokens = zip(*(torch.split(tensors[name], lengths) for name in names), strict=True)
    for (tokens, *arrays), stopped in zip(of_tokens, tensors["stopped"].tolist(), strict=True):
        yield tuple(tokens.tolist()), *(array.numpy() for array in arrays), stopped

"""Responses as the trainer takes them: with reward and advantage, and dealt into packed micro-batches."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from tailrl.kernels.packing import micro_batches
from tailrl.rollout.types import Rollout
from tailrl.runtime.errors import writing
from tailrl.training.routes import prompt_mark


@dataclass(frozen=True, slots=True)
class Sample:
    """A rollout for the trainer: with its advantage, its safe set's ln ρ, k or p, and its request's seed."""

    rollout: Rollout
    advantage: float
    threshold: float
    seed: int
    reward: float = math.nan  # of the task, before any penalty; NaN: not scored
    logp_reference_T: Tensor | None = None  # nats, the reference policy's log-probs of the tokens, on all of them
    age: int = 0  # how many steps the weights that sampled are behind


def in_micro_batches(samples: Sequence[Sample], chosen: Sequence[int], token_budget: int) -> list[list[int]]:
    """The chosen samples' indices in each micro-batch: see `packing.micro_batches`."""
    rollouts = [samples[i].rollout for i in chosen]
    prompts = [rollout.prompt_tokens for rollout in rollouts]
    lengths = [len(rollout.tokens) for rollout in rollouts]
    groups = micro_batches(prompts, lengths, token_budget, list(map(prompt_mark, rollouts)))
    return [[chosen[i] for i in group] for group in groups]


def write_batch(samples: Sequence[Sample], file: Path) -> None:
    """Write the N samples of a step as npz.

    Arrays per sample: prompt_length_N and response_length_N, int64, tokens; advantage_N and threshold_N, float64;
    seed_N, int64. Arrays concatenated over samples: prompt_tokens and tokens_T, int64; logp_sampler_T and
    log_kept_sampler_T, float32, nats; kept_vocab_sampler_T, int32; routes_PLK where the sampler gave its experts.
    """
    rollouts = [sample.rollout for sample in samples]
    arrays = {
        "prompt_length_N": np.array([len(rollout.prompt_tokens) for rollout in rollouts]),
        "response_length_N": np.array([len(rollout.tokens) for rollout in rollouts]),
        "advantage_N": np.array([sample.advantage for sample in samples]),
        "threshold_N": np.array([sample.threshold for sample in samples], dtype=np.float64),
        "seed_N": np.array([sample.seed for sample in samples]),
        "prompt_tokens": np.concatenate([np.array(rollout.prompt_tokens) for rollout in rollouts]),
        "tokens_T": np.concatenate([np.array(rollout.tokens) for rollout in rollouts]),
        "logp_infer_T": np.concatenate([rollout.logp_sampler_T for rollout in rollouts]),
        "log_kept_infer_T": np.concatenate([rollout.log_kept_sampler_T for rollout in rollouts]),
        "kept_vocab_infer_T": np.concatenate([rollout.kept_vocab_sampler_T for rollout in rollouts]),
    }
    if routes := [rollout.routes_PLK for rollout in rollouts if rollout.routes_PLK is not None]:
        arrays["routes_PLK"] = np.concatenate(routes)
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(file, allow_pickle=False, **arrays)

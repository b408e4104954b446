"""The batch of an update that was skipped, kept for inspection."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tailrl.errors import writing
from tailrl.training.step import Sample


def write_batch(samples: Sequence[Sample], file: Path) -> None:
    """Writes the N samples of a step as npz.

    Arrays: prompt_length_N and response_length_N, int64, tokens; advantage_N and threshold_N, float64; seed_N, int64;
    and, all responses after one another, prompt_tokens (with lengths as said) and tokens_T, int64; logp_infer_T and
    log_kept_infer_T, float32, nats; kept_vocab_infer_T, int32.
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
        "logp_infer_T": np.concatenate([rollout.logp_infer_T for rollout in rollouts]),
        "log_kept_infer_T": np.concatenate([rollout.log_kept_infer_T for rollout in rollouts]),
        "kept_vocab_infer_T": np.concatenate([rollout.kept_vocab_infer_T for rollout in rollouts]),
    }
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(file, allow_pickle=False, **arrays)

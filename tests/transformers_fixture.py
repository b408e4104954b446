"""A transformers engine for the tests of it, and the comparison of what two of its runs gave."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from exact_fixture import MAX_LENGTH, random_policy

from tailrl.policy import named_weights
from tailrl.records import Rollout
from tailrl.rollout import make_sampler
from tailrl.rollout.transformers import TransformersSampler
from tailrl.settings import SamplerSettings

DTYPES = ("float64", "float32", "float16", "bfloat16")
GQA = "llama, 3 queries a key"


def engine_of(folder: Path, name: str = GQA, dtype: str = "float32") -> TransformersSampler:
    sampler = make_sampler(SamplerSettings(engine="transformers", dtype=dtype), folder, MAX_LENGTH, seed=0)
    assert isinstance(sampler, TransformersSampler)
    sampler.load_weights(named_weights(random_policy(name, "float32")))
    return sampler


def concatenated(rollouts: Iterable[Rollout], name: str) -> np.ndarray:
    return np.concatenate([getattr(rollout, name) for rollout in rollouts])


def close(left: Sequence[Rollout], right: Sequence[Rollout]) -> None:
    """The same tokens, and log-probs within float32's roundings of one another."""
    assert [rollout.tokens for rollout in left] == [rollout.tokens for rollout in right]
    for name in ("logp_infer_T", "log_kept_infer_T"):
        np.testing.assert_allclose(concatenated(left, name), concatenated(right, name), atol=1e-4, rtol=0)

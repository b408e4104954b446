"""Rectangles [B, T] with a mask, under every framework's names: they hold the same sequences as one row each."""

from typing import Any

import numpy as np
import pytest
import torch

from tailrl.diagnosis.diagnosis import diagnose
from tailrl.diagnosis.formats import formats
from tailrl.diagnosis.tables import read_table

B, T = 5, 7
LENGTHS = (7, 1, 3, 6, 2)
RNG = np.random.default_rng(0)
SAMPLER = -RNG.random((B, T))
TRAINER = SAMPLER + 0.1 * RNG.standard_normal((B, T)) - 0.5
MASK = np.arange(T) < np.array(LENGTHS)[:, None]
MASKED = [name for name, known in formats().items() if "mask" in known.columns]


def columns(name: str) -> dict[str, Any]:
    """A rectangle under a format's names, with padding that must not be read."""
    names = formats()[name].columns
    padded = {"sampler": np.where(MASK, SAMPLER, 0.0), "trainer": np.where(MASK, TRAINER, -100.0), "mask": MASK * 1.0}
    row: dict[str, Any] = {names[part]: values for part, values in padded.items()}
    return row | {names["step"]: 3} if "step" in names else row


@pytest.mark.parametrize("kind", [np.ndarray.tolist, np.asarray, torch.as_tensor], ids=["list", "numpy", "torch"])
@pytest.mark.parametrize("name", MASKED)
def test_a_rectangle_is_its_rows(name: str, kind: Any) -> None:
    row = {key: kind(value) if isinstance(value, np.ndarray) else value for key, value in columns(name).items()}
    [(title, log)] = list(read_table([row]))
    assert title == formats()[name].title
    np.testing.assert_array_equal(np.diff(np.append(log.start_S, len(log.sampler_T))), LENGTHS)
    np.testing.assert_allclose(log.sampler_T, SAMPLER[MASK], rtol=1e-12)
    np.testing.assert_allclose(log.trainer_T, TRAINER[MASK], rtol=1e-12)
    if "step" in formats()[name].columns:
        assert log.step_S.tolist() == [3] * B


def test_a_batch_of_one_stays_one_sequence() -> None:
    row = {"sampler_logprobs": SAMPLER[:1].tolist(), "trainer_logprobs": TRAINER[:1].tolist()}
    assert diagnose([row]).measured.sequences == 1


def test_what_belongs_to_a_sequence_goes_with_it() -> None:
    rewards = [1.0, 0.0, 1.0, 0.0, 1.0]
    row = {"sampler_logprobs": SAMPLER.tolist(), "trainer_logprobs": TRAINER.tolist(), "reward": rewards}
    [(_, log)] = list(read_table([row]))
    assert log.reward_S.tolist() == rewards

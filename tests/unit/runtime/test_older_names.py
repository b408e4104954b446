"""Older names of arguments: what users wrote before the two sides were called sampler and trainer still works."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tailrl.config.arm import Correction
from tailrl.config.rejection import Rejection
from tailrl.objective.corrections import correct
from tailrl.objective.diagnostics import log_ratio_metrics
from tailrl.rollout.types import Rollout
from tailrl.runtime.older_names import accepts_older_names


def test_a_function_takes_either_name() -> None:
    @accepts_older_names(old="new")
    def doubled(new: int, other: int = 0) -> int:
        return 2 * new + other

    assert doubled(3) == doubled(new=3) == doubled(old=3) == 6
    assert doubled(old=3, other=1) == 7
    with pytest.raises(TypeError, match="older"):
        doubled(older=3)


def test_a_rollout_of_a_users_engine_says_either_name() -> None:
    logp_T, log_kept_T, kept_T = np.full(2, -1.0, np.float32), np.zeros(2, np.float32), np.full(2, 9, np.int32)
    older = Rollout(
        (1,), (2, 3), logp_infer_T=logp_T, log_kept_infer_T=log_kept_T, kept_vocab_infer_T=kept_T, stopped=True
    )
    assert older.logp_sampler_T is logp_T and older.logp_infer_T is logp_T
    assert older.kept_vocab_sampler_T is kept_T and older.log_kept_sampler_T is log_kept_T
    changed = replace(older, logp_infer_T=-logp_T)
    assert changed.logp_sampler_T.tolist() == [1.0, 1.0]
    with pytest.raises(AttributeError, match="Rollout has no logp"):
        _ = older.logp


def test_metrics_take_either_name() -> None:
    logp_T, sequence_T = torch.tensor([-1.0, -2.0]), torch.tensor([0, 0])
    older = log_ratio_metrics(logp_train_T=logp_T, logp_infer_T=logp_T - 0.1, sequence_T=sequence_T, count=1)
    assert older == log_ratio_metrics(logp_T, logp_T - 0.1, sequence_T, 1)


def test_weights_take_either_name() -> None:
    delta_T, inside_T, sequence_T = torch.tensor([0.5, -0.1]), torch.zeros(2, dtype=torch.bool), torch.tensor([0, 1])
    correction = Correction(reject=(Rejection(of="tv", by="token", above=0.01),))
    given = delta_T, inside_T, sequence_T, 2, correction, torch.zeros(2)
    older = correct(*given, logp_infer_T=torch.tensor([-1.0, -3.0]))
    assert torch.equal(older.weight_T, correct(*given, logp_sampler_T=torch.tensor([-1.0, -3.0])).weight_T)
    assert older.weight_T.tolist() == [0.0, 1.0]

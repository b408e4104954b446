"""The columns of sampled tokens against plain loops over float64 probabilities."""

import math

import numpy as np
import pytest
import torch
from definitions import softmax

from tailrl.probes.distributions import measure
from tailrl.probes.model.columns import token_columns

T, V = 25, 60


@pytest.mark.parametrize("at_once", [1, 7 * V, 2**21])
def test_every_column_is_that_of_plain_loops(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "COMPARED_LOGITS", at_once)
    rng = np.random.default_rng(0)
    trainer_TV, sampler_TV, again_TV = (torch.tensor(rng.normal(0, 3, (T, V)), dtype=torch.float32) for _ in range(3))
    tokens_T = torch.tensor(rng.integers(0, V, T))
    log_kept_T = torch.tensor(np.log(rng.uniform(0.5, 1, T)))
    found = token_columns(trainer_TV, sampler_TV, again_TV, tokens_T, log_kept_T, math.log(0.1))
    for i, token in enumerate(tokens_T.tolist()):
        train, infer, again = (softmax(logits_TV[i].tolist()) for logits_TV in (trainer_TV, sampler_TV, again_TV))
        expected = {
            "trainer_T": math.log(train[token]),
            "trainer_top_T": math.log(max(train)),
            "sampler_T": math.log(infer[token] / math.exp(log_kept_T[i])),
            "sampler_top_T": math.log(max(infer) / math.exp(log_kept_T[i])),
            "again_T": math.log(again[token]),
            "rank_T": sum(p > train[token] for p in train),
            "trainer_set_T": sum(p >= 0.1 * max(train) for p in train),
            "sampler_set_T": sum(p >= 0.1 * max(infer) for p in infer),
        }
        assert {name: float(column[i]) for name, column in found._asdict().items()} == pytest.approx(
            expected, rel=1e-12
        )
    assert len(found.rank_T) == T and found.rank_T.max() > 30


def test_of_equal_logits_none_is_before_the_other() -> None:
    logits_TV = torch.tensor([[1.0, 2.0, 1.0, 0.0]]).repeat(4, 1)
    found = token_columns(logits_TV, logits_TV, logits_TV, torch.arange(4), torch.zeros(4, dtype=torch.float64), -1.5)
    assert found.rank_T.tolist() == [1, 0, 1, 3] and found.trainer_set_T.tolist() == [3, 3, 3, 3]
    assert torch.equal(found.trainer_T, found.sampler_T) and torch.equal(found.trainer_T, found.again_T)
    assert torch.equal(found.trainer_top_T, found.sampler_top_T)

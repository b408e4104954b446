"""M2PO over an update's micro-batches: they drop what one whole batch drops, whatever their size."""

import copy
import math

import pytest
import torch
from step_fixture import make_rollouts, run_of, samples_of
from transformers import PreTrainedModel

from tailrl.config.arm import Correction
from tailrl.config.rejection import Rejection
from tailrl.objective.batch_rules import resolved
from tailrl.objective.rejections import largest_kept
from tailrl.training.scorer import make_scorer, score_all
from tailrl.training.step import update
from tailrl.training.stopwatch import Stopwatch

LIMIT = 0.02
RULE = {"of": "k2", "by": "batch", "above": LIMIT}


@pytest.mark.parametrize("minibatches", [1, 2])
def test_micro_batches_drop_what_the_whole_update_drops(model: PreTrainedModel, minibatches: int) -> None:
    """The tokens that stay are found here one at a time, from the log-probs of both sides."""
    rollouts, advantages = make_rollouts()
    masked, weights = [], []
    for budget in (30, 10_000):
        arm = {"correction": {"token": "is", "reject": [RULE]}}
        run = run_of(arm, token_budget=budget, minibatches=minibatches)
        policy = copy.deepcopy(model)
        samples = samples_of(rollouts, advantages, run)
        before = score_all(policy, samples, make_scorer(run))
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
        _, _, table = update(policy, optimizer, samples, run, 0, Stopwatch())
        assert len(table.loss_M) >= 2 * minibatches or budget > 30, "several micro-batches"
        order = table.number_N.tolist()
        masked.append(table.weights.masked_T.tolist())
        weights.append([parameter.detach().clone() for parameter in policy.parameters()])
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert sorted(masked[0]) == sorted(masked[1]) and any(masked[0]) and not all(masked[0])
    if minibatches == 1:
        values = {
            (n, t): (float(logp) - float(infer)) ** 2 / 2
            for n, (own, rollout) in enumerate(zip(before, rollouts, strict=True))
            for t, (logp, infer) in enumerate(zip(own.logp_T, rollout.logp_sampler_T, strict=True))
        }
        kept = set(values)
        while len(kept) > 1 and math.fsum(values[place] for place in kept) / len(kept) > LIMIT:
            kept.remove(max(kept, key=values.__getitem__))
        wanted = [(n, t) not in kept for n in order for t in range(len(rollouts[n].tokens))]
        assert masked[1] == wanted


def test_a_resolved_rule_judges_single_tokens() -> None:
    """Limits are of the values themselves; other rules and weights stay."""
    delta = torch.tensor([0.1, -0.5, 1.0, 0.0], dtype=torch.float64)
    other = Rejection(of="k1", by="mean", above=0.1)
    correction = Correction(token="is", reject=(other, Rejection.model_validate(RULE)))
    found = resolved(correction, delta, 0 * delta, delta - 1)
    assert found.reject[0] == other and found.token == "is" and not found.judges_batch
    assert (found.reject[1].by, found.reject[1].above) == ("token", pytest.approx(0.1**2 / 2))
    # Values that occur as often as a chance says: the mean is 0.125 · 0.1 / 0.9 without the largest.
    share = torch.tensor([0.1, 0.1, 0.1, 0.7])
    kept = resolved(correction, delta, 0 * delta, delta - 1, share).reject[1].above
    assert kept == pytest.approx(0.125)


def test_the_smallest_stays_and_nothing_is_nothing() -> None:
    assert largest_kept(torch.tensor([3.0, 2.0, 5.0]), 1.0) == 2.0
    assert largest_kept(torch.tensor([3.0, 2.0, 5.0]), 2.5) == 3.0
    assert largest_kept(torch.tensor([3.0, 2.0, 5.0]), 3.4) == math.inf
    assert largest_kept(torch.tensor([]), 1.0) == math.inf

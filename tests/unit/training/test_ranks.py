"""Updates on several ranks come to what they come to in one process: losses, norms, gradients, weights and metrics.

In float64 to 1e-9 of the largest value, so that nothing but the order of sums can differ. In float32, whose roundings
of the smallest gradients AdamW makes as large as any, to 1e-4 after three steps.
"""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases_fixture import rest_long
from ranks_fixture import on_ranks
from step_fixture import DVP, make_rollouts, run_of, samples_of
from torch import Tensor
from transformers import PreTrainedModel

from tailrl.config.jobs import Run
from tailrl.rollout.types import Request, Rollout
from tailrl.runtime import distributed
from tailrl.runtime.errors import NumericalError
from tailrl.training import scorer, step
from tailrl.training.optimizer import make_optimizer
from tailrl.training.placement import give_up_forward, place
from tailrl.training.rollouts import of_all_ranks
from tailrl.training.step import update
from tailrl.training.stopwatch import Stopwatch

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
MIS = {"sequence": "mis", "sequence_threshold": 2.0}
# Seven responses; by the budget of tokens they are in 5 micro-batches, or in one: fewer than there are ranks.
ARMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "naive": ({}, {}),
    "one micro-batch": ({"vocabulary": DVP}, {"token_budget": 10_000}),
    "kept": ({"vocabulary": DVP, "correction": MIS}, {"loss_mean": "kept", "optimizer": "sgd"}),
    "clip": ({"vocabulary": DVP, "clip": {"ratio": "decoupled"}}, {"minibatches": 3, "weight_decay": 0.1}),
    "control": ({"disturbance": {"weights": "bfloat16", "noise": 0.1, "side": "both"}}, {"max_grad_norm": 0.01}),
    "checkpointing": ({"vocabulary": DVP}, {"activation_checkpointing": True}),
}


def updates(model: PreTrainedModel, run: Run) -> dict[str, Any]:
    """What three updates of a policy come to."""
    place(model, run.training)
    return updates_of_placed(model, run, 3)


def updates_of_placed(model: PreTrainedModel, run: Run, count: int) -> dict[str, Any]:
    """What so many updates come to; gradients and weights are whole."""
    optimizer = make_optimizer(model, run.training)
    samples = samples_of(*make_rollouts(), run)
    gradients: list[Tensor] = []
    own = step.optimizer_step

    def spy(model: PreTrainedModel, *others: Any) -> float:
        gradients.append(torch.cat([distributed.whole(p.grad).flatten().clone() for p in model.parameters()]))  # type: ignore[arg-type]
        return own(model, *others)

    step.optimizer_step = spy
    try:
        found = [update(model, optimizer, samples, run, seed, Stopwatch()) for seed in range(count - 1)]
        # Some have no part in the gradient of the last one.
        silent = [replace(sample, advantage=0.0) if i in (1, 4, 5) else sample for i, sample in enumerate(samples)]
        found.append(update(model, optimizer, silent, run, count - 1, Stopwatch()))
    finally:
        step.optimizer_step = own
    return {
        "losses": [loss for loss, _, _ in found],
        "norms": [norm for _, norm, _ in found],
        "metrics": [record.metrics() for _, _, record in found],
        "tokens": [record.arrays(step=0) for _, _, record in found],
        "order": [record.number_N.tolist() for _, _, record in found],
        "gradients": [gradient.numpy() for gradient in gradients],
        "weights": torch.cat([distributed.whole(p).detach().flatten() for p in model.parameters()]).numpy(),
    }


def assert_close(found: Any, expected: Any, tolerance: float, where: str = "") -> None:
    """Within the tolerance of the largest number of an array; text and counts alike."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_close(found[key], value, tolerance, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for index, value in enumerate(expected):
            assert_close(found[index], value, tolerance, f"{where}.{index}")
    else:
        scale = float(np.max(np.nan_to_num(np.abs(expected)), initial=1e-30))
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale, err_msg=where)


CASES = [*((arm, torch.float64) for arm in ARMS), ("naive", torch.float32)]
FAST = [("one micro-batch", torch.float64), ("kept", torch.float64), ("naive", torch.float32)]


@pytest.mark.parametrize("case", rest_long(FAST, CASES, lambda case: f"{case[0]}-{case[1]}"))
def test_two_ranks_update_as_one_process(model: PreTrainedModel, tmp_path: Path, case: tuple[str, torch.dtype]) -> None:
    arm, dtype = case
    settings, training = ARMS[arm]
    run = run_of(settings, **training)
    model = model.to(dtype)
    expected = updates(copy.deepcopy(model), run)
    for found in on_ranks(2, tmp_path, updates, model, run):
        assert_close(found, expected, TOLERANCE[dtype])
    assert expected["norms"][0] > 0 and len(expected["gradients"]) == 3 * run.training.minibatches


@pytest.mark.parametrize("count", [1, 2, 3])
def test_dealt_items_return_in_order(tmp_path: Path, count: int) -> None:
    """Every item counts on one rank, each rank has as many turns, and a share is a run of the items."""
    sizes = [1, 2, 5, 6]

    def deal() -> list[Any]:
        found = []
        for size in sizes:
            dealt, items = distributed.dealt(size), list(range(100, 100 + size))
            own = [items[place] for place, counts in dealt if counts]
            shares = [item for share in distributed.gathered(list(distributed.share(items))) for item in share]
            found.append((len(dealt), distributed.in_turns(distributed.gathered(own)), shares))
        return found

    for found in on_ranks(count, tmp_path, deal):
        for size, (turns, *orders) in zip(sizes, found, strict=True):
            assert turns == -(-size // count)
            assert orders == [list(range(100, 100 + size))] * 2


def test_ranks_that_share_an_engine_sample_one_share(tmp_path: Path) -> None:
    """Four ranks on two engines: what comes together is each response once, in the order of the requests."""
    requests = [Request((9, seed), seed) for seed in range(5)]

    def sample() -> tuple[list[int], list[tuple[int, ...]], list[float]]:
        own = distributed.share(requests, 2)
        numbers = np.zeros(2, np.float32), np.zeros(2, np.float32), np.ones(2, np.int32)
        rollouts = [Rollout(request.prompt_tokens, (request.seed, 7), *numbers, True) for request in own]
        rewards = np.array([request.seed / 2 for request in own], np.float32)
        whole, together = of_all_ranks(rollouts, rewards, 2)
        assert [rollout.prompt_tokens for rollout in whole] == [request.prompt_tokens for request in requests]
        return [request.seed for request in own], [rollout.tokens for rollout in whole], together.tolist()

    found = on_ranks(4, tmp_path, sample)
    assert [own for own, _, _ in found] == [[0, 1], [0, 1], [2, 3, 4], [2, 3, 4]]
    for _, tokens, rewards in found:
        assert tokens == [(seed, 7) for seed in range(5)]
        assert rewards == [0.0, 0.5, 1.0, 1.5, 2.0]


def test_values_of_all_ranks_arrive_unchanged(tmp_path: Path) -> None:
    """Of several dtypes and lengths, with views and without a number at all."""

    def tell() -> tuple[list[dict[str, Tensor]], list[Any], bool, bool]:
        rank = distributed.number()
        row = torch.arange(6, dtype=torch.int32) + rank
        given = {"view": row[rank::2], "flags": torch.ones(rank, dtype=torch.bool), "scalar": torch.tensor(0.1 + rank)}
        words = {"é": [rank, float("nan"), None]} if rank else {}
        return (
            distributed.gathered(given),
            distributed.gathered(words),
            distributed.any_rank(rank == 1),
            distributed.any_rank(False),
        )

    for tensors, words, raised, quiet in on_ranks(2, tmp_path, tell):
        assert [t["view"].tolist() for t in tensors] == [[0, 2, 4], [2, 4, 6]]
        assert [t["flags"].tolist() for t in tensors] == [[], [True]]
        assert [t["scalar"].dtype for t in tensors] == [torch.float32] * 2
        assert [t["scalar"].item() for t in tensors] == [np.float32(0.1), np.float32(1.1)]
        assert words[0] == {} and words[1]["é"][0] == 1 and np.isnan(words[1]["é"][1]) and words[1]["é"][2] is None
        assert (raised, quiet) == (True, False)


# --- faults ------------------------------------------------------------------------------------------------


def faulty(model: PreTrainedModel, run: Run, where: str) -> dict[str, Any]:
    """An update that the second rank alone has a fault in, then an undisturbed one."""
    own, score = scorer.constrained_logprobs, scorer.Scorer.__call__

    def nan_in_the_head(*_: Any) -> Any:
        raise NumericalError("NaN or Inf in the head's weight")

    def nan_in_a_logprob(*arguments: Any) -> scorer.Scored:
        scored = score(*arguments)
        scored.logprobs.logp_full_T[0] = np.nan
        return scored

    place(model, run.training)
    optimizer = make_optimizer(model, run.training)
    samples = samples_of(*make_rollouts(), run)
    if distributed.number() == 1:
        # Within FSDP's forward, which is then cut short; or after it.
        vars(scorer)["constrained_logprobs"] = nan_in_the_head if where == "head" else own
        scorer.Scorer.__call__ = nan_in_a_logprob if where == "log-prob" else score
    with pytest.raises(NumericalError) as caught:
        update(model, optimizer, samples, run, 0, Stopwatch())
    vars(scorer)["constrained_logprobs"] = own
    scorer.Scorer.__call__ = score
    give_up_forward(model)
    optimizer.zero_grad(set_to_none=True)
    return {"sentence": str(caught.value), "after": updates_of_placed(model, run, 1)["weights"]}


@pytest.mark.parametrize(("where", "words"), [("head", "the head's weight"), ("log-prob", "no longer finite")])
def test_a_fault_on_one_rank_skips_the_update_on_all(
    model: PreTrainedModel, tmp_path: Path, where: str, words: str
) -> None:
    """And leaves nothing behind: the next update is as if there had been none."""
    run, model = run_of({"vocabulary": DVP}), model.double()
    expected = updates_of_placed(copy.deepcopy(model), run, 1)["weights"]
    for found in on_ranks(2, tmp_path, faulty, model, run, where):
        assert words in found["sentence"]
        assert_close(found["after"], expected, TOLERANCE[torch.float64])

"""verl's FSDP engines under DVP on two gloo ranks beside our objective in float64: data and sequences in parallel."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_fixture import LENGTHS, batch, constrained, engine_of, gradients_of, oracle, ours, scored
from policy_fixture import write_policy
from ranks_fixture import on_ranks
from torch import Tensor

from tailrl.integrations.verl.scores import FILL
from tailrl.integrations.verl.workers import KEPT, SIZE

RANKS = 2
DYNAMIC = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 16}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


def parts(sequence_parallel: bool) -> list[Sequence[int]]:
    """The sequences of each rank; in sequence parallelism all ranks share all of them."""
    return [range(len(LENGTHS))] * RANKS if sequence_parallel else [(0, 3), (1, 2)]


def on_a_rank(
    policy: Path, layout: dict[str, Any], dealt: dict[str, Any], each: Sequence[Sequence[int]]
) -> tuple[dict[str, list[Tensor]], dict[str, Tensor], int]:
    """This rank's scores, the whole gradients, and the number of weights that the rank keeps."""
    engine = engine_of(policy, **layout)
    constrained(engine)
    data = batch(layout["use_remove_padding"], each[dist.get_rank()], **dealt)
    output = scored(engine, data)
    local = sum(getattr(weight, "_local_tensor", weight).numel() for weight in engine.module.parameters())
    columns = {name: list(output[name].unbind()) for name in ("log_probs", KEPT, SIZE)}
    return columns, gradients_of(engine, data), local


CASES = {
    "padded": ({"use_remove_padding": False}, {}),
    "packed": ({"use_remove_padding": True}, {}),
    "packed, dynamic batch": ({"use_remove_padding": True}, DYNAMIC),
    "FSDP 1": ({"use_remove_padding": True, "strategy": "fsdp", "use_orig_params": True}, {}),
    "sequence parallelism": ({"use_remove_padding": True, "ulysses_sequence_parallel_size": 2}, {}),
}


@pytest.mark.parametrize(("layout", "dealt"), CASES.values(), ids=CASES)
def test_two_ranks_score_and_learn_as_our_objective(
    policy: Path, tmp_path: Path, layout: dict[str, Any], dealt: dict[str, Any]
) -> None:
    each = parts("ulysses_sequence_parallel_size" in layout)
    answers = on_ranks(RANKS, tmp_path, on_a_rank, policy, layout, dealt, each)
    expected, gradients = oracle(policy, ours)
    outside = 0
    for part, (columns, learned, local) in zip(each, answers, strict=True):
        assert local <= 0.6 * sum(gradient.numel() for gradient in gradients.values()), "the weights are sharded"
        for i, logp_L, kept_L, size_L in zip(part, *columns.values(), strict=True):
            torch.testing.assert_close(logp_L[:-1].double(), expected[i], atol=1e-5, rtol=0)
            assert (kept_L <= 1e-6).all() and (size_L >= 1).all()
            outside += int((logp_L[:-1] == FILL).sum())
        assert learned.keys() == gradients.keys()
        torch.testing.assert_close(learned, gradients, atol=1e-5, rtol=1e-5)
    assert outside > 10

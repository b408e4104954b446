"""The table of a step's tokens: rows of all micro-batches, responses numbered anew, and the columns of the file."""

from dataclasses import replace

import pytest
import torch
from step_fixture import DVP, make_rollouts, run_of, samples_of
from transformers import PreTrainedModel

from tailrl.artifacts.tokens import ARRAYS
from tailrl.training.scorer import make_scorer
from tailrl.training.step import accumulate_gradients
from tailrl.training.stopwatch import Stopwatch
from tailrl.training.token_table import TokenTable


@pytest.fixture
def table(model: PreTrainedModel) -> TokenTable:
    """Of seven responses in several micro-batches; rewards tell them apart."""
    run = run_of({"vocabulary": DVP}, token_budget=45)
    samples = [replace(sample, reward=i / 8) for i, sample in enumerate(samples_of(*make_rollouts(), run))]
    return accumulate_gradients(model, samples, make_scorer(run), Stopwatch())[1]


def test_rows_follow_one_another_and_responses_are_renumbered(table: TokenTable) -> None:
    assert len(table.loss_M) > 1, "several micro-batches"
    changes = table.sequence_T.diff()
    assert ((changes == 0) | (changes == 1)).all() and table.sequence_T[-1] + 1 == table.responses == 7
    twice = TokenTable.joined([table, table])
    assert twice.responses == 14 and torch.equal(twice.sequence_T[len(table.token_T) :], table.sequence_T + 7)
    assert torch.equal(twice.trainer.logp_T, table.trainer.logp_T.repeat(2))
    assert torch.equal(twice.weights.used_N, table.weights.used_N.repeat(2))
    assert not any(column.requires_grad for column in (twice.trainer.logp_T, twice.loss_M))


def test_a_column_that_one_part_lacks_is_lacking(table: TokenTable) -> None:
    with_reference = replace(table, logp_reference_T=table.trainer.logp_T)
    assert TokenTable.joined([with_reference, table]).logp_reference_T is None
    both = TokenTable.joined([with_reference, with_reference]).logp_reference_T
    assert both is not None and len(both) == 2 * len(table.token_T)


def test_the_columns_of_the_file(table: TokenTable) -> None:
    rollouts, advantages = make_rollouts()
    arrays = table.arrays(step=3)
    assert set(arrays) == set(ARRAYS) and {len(array) for array in arrays.values()} == {len(table.token_T)}
    assert set(arrays["step"]) == {3}
    for number, rollout in enumerate(rollouts):
        own = arrays["sequence"] == number
        assert arrays["token"][own].tolist() == list(rollout.tokens)
        assert arrays["position"][own].tolist() == list(range(len(rollout.tokens)))
        assert (arrays["logp_infer_masked"][own] == rollout.logp_sampler_T).all()
        assert (arrays["logp_infer"][own] == rollout.logp_sampler_T + rollout.log_kept_sampler_T).all()
        assert set(arrays["reward"][own]) == {number / 8}
        assert arrays["advantage"][own] == pytest.approx(advantages[number], rel=1e-6)

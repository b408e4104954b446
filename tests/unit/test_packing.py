"""Packing: the layout of rows, and what a packed row computes against each sequence alone."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config

from tailrl.errors import StudyError
from tailrl.packing import micro_batches, pack, pack_batch, padded, unpadded
from tailrl.policy import PACKED_ATTENTION, head_weight, hidden_states

SIZES = {
    "vocab_size": 90,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=4),
    "grouped": lambda: LlamaConfig(**SIZES, num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=True),
    "one key head": lambda: Qwen2Config(**SIZES, num_attention_heads=3, num_key_value_heads=1),
}


def make_model(name: str, attention: str) -> PreTrainedModel:
    """The same weights whatever the attention; larger than a fresh model's, so that attention is not uniform."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=attention)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * (0.25 if parameter.ndim > 1 else 1.0)
    return model


def random_tokens(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, SIZES["vocab_size"], n).tolist() for n in lengths]


LENGTHS = [[5], [1], [1, 1, 1], [7, 1, 12, 3], [2, 31, 1, 8, 8]]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(("name", "attention"), [("llama", "eager"), ("grouped", "sdpa"), ("one key head", "eager")])
def test_a_packed_row_equals_its_sequences_alone(name: str, attention: str, lengths: list[int]) -> None:
    packed, alone = make_model(name, PACKED_ATTENTION), make_model(name, attention)
    sequences = random_tokens(lengths)
    row = torch.tensor(list(itertools.chain(*sequences)))
    hidden_PH = hidden_states(packed, row, pack(lengths))
    hidden_alone = [alone.base_model(torch.tensor([ids])).last_hidden_state[0] for ids in sequences]
    torch.testing.assert_close(hidden_PH, torch.cat(hidden_alone), rtol=1e-5, atol=1e-5)

    direction_PH = torch.randn(hidden_PH.shape, generator=torch.Generator().manual_seed(1))
    (hidden_PH * direction_PH).sum().backward()
    (torch.cat(hidden_alone) * direction_PH).sum().backward()
    for (parameter_name, found), expected in zip(packed.named_parameters(), alone.parameters(), strict=True):
        if expected.grad is not None:
            scale = expected.grad.abs().max().item()
            torch.testing.assert_close(
                found.grad, expected.grad, rtol=0, atol=1e-5 * max(1.0, scale), msg=parameter_name
            )


def test_a_sequence_does_not_see_its_neighbours() -> None:
    model = make_model("grouped", PACKED_ATTENTION)
    first, second, other = random_tokens([6, 4, 6])

    def hidden_of_second(before: list[int]) -> Tensor:
        return hidden_states(model, torch.tensor(before + second), pack([6, 4]))[6:]

    assert torch.equal(hidden_of_second(first), hidden_of_second(other))


def test_attention_that_packing_does_not_know_is_refused() -> None:
    """Windows come from the configuration, as transformers hands them to the attention of such a model."""
    config = Qwen2Config(
        **SIZES, num_attention_heads=3, use_sliding_window=True, sliding_window=8, layer_types=["sliding_attention"] * 2
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_ATTENTION)
    with pytest.raises(StudyError, match=r"sliding.window"):
        hidden_states(model, torch.tensor([1, 2]), pack([2]))


def test_a_head_with_a_bias_is_refused() -> None:
    model = make_model("llama", PACKED_ATTENTION)
    assert head_weight(model) is model.lm_head.weight
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(SIZES["vocab_size"]))
    with pytest.raises(StudyError, match="LlamaForCausalLM has an output bias"):
        head_weight(model)


# --- layout ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_layout_of_a_row(lengths: list[int]) -> None:
    packing = pack(lengths)
    row = torch.arange(100, 100 + sum(lengths))
    assert packing.lengths_N == tuple(lengths)
    assert packing.positions_P.tolist() == [position for n in lengths for position in range(n)]
    padded_NL = row[packing.index_NL]
    start = 100
    for sequence, length in enumerate(lengths):
        assert padded_NL[sequence, :length].tolist() == list(range(start, start + length))
        start += length
    assert torch.equal(padded_NL.flatten()[packing.token_P], row)


def test_every_response_token_is_predicted_from_the_one_before() -> None:
    prompts, responses = random_tokens([3, 1, 5]), random_tokens([2, 4, 1], seed=1)
    batch = pack_batch(prompts, responses)
    expected = [
        (n, ([*prompt, *response])[len(prompt) + t - 1], token)
        for n, (prompt, response) in enumerate(zip(prompts, responses, strict=True))
        for t, token in enumerate(response)
    ]
    before = batch.tokens_P[batch.predict_T].tolist()
    assert list(zip(batch.sequence_T.tolist(), before, batch.targets_T.tolist(), strict=True)) == expected
    assert batch.tokens_P[batch.predict_T + 1].tolist() == batch.targets_T.tolist()


def test_each_token_has_its_place_and_what_belongs_to_its_sequence() -> None:
    batch = pack_batch(random_tokens([3, 1, 5, 2]), random_tokens([2, 0, 4, 1], seed=1))
    assert batch.places() == [0, 1, 0, 1, 2, 3, 0]
    assert batch.of_tokens(["a", "b", "c", "d"]) == ["a", "a", "c", "c", "c", "c", "d"]
    assert batch.of_tokens(range(4)) == batch.sequence_T.tolist()
    assert batch.responses_N == (2, 0, 4, 1)
    with pytest.raises(ValueError, match="zip"):
        batch.of_tokens([1, 2, 3])


def test_a_response_without_tokens_has_none_to_predict() -> None:
    batch = pack_batch([[1, 2], [3]], [[], [4]])
    assert batch.sequence_T.tolist() == [1]
    assert batch.packing.lengths_N == (2, 2)


@pytest.mark.parametrize("budget", [1, 10, 37, 64, 1000])
@pytest.mark.parametrize("seed", range(3))
def test_micro_batches(seed: int, budget: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 50, 40).tolist()
    groups = micro_batches(lengths, budget)
    assert sorted(itertools.chain(*groups)) == list(range(40))
    assert all(groups)
    for group in groups:
        assert len(group) == 1 or sum(lengths[i] for i in group) <= budget
    # Neighbours in length: no two groups overlap in length, but for ties.
    assert [lengths[i] for i in itertools.chain(*groups)] == sorted(lengths)
    # No group could have taken the first sequence of the next one.
    for group, following in itertools.pairwise(groups):
        assert sum(lengths[i] for i in group) + lengths[following[0]] > budget


def test_a_sequence_over_the_budget_stays_alone() -> None:
    assert micro_batches([30, 4, 5, 31], 10) == [[1, 2], [0], [3]]
    assert micro_batches([], 10) == []


@pytest.mark.parametrize("lengths", [[1], [4, 4], [3, 1, 7, 2]])
def test_the_padded_view_and_back(lengths: list[int]) -> None:
    packing = pack(lengths)
    rows_PD = torch.randn(sum(lengths), 3, dtype=torch.float64, requires_grad=True)
    view_NLD = padded(rows_PD, packing)
    for row, part in zip(view_NLD, rows_PD.split(lengths), strict=True):
        assert torch.equal(row[: len(part)], part)
    assert torch.equal(unpadded(view_NLD, packing), rows_PD)
    # A function of the view that leaves the padding out has the gradient that autograd finds without the view.
    weight_PD = torch.randn_like(rows_PD)
    (found,) = torch.autograd.grad((unpadded(view_NLD**3, packing) * weight_PD).sum(), rows_PD)
    torch.testing.assert_close(found, 3 * rows_PD.detach() ** 2 * weight_PD)

"""Packing: the layout of rows, and what a packed row computes against each sequence alone."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from tailrl.kernels.packing import micro_batches, pack, pack_batch, padded, unpadded
from tailrl.model.forward import (
    EXACT_ATTENTION,
    PACKED_ATTENTION,
    head_weight,
    hidden_states,
    make_exact,
    trained_length,
)
from tailrl.runtime.errors import StudyError

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


def assert_same_gradients(packed: PreTrainedModel, alone: PreTrainedModel) -> None:
    """To 1e-5, or to three roundings of the model's largest gradient: where a sequence has one token, its query's
    is what remains of sums that cancel.
    """
    gradients = [(n, p.grad, q.grad) for (n, p), q in zip(packed.named_parameters(), alone.parameters(), strict=True)]
    largest = max(expected.abs().max().item() for *_, expected in gradients if expected is not None)
    for name, found, expected in gradients:
        if expected is not None:
            bound = max(1e-5 * max(1.0, expected.abs().max().item()), 3 * torch.finfo(torch.float32).eps * largest)
            torch.testing.assert_close(found, expected, rtol=0, atol=bound, msg=name)


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
    assert_same_gradients(packed, alone)


@pytest.mark.parametrize("attention", [PACKED_ATTENTION, EXACT_ATTENTION])
def test_a_shared_prompt_gives_what_each_sequence_alone_would(attention: str) -> None:
    """Hidden states that predict the responses, and the gradients of a function of them."""
    packed, alone = make_model("grouped", attention), make_model("grouped", "sdpa")
    first, second, third = map(tuple, random_tokens([5, 1, 3]))
    prompts = [first, second, first, third, first, second]
    responses = random_tokens([4, 3, 1, 2, 6, 0], seed=1)
    batch = pack_batch(prompts, responses)
    assert len(batch.tokens_P) == 9 + 3 + 2 + 0 + 1 + 5
    hidden_TH = hidden_states(packed, batch.tokens_P, batch.packing)[batch.predict_T]
    wholes = [
        alone.base_model(torch.tensor([[*p, *r]])).last_hidden_state[0] for p, r in zip(prompts, responses, strict=True)
    ]
    expected_TH = torch.cat([whole[len(p) - 1 : -1] for whole, p in zip(wholes, prompts, strict=True)])
    torch.testing.assert_close(hidden_TH, expected_TH, rtol=1e-5, atol=1e-5)
    direction_TH = torch.randn(hidden_TH.shape, generator=torch.Generator().manual_seed(1))
    (hidden_TH * direction_TH).sum().backward()
    (expected_TH * direction_TH).sum().backward()
    assert_same_gradients(packed, alone)


def test_a_sequence_does_not_see_its_neighbours() -> None:
    model = make_model("grouped", PACKED_ATTENTION)
    first, second, other = random_tokens([6, 4, 6])

    def hidden_of_second(before: list[int]) -> Tensor:
        return hidden_states(model, torch.tensor(before + second), pack([6, 4]))[6:]

    assert torch.equal(hidden_of_second(first), hidden_of_second(other))


@pytest.mark.parametrize("exact", [False, True])
def test_a_sliding_window_is_refused_where_it_hides_a_token(exact: bool) -> None:
    """The library's own attention masks by the window, which within it hides nothing."""
    window = 8
    kinds = ["sliding_attention", "full_attention"]
    sizes = SIZES | {
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "use_sliding_window": True,
        "sliding_window": window,
    }
    model = AutoModelForCausalLM.from_config(Qwen2Config(**sizes, layer_types=kinds), attn_implementation="eager")
    sequences = random_tokens([3, window, 1])
    alone_PH = torch.cat([model.base_model(input_ids=torch.tensor([own])).last_hidden_state[0] for own in sequences])
    model.set_attn_implementation(PACKED_ATTENTION)
    if exact:
        make_exact(model)
    row = torch.tensor(list(itertools.chain(*sequences)))
    found_PH = hidden_states(model, row, pack([3, window, 1]))
    torch.testing.assert_close(found_PH, alone_PH, rtol=1e-4, atol=1e-5)
    with pytest.raises(
        StudyError, match=f"a sequence has {window + 1} tokens, .* sliding_window of {window}, the most"
    ):
        hidden_states(model, row, pack([2, window + 1, 1]))


def test_the_windows_of_families() -> None:
    """Phi-3 mini looks back over 2,047 of 4,096 tokens, Mistral over 4,096, Qwen2 over all unless it is asked for."""
    assert trained_length(Phi3Config(max_position_embeddings=4096, sliding_window=2047)) == 2047
    assert trained_length(MistralConfig(max_position_embeddings=32768)) == 4096
    assert trained_length(MistralConfig(max_position_embeddings=64)) == 64
    assert trained_length(Qwen2Config(max_position_embeddings=32768, sliding_window=4096)) == 32768
    assert trained_length(LlamaConfig(max_position_embeddings=2048)) == 2048
    # A window that no layer has: a configuration may keep the number.
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 4096, "sliding_window": 512}
    assert trained_length(Gemma3TextConfig(**sizes, layer_types=["full_attention"] * 2)) == 4096
    assert trained_length(Gemma3TextConfig(**sizes, layer_types=["full_attention", "sliding_attention"])) == 512


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
    assert packing.positions_P.tolist() == [position for n in lengths for position in range(n)]
    padded_NL = row[packing.index_NL]
    start = 100
    for sequence, length in enumerate(lengths):
        assert padded_NL[sequence, :length].tolist() == list(range(start, start + length))
        start += length
    assert torch.equal(padded_NL.flatten()[packing.token_P], row)


@pytest.mark.parametrize("seed", range(5))
def test_layout_of_a_row_with_prefixes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    prefixes = rng.integers(1, 6, 4).tolist()
    owners = rng.permutation([*range(4), *rng.integers(0, 4, 5)]).tolist()
    lengths = rng.integers(0, 5, 9).tolist()
    packing = pack(lengths, prefixes, owners)
    # The row, written down: a name for each token.
    row = [("prefix", u, k) for u, length in enumerate(prefixes) for k in range(length)]
    row += [("own", n, k) for n, length in enumerate(lengths) for k in range(length)]
    position = [k if kind == "prefix" else prefixes[owners[of]] + k for kind, of, k in row]
    assert packing.positions_P.tolist() == position
    longest = packing.index_NL.shape[1]
    assert longest == max(prefixes[owner] + length for owner, length in zip(owners, lengths, strict=True))
    for n, (owner, length) in enumerate(zip(owners, lengths, strict=True)):
        mine = [("prefix", owner, k) for k in range(prefixes[owner])] + [("own", n, k) for k in range(length)]
        assert [row[p] for p in packing.index_NL[n, : len(mine)].tolist()] == mine
        assert not packing.index_NL[n, len(mine) :].any()
    places = [divmod(place, longest) for place in packing.token_P.tolist()]
    assert places == [
        (owners.index(of) if kind == "prefix" else of, at) for (kind, of, _), at in zip(row, position, strict=True)
    ]
    shared = {u for u in range(4) if owners.count(u) > 1}
    assert {row[run.start][1] for run, _ in packing.shared} == shared
    for run, sequences in packing.shared:
        assert sequences.tolist() == [n for n, owner in enumerate(owners) if owner == row[run.start][1]]
        assert [token[:2] for token in row[run]] == [row[run.start][:2]] * prefixes[row[run.start][1]]


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


def test_each_token_has_its_position_and_its_sequences_values() -> None:
    batch = pack_batch(random_tokens([3, 1, 5, 2]), random_tokens([2, 0, 4, 1], seed=1))
    assert batch.positions() == [0, 1, 0, 1, 2, 3, 0]
    assert batch.of_tokens(["a", "b", "c", "d"]) == ["a", "a", "c", "c", "c", "c", "d"]
    assert batch.of_tokens(range(4)) == batch.sequence_T.tolist()
    assert batch.responses_N == (2, 0, 4, 1)
    with pytest.raises(ValueError, match="zip"):
        batch.of_tokens([1, 2, 3])


def test_a_response_without_tokens_has_none_to_predict() -> None:
    batch = pack_batch([[1, 2], [3]], [[], [4]])
    assert batch.sequence_T.tolist() == [1]
    assert batch.tokens_P.tolist() == [1, 2, 3]
    assert batch.predict_T.tolist() == [2]


def row_length(prompts: list[tuple[int, ...]], responses: list[int], group: list[int]) -> int:
    return sum(responses[i] for i in group) + sum(map(len, {prompts[i] for i in group}))


@pytest.mark.parametrize("budget", [1, 10, 37, 64, 1000])
@pytest.mark.parametrize("seed", range(3))
def test_micro_batches(seed: int, budget: int) -> None:
    rng = np.random.default_rng(seed)
    prompts = [(int(kind),) * int(kind + 1) for kind in rng.integers(0, 12, 40)]
    responses = rng.integers(1, 50, 40).tolist()
    groups = micro_batches(prompts, responses, budget)
    order = list(itertools.chain(*groups))
    assert sorted(order) == list(range(40))
    assert all(groups)
    for group in groups:
        assert len(group) == 1 or row_length(prompts, responses, group) <= budget
    # No group could have taken the first sequence of the next one.
    for group, following in itertools.pairwise(groups):
        assert row_length(prompts, responses, [*group, following[0]]) > budget
    # Those of one prompt follow one another, and prompts go by their longest sequence.
    runs = [(prompt, list(run)) for prompt, run in itertools.groupby(order, key=lambda i: prompts[i])]
    assert len(runs) == len(set(prompts))
    longest = [len(prompt) + max(responses[i] for i in run) for prompt, run in runs]
    assert longest == sorted(longest)
    assert all([responses[i] for i in run] == sorted(responses[i] for i in run) for _, run in runs)


def test_a_sequence_over_the_budget_stays_alone() -> None:
    prompts = [(1,), (2,), (3,), (4,)]
    assert micro_batches(prompts, [29, 3, 4, 30], 10) == [[1, 2], [0], [3]]
    assert micro_batches(prompts, [29, 3, 5, 30], 10) == [[1, 2], [0], [3]]
    assert micro_batches(prompts, [29, 3, 6, 30], 10) == [[1], [2], [0], [3]]
    assert micro_batches([], [], 10) == []


def test_a_shared_prompt_counts_once() -> None:
    prompt = (7, 8, 9)
    assert micro_batches([prompt] * 3, [2, 2, 3], 10) == [[0, 1, 2]]
    assert micro_batches([prompt] * 3, [2, 2, 4], 10) == [[0, 1], [2]]
    assert micro_batches([prompt, (7, 8)], [2, 2], 8) == [[1], [0]]


def test_a_prompt_counts_once_a_mark() -> None:
    """As `pack_batch` lays the row out: no micro-batch exceeds the budget because a prompt was taken as shared."""
    prompts, responses, marks = [(7, 8, 9)] * 4, [2, 2, 3, 3], ["a", "b", "a", "b"]
    groups = micro_batches(prompts, responses, 10, marks)
    assert groups == [[0, 1], [2], [3]]
    for group in groups:
        tokens = [list(range(responses[i] + 1)) for i in group]
        own = [marks[i] for i in group]
        assert len(pack_batch([prompts[i] for i in group], tokens, marks=own).tokens_P) <= 10
    assert micro_batches(prompts, responses, 10, ["a"] * 4) == micro_batches(prompts, responses, 10) == [[0, 1, 2], [3]]


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


def test_the_gradient_of_a_shared_prefix_is_the_sum_over_its_sequences() -> None:
    packing = pack([2, 0, 3], [4, 1], [0, 1, 0])
    rows_PD = torch.randn(10, 3, dtype=torch.float64, requires_grad=True)
    view_NLD = padded(rows_PD, packing)
    weight_NLD = torch.randn_like(view_NLD) * torch.tensor([[1] * 6 + [0], [1] + [0] * 6, [1] * 7])[:, :, None]
    (found,) = torch.autograd.grad((view_NLD**3 * weight_NLD).sum(), rows_PD)
    (expected,) = torch.autograd.grad((rows_PD[packing.index_NL] ** 3 * weight_NLD).sum(), rows_PD)
    torch.testing.assert_close(found, expected)

"""The batch-invariant operators: right against float64 loops, and each row's result its own."""

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from cases_fixture import rest_long
from exact_fixture import CONFIGS, V, random_policy
from torch import Tensor
from transformers import AutoModelForCausalLM

from tailrl.kernels import batch_invariant
from tailrl.kernels.batch_invariant import (
    BLOCK_ROWS,
    FEWEST_ROWS,
    KEYS,
    MOST_ROWS,
    ROWS,
    SUMMANDS,
    VALUES,
    PackedAttention,
    at_once,
    causal_attention,
    future_bias,
    pad_rows,
    product,
    rounded_up,
    row_multiple,
    uneven_lengths,
)
from tailrl.kernels.exact_logprobs import Scoring, exact_logprobs, head_logits
from tailrl.kernels.packing import pack
from tailrl.model.forward import EXACT_ATTENTION, PACKED_ATTENTION, head_weight, hidden_states
from tailrl.objective.safe_set import RULES, TokenLogprobs, token_logprobs

DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_padding() -> None:
    assert [rounded_up(count, 32) for count in (0, 1, 31, 32, 33)] == [0, 32, 32, 32, 64]
    rows = random(ROWS + 1, 2, 3)
    assert torch.equal(pad_rows(rows)[: ROWS + 1], rows)
    assert pad_rows(rows)[ROWS + 1 :].shape == (ROWS - 1, 2, 3)
    assert not pad_rows(rows)[ROWS + 1 :].any()
    assert pad_rows(rows[:ROWS]) is not None and len(pad_rows(rows[:ROWS])) == ROWS


def test_rounder_widths_need_fewer_rows() -> None:
    assert [row_multiple([width]) for width in (601, 602, 604, 600, 48, 49152)] == [64, 64, 32, 16, 16, 16]
    assert row_multiple([640, 48, 604]) == 32
    assert row_multiple([601, 640]) == 64


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 96, 1536])
def test_any_row_multiple_of_the_widths_gives_the_same_bits(width: int, dtype: torch.dtype) -> None:
    """Products and an elementwise function with a vectorised body, in every number of rows up to 64."""
    rows, weight = random(256, 96, dtype=dtype), random(width, 96, dtype=dtype, seed=1)
    together = torch.nn.functional.silu(torch.nn.functional.linear(rows, weight))
    for count in range(row_multiple([width, 96]), 65, row_multiple([width, 96])):
        alone = torch.nn.functional.silu(torch.nn.functional.linear(rows[:count].clone(), weight))
        assert torch.equal(alone, together[:count])


WIDTHS = [(601, 96), (192, 576), (576, 1536), (256, 1030)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), WIDTHS)
@pytest.mark.usefixtures("threads")
def test_a_product_has_the_same_bits_in_any_number_of_rows(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """Where sums are long, some machines' `linear` has not."""
    rows, weight = random(MOST_ROWS + 3 * ROWS, inputs, dtype=dtype), random(outputs, inputs, dtype=dtype, seed=1)
    bias = random(outputs, dtype=dtype, seed=2)
    together = product(rows, weight, bias)
    close = 1e-5 if dtype == torch.float32 else 1e-2
    plain = rows.double() @ weight.double().T + bias
    torch.testing.assert_close(together.double(), plain, rtol=close, atol=close * plain.abs().max().item())
    for count in (FEWEST_ROWS, BLOCK_ROWS, BLOCK_ROWS + FEWEST_ROWS, 3 * ROWS, 704, MOST_ROWS):
        for start in (0, 2 * ROWS):
            chosen = slice(start, start + count)
            assert torch.equal(product(rows[chosen].clone(), weight, bias), together[chosen]), (count, start)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(128, 896), (64, 512)])
@pytest.mark.usefixtures("threads")
def test_sums_that_cancel_have_the_same_bits_too(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """Their rounding is all that is left of them: half precision does not hide in which order they were added up."""
    rows, weight = random(5 * ROWS, inputs // 2, dtype=dtype), random(outputs, inputs // 2, dtype=dtype, seed=1)
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(2))
    rows, weight = torch.cat([rows, rows], 1)[:, order], torch.cat([weight, -weight], 1)[:, order]
    together = product(rows, weight)
    assert together.any() and together.abs().max() < 1e-3
    for count in (FEWEST_ROWS, BLOCK_ROWS, ROWS, 3 * ROWS):
        assert torch.equal(product(rows[:count].clone(), weight), together[:count]), count


def test_a_product_is_cut_where_its_rows_would_affect_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose sums change beyond 40 rows, or beyond 704 as with AMX."""
    taken: list[tuple[int, int]] = []
    border, shortest = 0, 0

    def minding(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        taken.append(tuple(rows.shape))
        return torch.nn.functional.linear(rows, weight, bias) + (len(rows) > border and rows.shape[1] >= shortest)

    monkeypatch.setattr(batch_invariant, "linear", minding)
    monkeypatch.setattr(batch_invariant, "at_once", cache(at_once.__wrapped__))

    def try_out(dtype: torch.dtype, inputs: int) -> tuple[int, int]:
        batch_invariant.at_once.cache_clear()
        found = batch_invariant.at_once(24, inputs, dtype, torch.get_num_threads())
        rows, weight, bias = (
            random(*shape, seed=seed) for seed, shape in enumerate(((80, inputs), (24, inputs), (24,)))
        )
        given = [tensor.to(dtype).requires_grad_() for tensor in (rows, weight, bias)]
        taken.clear()
        gradients = torch.autograd.grad(product(*given).square().sum(), given)
        assert not any(count > border and summands >= shortest for count, summands in taken)
        close = {"rtol": 1e-4, "atol": 1e-2} if dtype == torch.float32 else {"rtol": 0.05, "atol": 20.0}
        plain = [tensor.detach().double().requires_grad_() for tensor in given]
        expected = torch.autograd.grad((plain[0] @ plain[1].T + plain[2]).square().sum(), plain)
        torch.testing.assert_close([g.double() for g in gradients], list(expected), **close)
        return found

    border = 40
    assert try_out(torch.float32, 8) == (BLOCK_ROWS, 8)
    border = 704
    assert try_out(torch.float32, 8) == (BLOCK_ROWS, 8)
    border, shortest = 40, SUMMANDS + 1
    assert try_out(torch.float32, 8) == (MOST_ROWS, 8)
    assert try_out(torch.float32, SUMMANDS + 8) == (MOST_ROWS, SUMMANDS)
    assert taken == [(80, SUMMANDS)]
    # In half precision each of several sums would be rounded.
    assert try_out(torch.bfloat16, SUMMANDS + 8) == (BLOCK_ROWS, SUMMANDS + 8)
    assert taken == [(32, SUMMANDS + 8), (32, SUMMANDS + 8), (16, SUMMANDS + 8)]
    border = MOST_ROWS
    assert try_out(torch.float32, SUMMANDS + 8) == (MOST_ROWS, SUMMANDS + 8)


@pytest.mark.parametrize("shape", [(16, 96), (1, 48, 96), (2, 16, 96)])
def test_an_exact_layer_takes_rows_of_any_shape(shape: tuple[int, ...]) -> None:
    """A mixture of experts drops the row's first dimension on the way to its experts."""
    layer = random_policy("llama", "float32").model.layers[0].mlp.up_proj
    rows = random(*shape)
    expected = torch.nn.functional.linear(rows, layer.weight, layer.bias)
    assert layer(rows).shape == expected.shape
    torch.testing.assert_close(layer(rows), expected, rtol=1e-5, atol=1e-5)


# --- attention ---------------------------------------------------------------------------------------


def looped(query: Tensor, key: Tensor, value: Tensor, positions: list[list[int]], scaling: float) -> np.ndarray:
    """Attention by its definition, one query at a time, in float64; arguments as in `causal_attention`."""
    out = np.zeros(query.shape)
    group = query.shape[2] // key.shape[1]
    for n, row in enumerate(positions):
        for place, position in enumerate(row):
            for head in range(query.shape[2]):
                scores = [
                    scaling * float(query[n, place, head].double() @ key[n, head // group, m].double())
                    for m in range(position + 1)
                ]
                weights = [math.exp(score - max(scores)) for score in scores]
                total = sum(w * value[n, head // group, m].double().numpy() for m, w in enumerate(weights))
                out[n, place, head] = total / sum(weights)
    return out


@pytest.mark.parametrize(("heads", "key_heads", "length"), [(2, 2, 3), (6, 2, 1), (3, 1, 5), (4, 1, 2)])
def test_attention_is_its_definition(heads: int, key_heads: int, length: int) -> None:
    query, key, value = (
        random(3, length, heads, 8, seed=1),
        random(3, key_heads, 2 * KEYS, 8, seed=2),
        random(3, key_heads, 2 * KEYS, 8, seed=3),
    )
    position_NL = torch.from_numpy(np.random.default_rng(0).integers(0, 2 * KEYS, (3, length)))
    bias = future_bias(position_NL, heads // key_heads, 2 * KEYS)
    out = causal_attention(query, key.transpose(2, 3).contiguous(), value, bias, 0.3)
    assert out.shape == query.shape
    np.testing.assert_allclose(out, looped(query, key, value, position_NL.tolist(), 0.3), atol=2e-6, rtol=0)


HEADS = [(4, 4, 32), (9, 3, 64), (4, 1, 128)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "key_heads", "size"), HEADS)
def test_a_querys_attention_is_the_same_in_any_batch(heads: int, key_heads: int, size: int, dtype: torch.dtype) -> None:
    """Alone and beside other sequences, at the first, a middle and the last position of each block of keys, with any
    number of later keys.
    """
    batch, length, group = 3, 608, heads // key_heads
    query = random(batch, length, heads, size, dtype=dtype, seed=1)
    key = random(batch, key_heads, size, length, dtype=dtype, seed=2)
    value = random(batch, key_heads, length, size, dtype=dtype, seed=3)
    together = causal_attention(query, key, value, future_bias(torch.arange(length)[None], group, length), size**-0.5)
    for fewest in range(KEYS, length + 1, KEYS):
        for position in (fewest - KEYS, fewest - 11, fewest - 1):
            for keys in {fewest, *(min(more, length) for more in (fewest + KEYS, rounded_up(fewest, VALUES)))}:
                for chosen in (slice(0, 1), slice(0, 3)):
                    seen = key[chosen, ..., :keys], value[chosen, :, :keys]
                    mask = future_bias(torch.full((len(query[chosen]), 1), position), group, keys)
                    one = causal_attention(query[chosen, [position]], *seen, mask, size**-0.5)
                    assert torch.equal(one.squeeze(1), together[chosen, position]), (position, keys, chosen)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "key_heads", "size"), HEADS)
def test_attention_is_the_same_at_every_length(heads: int, key_heads: int, size: int, dtype: torch.dtype) -> None:
    assert uneven_lengths(heads, key_heads, size, torch.zeros(1, dtype=dtype), 2000) == []


@pytest.mark.parametrize(("heads", "key_heads", "size"), HEADS)
def test_without_the_fixed_split_of_the_values_bits_differ(
    heads: int, key_heads: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 the rounding of the products hides it on this kind of machine."""
    monkeypatch.setattr(batch_invariant, "VALUES", 2**20)
    if not uneven_lengths(heads, key_heads, size, torch.zeros(1), 2000):
        pytest.skip("this CPU cuts no sum of up to 2,000")


def test_an_attention_that_minds_later_keys_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here one that is wrong over 96 keys alone, and one that is wrong wherever it can be."""
    usual = causal_attention

    def wrong_over(*lengths: int) -> list[int]:
        def attention(query: torch.Tensor, key: torch.Tensor, *rest: Any) -> torch.Tensor:
            return usual(query, key, *rest) + (key.shape[-1] in lengths)

        monkeypatch.setattr(batch_invariant, "causal_attention", attention)
        return uneven_lengths(4, 2, 8, torch.zeros(1), 150)

    assert wrong_over(96) == [96]
    assert wrong_over(160) == [32, 64, 96, 128]


def test_packed_attention_is_causal_within_each_sequence() -> None:
    lengths = [3, KEYS + 7, 1, 12]
    packing, count = pack(lengths), sum(lengths)
    query, key, value = random(count + 5, 4, 16), random(count + 5, 2, 16, seed=1), random(count + 5, 2, 16, seed=2)
    out = PackedAttention.of(packing, 2).attend(0, query, key, value, 0.25)
    assert out.shape == query.shape
    assert not out[count:].any()
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        mine = [tensor[rows].transpose(0, 1)[None] for tensor in (query, key, value)]
        expected = torch.nn.functional.scaled_dot_product_attention(*mine, is_causal=True, scale=0.25, enable_gqa=True)
        torch.testing.assert_close(out[rows], expected[0].transpose(0, 1))
        start += length


# --- logits and log-probs ----------------------------------------------------------------------------


HEADS = [
    (vocabulary, hidden, dtype) for vocabulary, hidden in ((2048, 128), (601, 96), (49152, 576)) for dtype in DTYPES
]


@pytest.mark.parametrize("head", rest_long([head for head in HEADS if head[::2] != (49152, torch.float32)], HEADS))
def test_a_row_of_logits_depends_on_that_row_alone(head: tuple[int, int, torch.dtype]) -> None:
    vocabulary, hidden, dtype = head
    rows, weight = random(4 * ROWS, hidden, dtype=dtype), random(vocabulary, hidden, dtype=dtype, seed=1)
    together = head_logits(rows, weight, Scoring("full", 0.7), [], [])
    assert together.dtype == torch.float32
    for part in (slice(0, 1), slice(7, 8), slice(5, 100), slice(60, 191)):
        alone = head_logits(pad_rows(rows[part]), weight, Scoring("full", 0.7), [], [])
        assert torch.equal(alone[: len(rows[part])], together[part])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("chunk_rows", [1, 2, 1000])
def test_log_probs_in_chunks_are_the_definition(rule: str, chunk_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_invariant, "CHUNK_LOGITS", chunk_rows * ROWS * V)
    count = 3 * ROWS + 5
    hidden, weight = random(count, 32), random(V, 32, seed=1)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, V, count))
    threshold = {"full": 0.0, "top_k": 7.0, "top_p": 0.8}.get(rule, -3.0) + torch.zeros(count, 1)
    seeds = [0] * count
    for fill in (False, True):
        ours = exact_logprobs(hidden, weight, tokens, threshold, Scoring(rule, 0.8, fill), seeds, seeds)
        plain = token_logprobs(hidden @ weight.T / 0.8, tokens, rule, threshold, fill)
        for name in TokenLogprobs.__slots__:
            torch.testing.assert_close(getattr(ours, name), getattr(plain, name), atol=1e-5, rtol=1e-5)
        whole = exact_logprobs(
            hidden[10:], weight, tokens[10:], threshold[10:], Scoring(rule, 0.8, fill), seeds[10:], seeds[10:]
        )
        assert torch.equal(whole.logp_T, ours.logp_T[10:])
        assert torch.equal(whole.log_kept_T, ours.log_kept_T[10:])


# --- gradients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_those_of_the_plain_forward(name: str) -> None:
    exact, plain = random_policy(name, "float32"), AutoModelForCausalLM.from_config(CONFIGS[name])
    plain.load_state_dict(exact.state_dict())
    plain.set_attn_implementation(PACKED_ATTENTION)
    lengths = [3, 40, 17]
    packing, count = pack(lengths), sum(lengths)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, V, count))
    coefficient = random(count, seed=3)
    gradients = {}
    for attention, model in ((EXACT_ATTENTION, exact), (PACKED_ATTENTION, plain)):
        hidden = hidden_states(model, tokens, packing)
        if attention == EXACT_ATTENTION:
            threshold, unused = torch.full((count, 1), -20.0), [0] * count
            arguments = tokens, threshold, Scoring("min_p"), unused, unused
            logp = exact_logprobs(hidden, head_weight(model), *arguments).logp_T
        else:
            logp = token_logprobs(hidden @ head_weight(model).T, tokens, "min_p", -20.0).logp_T
        (logp * coefficient).sum().backward()
        gradients[attention] = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    for weight, expected in gradients[PACKED_ATTENTION].items():
        assert expected.norm() > 0
        assert (gradients[EXACT_ATTENTION][weight] - expected).norm() < 1e-4 * expected.norm(), weight

"""The exact engine: the trainer's bits for every token, whatever shares a batch, and the right distribution."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases_fixture import rest_long
from exact_fixture import (
    CONFIGS,
    MAX_LENGTH,
    ROW_MULTIPLES,
    SIZES,
    STOP_TOKENS,
    V,
    differing_tokens,
    random_policy,
    random_requests,
    redrawn_from_kept_logits,
    same_bits,
    sampler_of,
)
from scipy.stats import chisquare
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from tailrl.config.sampler import Disturbance, SamplerSettings
from tailrl.kernels import batch_invariant
from tailrl.model.forward import row_multiple
from tailrl.model.policy import named_weights
from tailrl.rollout import Decoding, kv_cache
from tailrl.rollout.exact import ExactSampler
from tailrl.rollout.types import Request
from tailrl.runtime.errors import StudyError

RULES = [("full", 0.0), ("min_p", -3.0), ("min_p", -13.0), ("entropy", -3.0), ("top_k", 20.0), ("top_p", 0.9)]
DIALS = [Disturbance(), Disturbance(bias=0.1, noise=0.3, floor=1e-3)]
CASES = [(name, dtype) for name in CONFIGS for dtype in ("float32", "bfloat16")]
FAST = [("llama, 3 queries a key", "bfloat16"), ("qwen2, 2 queries a key", "float32")]
"""`test_the_self_test_passes` compares the others to the bit too, in fewer compositions."""

Pair = tuple[PreTrainedModel, ExactSampler]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Pair]:
    """A trainer's model and an engine with its weights, for each architecture and dtype."""
    made = {}
    for case in CASES:
        model = random_policy(*case)
        made[case] = (model, sampler_of(model, tmp_path_factory.mktemp("policy")))
    return made


@pytest.fixture
def pair(pairs: dict[tuple[str, str], Pair]) -> Pair:
    return pairs["llama, 3 queries a key", "float32"]


def compare(pair: Pair, compositions: int, largest: int, seed: int) -> tuple[int, int]:
    """Differing and all tokens over random batches, orders, lengths, rules, dials, temperatures and micro-batches."""
    model, sampler = pair
    rng = np.random.default_rng(seed)
    wrong = total = 0
    for turn in range(compositions):
        rule, threshold = RULES[turn % len(RULES)]
        count = int(rng.integers(1, largest + 1))
        requests = random_requests(count, int(rng.integers(1, 90)), 1000 * seed + turn, threshold)
        dial = DIALS[(turn + turn // len(RULES)) % len(DIALS)]
        decoding = Decoding(float(rng.choice([1.0, 0.7])), int(rng.integers(20, 60)), rule, dial)
        sampled = list(zip(requests, sampler.generate(requests, decoding), strict=True))
        order = rng.permutation(count)
        found = differing_tokens(model, [sampled[i] for i in order], decoding, rng.integers(1, count + 1, 6).tolist())
        wrong, total = wrong + found[0], total + found[1]
    return wrong, total


# --- to the bit --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", rest_long(FAST, CASES, " ".join))
def test_every_log_prob_is_the_trainers(pairs: dict[tuple[str, str], Pair], case: tuple[str, str]) -> None:
    wrong, total = compare(pairs[case], 7, 150, CASES.index(case))
    assert total > 2500
    assert wrong == 0


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_every_log_prob_is_the_trainers_at_length(
    pairs: dict[tuple[str, str], Pair], case: tuple[str, str], threads: int
) -> None:
    wrong, total = compare(pairs[case], 50, 200, 100 * threads + CASES.index(case))
    assert total > 20000
    assert wrong == 0


@pytest.mark.slow
def test_wide_layers(tmp_path: Path) -> None:
    """Where AMX cuts its sums by the number of rows."""
    wide = {**SIZES, "hidden_size": 896, "intermediate_size": 1030, "num_hidden_layers": 1}
    model = random_policy(LlamaConfig(**wide, num_attention_heads=14, num_key_value_heads=2), "bfloat16")
    wrong, total = compare((model, sampler_of(model, tmp_path)), 2, 60, 70)
    assert total > 500
    assert wrong == 0


def test_one_thread_or_two(pair: Pair, threads: int) -> None:
    assert torch.get_num_threads() == threads
    wrong, total = compare(pair, 2, 40, 50)
    assert total > 300
    assert wrong == 0


@pytest.mark.parametrize("dtype", rest_long(("bfloat16",), ("float32", "bfloat16")))
def test_a_request_gives_the_same_bits_in_any_batch(pairs: dict[tuple[str, str], Pair], dtype: str) -> None:
    _, sampler = pairs["llama", dtype]
    requests, decoding = random_requests(180, threshold=-3.0), Decoding(1.0, 30, "min_p")
    together = sampler.generate(requests, decoding)
    backwards = sampler.generate(requests[::-1], decoding)[::-1]
    alone = [sampler.generate([request], decoding)[0] for request in requests[:8]]
    assert all(map(same_bits, together, backwards))
    assert all(map(same_bits, together, alone))
    assert len({len(rollout.tokens) for rollout in together}) > 10


def test_the_cases_have_rows_in_multiples_of_many_sizes(pairs: dict[tuple[str, str], Pair]) -> None:
    assert {name: row_multiple(model) for (name, _), (model, _) in pairs.items()} == ROW_MULTIPLES


def test_a_shared_prompt_gives_the_same_bits_as_its_own_copy(pair: Pair) -> None:
    (first, second), decoding = random_requests(2), Decoding(1.0, 20)
    shared = [replace(first, seed=seed) for seed in range(5)]
    together = pair[1].generate([*shared, second], decoding)
    assert all(map(same_bits, together, [pair[1].generate([request], decoding)[0] for request in [*shared, second]]))
    assert len({rollout.tokens for rollout in together}) == 6


@pytest.mark.slow  # `kernels/test_batch_invariant.py`
@pytest.mark.parametrize("dtype", rest_long(("bfloat16",), ("float32", "bfloat16")))
def test_sequences_longer_than_one_product_of_values(dtype: str, tmp_path: Path) -> None:
    longest = 612
    assert longest > 4 * batch_invariant.VALUES
    model = random_policy("llama, 3 queries a key", dtype)
    sampler = sampler_of(model, tmp_path, longest)
    requests, decoding = random_requests(24, longest - 40), Decoding(1.0, 30)
    sampled = list(zip(requests, sampler.generate(requests, decoding), strict=True))
    assert sum(len(request.prompt_tokens) > longest // 2 for request in requests) > 8
    wrong, total = differing_tokens(model, sampled[::-1], decoding, [1, 5])
    assert total > 200
    assert wrong == 0


def test_few_in_flight_and_prompts_in_several_rows_give_the_same_bits(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, decoding = random_requests(150), Decoding(1.0, 30)
    usual = pair[1].generate(requests, decoding)
    monkeypatch.setattr(kv_cache, "CACHE_BYTES", 0)
    monkeypatch.setattr(kv_cache, "PREFILL_TOKENS", 100)
    monkeypatch.setattr(kv_cache, "ADMITTED_AT_ONCE", 3)
    assert all(map(same_bits, usual, pair[1].generate(requests, decoding)))


@pytest.mark.parametrize("dial", DIALS, ids=["undisturbed", "disturbed"])
def test_kept_logits_have_the_bits_that_the_tokens_were_drawn_from(pair: Pair, dial: Disturbance) -> None:
    """At every third position, some responses continued; sequences end and move while others go on."""
    requests = [replace(r, start=i % 3) for i, r in enumerate(random_requests(150, threshold=-3.0, seed=2))]
    decoding = Decoding(0.7, 30, "min_p", dial, keep_every=3)
    rollouts = pair[1].generate(requests, decoding)
    assert redrawn_from_kept_logits(requests, rollouts, decoding) > 300
    plain = pair[1].generate(requests, replace(decoding, keep_every=0))
    assert all(map(same_bits, plain, rollouts))
    assert not any(rollout.logits_sampler_KV for rollout in plain)


def test_new_weights_count_at_once(pair: Pair, tmp_path: Path) -> None:
    model, _ = pair
    other = random_policy("llama, 3 queries a key", "float32", seed=1)
    sampler = sampler_of(other, tmp_path)
    requests, decoding = random_requests(6), Decoding(1.0, 20)
    sampled = list(zip(requests, sampler.generate(requests, decoding), strict=True))
    assert differing_tokens(other, sampled, decoding, [])[0] == 0
    sampler.load_weights(named_weights(model))
    assert all(map(same_bits, sampler.generate(requests, decoding), pair[1].generate(requests, decoding)))


def test_the_self_test_passes(pairs: dict[tuple[str, str], Pair]) -> None:
    for _, sampler in pairs.values():
        assert sampler.self_test(random_requests(4, threshold=-3.0), Decoding(0.7, 12, "min_p")) == 0


# --- the comparison fails where it must --------------------------------------------------------------


def without_row_padding(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(batch_invariant, "ROWS", 1)


def without_fixed_attention(patch: pytest.MonkeyPatch) -> None:
    def library(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scaling: float) -> Tensor:
        group = query.shape[2] // key.shape[1]
        out = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(2, 3),
            value,
            attn_mask=bias[:, :, ::group],
            scale=scaling,
            enable_gqa=True,
        )
        return out.transpose(1, 2)

    patch.setattr(batch_invariant, "causal_attention", library)
    patch.setattr(kv_cache, "causal_attention", library)


@pytest.mark.parametrize(("mutate", "largest"), [(without_row_padding, 3), (without_fixed_attention, 60)])
def test_without_each_batch_invariant_operator_bits_differ(
    pair: Pair, mutate: Any, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    wrong, total = compare(pair, 4, largest, 7)
    assert wrong > 0.01 * total
    with pytest.raises(
        StudyError, match=r"not exact on this machine: (\d+ of the trainer's log-probs differ|attention over)"
    ):
        pair[1].self_test(random_requests(4), Decoding(1.0, 24))


def test_an_attention_that_is_not_exact_at_some_length_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the responses of the self-test, and no longer than a request can become."""
    usual = batch_invariant.causal_attention

    def attention(query: Tensor, key: Tensor, *rest: Any) -> Tensor:
        return usual(query, key, *rest) + (key.shape[-1] in (160, 192))

    monkeypatch.setattr(batch_invariant, "causal_attention", attention)
    requests = random_requests(4, 20)
    longest = max(len(request.prompt_tokens) for request in requests)
    assert pair[1].self_test(requests, Decoding(1.0, 128 - longest)) == 0
    words = "not exact on this machine: attention over 160 tokens, one of 2 such lengths, has other bits"
    with pytest.raises(StudyError, match=words):
        pair[1].self_test(requests, Decoding(1.0, 200))


def test_a_weight_that_differs_in_its_last_bit_is_seen(pair: Pair) -> None:
    model, sampler = pair
    requests, decoding = random_requests(20), Decoding(1.0, 20)
    sampled = list(zip(requests, sampler.generate(requests, decoding), strict=True))
    changed = random_policy("llama, 3 queries a key", "float32")
    with torch.no_grad():
        weight = changed.model.layers[0].self_attn.v_proj.weight
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))
    assert differing_tokens(model, sampled, decoding, [])[0] == 0
    assert differing_tokens(changed, sampled, decoding, [])[0] > 0


# --- the distribution --------------------------------------------------------------------------------


@pytest.mark.slow  # `test_transformers.py` has it of the same draws
@pytest.mark.parametrize(("rule", "threshold"), [("full", 0.0), ("min_p", -2.0)])
def test_pairs_of_tokens_follow_the_policys_distribution(pair: Pair, rule: str, threshold: float) -> None:
    """Two tokens in a row against the enumerated distribution of pairs, at a false alarm of 1e-4 each.

    Pairs that 20,000 draws meet fewer than ten times on average are counted as one.
    """
    model, sampler = pair
    count, temperature, prompt = 20000, 1.0, random_requests(1)[0].prompt_tokens
    probs_V = constrained(model, prompt, rule, threshold, temperature)
    expected: dict[tuple[int, ...], float] = {}
    for first in np.flatnonzero(probs_V * count >= 10).tolist():
        if first in STOP_TOKENS:
            expected[(first,)] = probs_V[first]
        else:
            following_V = constrained(model, (*prompt, first), rule, threshold, temperature)
            expected |= {(first, second): probs_V[first] * following_V[second] for second in range(V)}
    expected = {pair: p * count for pair, p in expected.items() if p * count >= 10}
    requests = [Request(prompt, seed, threshold) for seed in range(count)]
    drawn = [rollout.tokens for rollout in sampler.generate(requests, Decoding(temperature, 2, rule))]
    counts = dict.fromkeys(expected, 0)
    for tokens in drawn:
        if tokens in counts:
            counts[tokens] += 1
    assert len(expected) >= 8
    observed = [*counts.values(), count - sum(counts.values())]
    predicted = [*expected.values(), count - sum(expected.values())]
    if predicted[-1] < 1e-6:
        assert observed[-1] == 0
        observed, predicted = observed[:-1], predicted[:-1]
    assert chisquare(observed, predicted).pvalue > 1e-4


@torch.no_grad()
def constrained(
    model: PreTrainedModel, tokens: tuple[int, ...], rule: str, threshold: float, temperature: float
) -> np.ndarray:
    """float64 probabilities of the next token, over the safe set, from the model's plain attention."""
    model.set_attn_implementation("eager")
    logits_V = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].double() / temperature
    model.set_attn_implementation("exact")
    if rule == "min_p":
        logits_V[logits_V < logits_V.max() + threshold] = -torch.inf
    return logits_V.softmax(-1).numpy()


def test_records_agree_with_float64(pair: Pair) -> None:
    model, sampler = pair
    requests = random_requests(3, threshold=-3.0)
    for request, rollout in zip(requests, sampler.generate(requests, Decoding(0.7, 12, "min_p")), strict=True):
        for place, token in enumerate(rollout.tokens):
            seen = (*request.prompt_tokens, *rollout.tokens[:place])
            all_V, safe_V = (constrained(model, seen, rule, -3.0, 0.7) for rule in ("full", "min_p"))
            assert rollout.logp_sampler_T[place] == pytest.approx(math.log(safe_V[token]), abs=1e-4)
            assert rollout.log_kept_sampler_T[place] == pytest.approx(math.log(all_V[safe_V > 0].sum()), abs=1e-4)
            assert abs(rollout.kept_vocab_sampler_T[place] - (safe_V > 0).sum()) <= 1


# --- ends and errors ---------------------------------------------------------------------------------


def test_responses_end_with_an_end_token_or_at_the_limit(pair: Pair) -> None:
    rollouts = pair[1].generate(random_requests(100), Decoding(1.0, 25))
    for rollout in rollouts:
        ends = [token in STOP_TOKENS for token in rollout.tokens]
        assert not any(ends[:-1])
        assert rollout.stopped == ends[-1]
        assert rollout.stopped or len(rollout.tokens) == 25
    assert {rollout.stopped for rollout in rollouts} == {True, False}


def test_a_response_ends_where_the_policy_does(pair: Pair) -> None:
    prompts = [tuple(range(2, 2 + length)) for length in (MAX_LENGTH - 1, MAX_LENGTH - 3)]
    rollouts = pair[1].generate([Request(prompt, 5) for prompt in prompts], Decoding(1.0, 25))
    assert len(rollouts[0].tokens) == 1
    assert len(rollouts[1].tokens) <= 3


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def test_what_cannot_be_sampled_is_refused(pair: Pair, tmp_path: Path) -> None:
    model, sampler = pair
    with pytest.raises(StudyError, match=r"a prompt of 160 tokens leaves no room in the policy's 160 tokens"):
        sampler.generate([Request((5,) * MAX_LENGTH, 0)], Decoding(1.0, 5))
    with pytest.raises(StudyError, match="a prompt holds no token"):
        sampler.generate([Request((), 0)], Decoding(1.0, 5))
    assert sampler.generate([], Decoding(1.0, 5)) == []
    for change, message in (
        ({"rope_parameters": DYNAMIC, "max_position_embeddings": 80}, "rope of type dynamic changes at 80 tokens"),
        ({"eos_token_id": None}, "names no end token"),
    ):
        folder = tmp_path / message[:6]
        config = type(model.config)(**{**model.config.to_dict(), **change})
        config.save_pretrained(folder)
        with pytest.raises(StudyError, match=message):
            ExactSampler(folder, SamplerSettings(engine="exact", dtype="float32"), MAX_LENGTH)
    folder = tmp_path / "empty"
    model.config.save_pretrained(folder)
    with pytest.raises(RuntimeError, match="no weights"):
        ExactSampler(folder, SamplerSettings(engine="exact", dtype="float32"), MAX_LENGTH).generate(
            random_requests(1), Decoding(1.0, 5)
        )

"""The transformers engine's batch: who is in it and for how long, when responses end, weights, self-test and errors."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases_fixture import rest_long
from exact_fixture import CONFIGS, MAX_LENGTH, STOP_TOKENS, random_policy, random_requests, same_bits
from families import write_family
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers_fixture import DTYPES, GQA, close, engine_of

from tailrl.config.sampler import Disturbance, TransformersSettings
from tailrl.model.policy import named_weights
from tailrl.rollout import Decoding
from tailrl.rollout import transformers as engine_module
from tailrl.rollout.transformers import TransformersSampler
from tailrl.rollout.types import Request
from tailrl.runtime.errors import StudyError

IN_FLOAT32 = TransformersSettings(engine="transformers", dtype="float32")

RULES = [("full", 0.0), ("min_p", -3.0), ("entropy", -3.0), ("top_k", 20.0), ("top_p", 0.9)]
DIAL = Disturbance(bias=0.2, noise=0.3, floor=1e-3)


# --- in flight ---------------------------------------------------------------------------------------


def test_few_in_flight_and_prompts_in_several_rows_give_the_same(
    engine: TransformersSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, decoding = random_requests(90), Decoding(1.0, 30)
    usual = engine.generate(requests, decoding)
    monkeypatch.setattr(engine_module, "PREFILL_TOKENS", 100)
    monkeypatch.setattr(engine_module, "ADMITTED_AT_ONCE", 3)
    monkeypatch.setattr(engine, "most", 10)
    close(usual, engine.generate(requests, decoding))
    monkeypatch.setattr(engine, "most", 1)
    close(usual[:10], engine.generate(requests[:10], decoding))


def test_the_cache_limits_what_is_in_flight(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A token of this policy takes 2 layers x 2 heads x 32 x 2 numbers of 2 bytes: 512 bytes."""
    monkeypatch.setattr(engine_module, "CACHE_BYTES", 512 * MAX_LENGTH * 7 + 5)
    assert engine_of(folders[GQA], dtype="bfloat16").most == 7
    monkeypatch.setattr(engine_module, "CACHE_BYTES", 0)
    assert engine_of(folders[GQA]).most == 1


# --- ends and cost -----------------------------------------------------------------------------------


def test_responses_end_with_an_end_token_or_at_the_limit(engine: TransformersSampler) -> None:
    rollouts = engine.generate(random_requests(100), Decoding(1.0, 25))
    for rollout in rollouts:
        ends = [token in STOP_TOKENS for token in rollout.tokens]
        assert not any(ends[:-1])
        assert rollout.stopped == ends[-1]
        assert rollout.stopped or len(rollout.tokens) == 25
        assert len(rollout.tokens) == len(rollout.logp_sampler_T) == len(rollout.kept_vocab_sampler_T)
    assert {rollout.stopped for rollout in rollouts} == {True, False}
    assert {len(r.tokens) for r in engine.generate(random_requests(9), Decoding(1.0, 1))} == {1}


def test_a_response_ends_where_the_policy_does(engine: TransformersSampler) -> None:
    """Beside one that goes on, for which the ended ones must not reach beyond the policy's positions."""
    prompts = [tuple(range(2, 2 + length)) for length in (MAX_LENGTH - 1, MAX_LENGTH - 3, *[5] * 20)]
    requests = [Request(prompt, 5 + i) for i, prompt in enumerate(prompts)]
    rollouts = engine.generate(requests, Decoding(1.0, 25))
    assert len(rollouts[0].tokens) == 1
    assert len(rollouts[1].tokens) <= 3
    close(rollouts[:2], [engine.generate([request], Decoding(1.0, 25))[0] for request in requests[:2]])


def test_ended_sequences_and_old_padding_leave_the_batch(
    engine: TransformersSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that go through the model: at most 8/7 of those whose token is used; never wider than their sequences."""
    steps: list[tuple[int, int]] = []
    forward = engine._forward

    def spy(tokens_SN: Tensor, mask_SL: Tensor, cache: Any) -> Tensor:
        if tokens_SN.shape[1] == 1:
            steps.append((len(tokens_SN), mask_SL.shape[1] - int(mask_SL.sum(-1).max())))
        return forward(tokens_SN, mask_SL, cache)

    monkeypatch.setattr(engine, "_forward", spy)
    requests = [replace(r, prompt_tokens=(*r.prompt_tokens, 7)) for r in random_requests(300)]
    rollouts = engine.generate(requests, Decoding(1.0, 40))
    used = sum(len(rollout.tokens) - 1 for rollout in rollouts)
    assert used <= sum(rows for rows, _ in steps) <= 8 / 7 * used
    assert 4 * min(rows for rows, _ in steps) < max(rows for rows, _ in steps)
    # Right after sequences were taken out, the longest of the others needs no padding.
    assert np.mean([wasted == 0 for _, wasted in steps]) > 0.5


def test_a_shared_prompt_is_run_once(engine: TransformersSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    forward = engine._forward

    def spy(tokens_SN: Tensor, mask_SL: Tensor, cache: Any) -> Tensor:
        seen.append(len(tokens_SN))
        return forward(tokens_SN, mask_SL, cache)

    (first, second), decoding = random_requests(2), Decoding(1.0, 20)
    requests = [*(replace(first, seed=seed) for seed in range(5)), second, replace(first, seed=9)]
    alone = [engine.generate([request], decoding)[0] for request in requests]
    monkeypatch.setattr(engine, "_forward", spy)
    close(engine.generate(requests, decoding), alone)
    assert seen[0] == 2
    assert len({rollout.tokens for rollout in alone}) == 7


# --- weights, self-test and errors -------------------------------------------------------------------


def test_new_weights_count_at_once(folders: dict[str, Path], engine: TransformersSampler) -> None:
    sampler, requests, decoding = engine_of(folders[GQA]), random_requests(6), Decoding(1.0, 20)
    sampler.load_weights(named_weights(random_policy(GQA, "float32", seed=1)))
    other = sampler.generate(requests, decoding)
    sampler.load_weights(named_weights(random_policy(GQA, "float32")))
    assert all(map(same_bits, sampler.generate(requests, decoding), engine.generate(requests, decoding)))
    assert not any(map(same_bits, other, engine.generate(requests, decoding)))


CASES = [(name, dtype) for name in CONFIGS for dtype in DTYPES]
FAST = [(name, DTYPES[(place + 2) % 4]) for place, name in enumerate(CONFIGS)]


@pytest.mark.parametrize("case", rest_long(FAST, CASES, " ".join))
def test_the_self_test_passes(folders: dict[str, Path], case: tuple[str, str]) -> None:
    sampler = engine_of(folders[case[0]], *case)
    for rule, threshold in RULES:
        decoding = Decoding(0.7, 12, rule, DIAL)
        assert 0 <= sampler.self_test(random_requests(6, threshold=threshold), decoding) <= 1e-5


def raw(patch: pytest.MonkeyPatch, _: PreTrainedModel) -> None:
    """Log-probs from before the mask are off by log Z'."""
    draw = engine_module.draw

    def unmasked(*arguments: Any) -> Any:
        drawn = draw(*arguments)
        return replace(drawn, logp_S=drawn.logp_S + drawn.log_kept_S)

    patch.setattr(engine_module, "draw", unmasked)


def other_noise(patch: pytest.MonkeyPatch, _: PreTrainedModel) -> None:
    """The noise of another response."""
    disturb = engine_module.disturb
    patch.setattr(engine_module, "disturb", lambda logits, seeds, *rest: disturb(logits, seeds[::-1], *rest))


def no_positions(patch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    """Every token at the same position, where there is a cache. (Rotary embeddings do not see a mere shift.)"""
    forward = model.forward

    def standing(position_ids: Tensor | None = None, **rest: Any) -> Any:
        return forward(position_ids=None if position_ids is None else position_ids * 0, **rest)

    patch.setattr(model, "forward", standing)


def no_mask(patch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    """Padding that is attended to."""
    forward = model.forward
    patch.setattr(model, "forward", lambda attention_mask=None, **rest: forward(**rest))  # noqa: ARG005


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (raw, r"log-probs of the transformers engine are not those of the distribution it samples from: .* nats"),
        (other_noise, r"log-probs of the transformers engine are not those of the distribution it samples from"),
        (no_positions, r"another distribution in a padded batch with a cache than alone: .* total variation of"),
        (no_mask, r"another distribution in a padded batch with a cache than alone"),
    ],
)
def test_the_self_test_refuses(
    folders: dict[str, Path], break_it: Any, words: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = engine_of(folders["llama"], "llama", dtype)
    decoding = Decoding(1.0, 12, "min_p", Disturbance(noise=0.3))
    break_it(monkeypatch, sampler.model)
    with pytest.raises(StudyError, match=words):
        sampler.self_test(random_requests(6, threshold=-1.0), decoding)


def test_what_cannot_be_sampled_is_refused(engine: TransformersSampler, folders: dict[str, Path]) -> None:
    with pytest.raises(StudyError, match=r"a prompt of 160 tokens leaves no room in the policy's 160 tokens"):
        engine.generate([Request((5,) * MAX_LENGTH, 0)], Decoding(1.0, 5))
    with pytest.raises(StudyError, match="a prompt holds no token"):
        engine.generate([Request((), 0)], Decoding(1.0, 5))
    assert engine.generate([], Decoding(1.0, 5)) == []
    assert engine.metrics() == {}
    with pytest.raises(RuntimeError, match="no weights"):
        TransformersSampler(folders[GQA], IN_FLOAT32, MAX_LENGTH).generate(random_requests(1), Decoding(1.0, 5))


# --- families ----------------------------------------------------------------------------------------


def family_engine(name: str, folder: Path) -> TransformersSampler:
    sampler = TransformersSampler(write_family(name, folder), IN_FLOAT32, 32)
    sampler.load_weights(AutoModelForCausalLM.from_pretrained(folder).state_dict().items())
    return sampler


@pytest.mark.parametrize("name", ["gpt2", "opt", "gpt_neox", "bloom", "falcon", "qwen3_moe"])
def test_families_without_grouped_queries_sample(name: str, tmp_path: Path) -> None:
    """Their configurations have no number of key heads."""
    requests = [Request((5, 9, 11), 1), Request((5, 9, 11), 2), Request((7, 8, 9, 10, 12), 3)]
    assert family_engine(name, tmp_path / name).self_test(requests, Decoding(1.0, 8)) < 1e-5


@pytest.mark.parametrize("name", ["mamba", "jamba", "lfm2", "falcon_h1", "qwen3_next", "qwen3_5_text"])
def test_a_family_with_a_recurrence_is_one_sentence(name: str, tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=rf"{name} keeps more of a sequence than keys and values"):
        family_engine(name, tmp_path / name)

"""The transformers engine against whole forwards in float64, enumeration, the dial's closed form and the trainer."""

import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from cases_fixture import rest_long
from definitions import disturbed, safe_tokens, softmax
from exact_fixture import (
    CONFIGS,
    MAX_LENGTH,
    STOP_TOKENS,
    V,
    random_policy,
    random_requests,
    redrawn_from_kept_logits,
    same_bits,
    sampler_of,
)
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers_fixture import DTYPES, GQA, close, engine_of

from tailrl.config.sampler import Disturbance
from tailrl.model.policy import named_weights
from tailrl.objective.noise import normal
from tailrl.rollout import Decoding
from tailrl.rollout import transformers as engine_module
from tailrl.rollout.transformers import TransformersSampler
from tailrl.rollout.types import Request
from tailrl.rollout.verified import VerifiedSampler

RULES = [("full", 0.0), ("min_p", -3.0), ("min_p", -13.0), ("entropy", -3.0), ("top_k", 20.0), ("top_p", 0.9)]
DIALS = {
    "noise": Disturbance(noise=0.3),
    "floor": Disturbance(floor=0.05),
    "all": Disturbance(bias=0.2, noise=0.3, floor=1e-3),
}


@cache
def plain_model(name: str) -> PreTrainedModel:
    # A copy: a model's attention is set in its configuration, which others are made from.
    config = deepcopy(CONFIGS[name])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager").eval()


@torch.no_grad()
def whole_logits(sampler: TransformersSampler, name: str, tokens: Sequence[int]) -> np.ndarray:
    """float64 logits [L, V] after each token of one sequence, by plain attention, without padding or cache."""
    model = plain_model(name)
    model.load_state_dict(sampler.model.state_dict())
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].numpy()


# --- what is recorded --------------------------------------------------------------------------------


CASES = [(name, temperature) for name in CONFIGS for temperature in (1.0, 0.7)]
FAST = [(name, (1.0, 0.7)[place % 2]) for place, name in enumerate(CONFIGS)]


@pytest.mark.parametrize("case", rest_long(FAST, CASES, lambda case: f"{case[0]} at {case[1]}"))
def test_records_are_those_of_a_whole_forward_in_float64(
    engines: dict[str, TransformersSampler], case: tuple[str, float]
) -> None:
    """Prompts of 1 to 50 tokens share a padded batch; float32 holds log π'^mp and log Z' to 1e-4 nats."""
    name, temperature = case
    for rule, threshold in RULES:
        requests = random_requests(6, threshold=threshold)
        rollouts = engines[name].generate(requests, Decoding(temperature, 12, rule))
        for rollout in rollouts:
            prompt = len(rollout.prompt_tokens)
            logits_TV = whole_logits(engines[name], name, (*rollout.prompt_tokens, *rollout.tokens))[prompt - 1 :]
            for place, token in enumerate(rollout.tokens):
                probs = softmax((logits_TV[place] / temperature).tolist())
                kept = int(rollout.kept_vocab_sampler_T[place])
                # float32 may put a token on the very edge on either side.
                sizes = [sum(safe_tokens(probs, rule, threshold + shift)) for shift in (-1e-5, 0.0, 1e-5)]
                assert min(sizes) <= kept <= max(sizes)
                safe = sorted(probs)[-kept:]
                mass = math.fsum(safe)
                assert safe[0] <= probs[token]
                assert rollout.log_kept_sampler_T[place] == pytest.approx(math.log(mass), abs=1e-4)
                assert rollout.logp_sampler_T[place] == pytest.approx(math.log(probs[token] / mass), abs=1e-4)


def test_the_number_format_is_really_used(folders: dict[str, Path]) -> None:
    """Weights are rounded to it, and the log-probs of the same tokens are off by what its 24, 11 or 8 bits leave.

    Eight times the rounding gives about eight times the error: 3 bits lie between float16 and bfloat16.
    """
    weights = dict(named_weights(random_policy(GQA, "float32")))
    mean = {}
    for dtype in DTYPES:
        sampler = engine_of(folders[GQA], dtype=dtype)
        for name, weight in sampler.model.state_dict().items():
            assert torch.equal(weight, weights[name].to(getattr(torch, dtype)))
        errors = []
        for rollout in sampler.generate(random_requests(12), Decoding(1.0, 16)):
            start, places = len(rollout.prompt_tokens) - 1, np.arange(len(rollout.tokens))
            logits_TV = whole_logits(sampler, GQA, (*rollout.prompt_tokens, *rollout.tokens[:-1]))[start:]
            logp_T = torch.from_numpy(logits_TV).log_softmax(-1).numpy()[places, list(rollout.tokens)]
            errors.append(np.abs(logp_T - rollout.logp_sampler_T))
        mean[dtype] = np.concatenate(errors).mean()
    assert mean["float64"] < mean["float32"] < 1e-5
    assert 4 < mean["bfloat16"] / mean["float16"] < 16
    assert 1e-4 < mean["float16"] < 0.1


@pytest.mark.parametrize("rule", ["full", "min_p"])
@pytest.mark.parametrize("cause", DIALS)
def test_disturbed_distributions_match_their_closed_form(engine: TransformersSampler, cause: str, rule: str) -> None:
    """log π'^mp and log Z' of (1 − η) softmax(z + s b + σ ε) + η/V and its safe set, to 1e-4 nats."""
    dial, threshold = DIALS[cause], -4.0
    requests = [replace(r, start=i % 3) for i, r in enumerate(random_requests(6, threshold=threshold))]
    for request, rollout in zip(requests, engine.generate(requests, Decoding(0.8, 12, rule, dial)), strict=True):
        start = len(request.prompt_tokens) - 1
        logits_TV = whole_logits(engine, GQA, (*request.prompt_tokens, *rollout.tokens))[start:] / 0.8
        bias = (dial.bias * normal([0], [0], V, "disturbance.bias")[0]).tolist()
        for place, token in enumerate(rollout.tokens):
            noise = dial.noise * normal([request.seed], [request.start + place], V, "disturbance.noise")[0]
            probs = disturbed(logits_TV[place].tolist(), bias, noise.tolist(), dial.floor)
            safe = safe_tokens(probs, rule, threshold)
            mass = math.fsum(p for p, kept in zip(probs, safe, strict=True) if kept)
            assert rollout.log_kept_sampler_T[place] == pytest.approx(math.log(mass), abs=1e-4)
            assert rollout.logp_sampler_T[place] == pytest.approx(math.log(probs[token] / mass), abs=1e-4)


# --- what is drawn -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "threshold"), [("full", 0.0), ("min_p", -2.0)])
def test_pairs_of_tokens_follow_the_policys_distribution(
    engine: TransformersSampler, rule: str, threshold: float
) -> None:
    """Two tokens in a row against the enumerated distribution of pairs: a false alarm once in 10⁴ seeds.

    Pairs that 6,000 draws meet fewer than ten times on average are counted as one.
    """
    count, prompt = 6000, random_requests(1)[0].prompt_tokens

    def probs_after(tokens: Sequence[int]) -> np.ndarray:
        probs = np.array(softmax(whole_logits(engine, GQA, tokens)[-1].tolist()))
        masked = probs * np.array(safe_tokens(probs.tolist(), rule, threshold))
        return masked / masked.sum()

    first_V = probs_after(prompt)
    expected: dict[tuple[int, ...], float] = {}
    for first in np.flatnonzero(first_V * count >= 10).tolist():
        if first in STOP_TOKENS:
            expected[first,] = count * first_V[first]
        else:
            second_V = count * first_V[first] * probs_after((*prompt, first))
            expected |= {(first, second): second_V[second] for second in np.flatnonzero(second_V >= 10).tolist()}
    requests = [Request(prompt, seed, threshold) for seed in range(count)]
    counts = dict.fromkeys(expected, 0)
    for rollout in engine.generate(requests, Decoding(1.0, 2, rule)):
        if rollout.tokens in counts:
            counts[rollout.tokens] += 1
    assert len(expected) >= 8
    observed, predicted = [*counts.values()], [*expected.values()]
    rest = count - sum(predicted)
    if rest > 1e-6:
        observed, predicted = [*observed, count - sum(observed)], [*predicted, rest]
    assert sum(observed) == count
    assert chisquare(observed, predicted).pvalue > 1e-4


def test_a_request_gives_the_same_response_in_any_batch(engine: TransformersSampler) -> None:
    requests, decoding = random_requests(140, threshold=-3.0), Decoding(1.0, 24, "min_p", DIALS["noise"])
    together = engine.generate(requests, decoding)
    close(together, engine.generate(requests[::-1], decoding)[::-1])
    close(together[:20], [engine.generate([request], decoding)[0] for request in requests[:20]])
    assert all(map(same_bits, together, engine.generate(requests, decoding))), "twice the same is the same to the bit"


def test_bfloat16_draws_from_the_same_noise(folders: dict[str, Path], engine: TransformersSampler) -> None:
    """Its first tokens are float32's where roundings do not decide, which at this size of logits is nearly always."""
    requests = random_requests(300)
    pairs = zip(
        engine.generate(requests, Decoding(1.0, 1)),
        engine_of(folders[GQA], dtype="bfloat16").generate(requests, Decoding(1.0, 1)),
        strict=True,
    )
    assert np.mean([left.tokens == right.tokens for left, right in pairs]) > 0.9


@pytest.mark.parametrize("dial", [Disturbance(), DIALS["all"]], ids=["undisturbed", "disturbed"])
def test_kept_logits_are_those_that_the_tokens_were_drawn_from(engine: TransformersSampler, dial: Disturbance) -> None:
    """At every third position, some responses continued; sequences end and leave while others go on."""
    requests = [replace(r, start=i % 3) for i, r in enumerate(random_requests(100, threshold=-3.0, seed=2))]
    decoding = Decoding(0.7, 24, "min_p", dial, keep_every=3)
    rollouts = engine.generate(requests, decoding)
    assert redrawn_from_kept_logits(requests, rollouts, decoding) > 200
    plain = engine.generate(requests, replace(decoding, keep_every=0))
    assert all(map(same_bits, plain, rollouts))
    assert not any(rollout.logits_sampler_KV for rollout in plain)


def test_its_cache_gives_what_the_librarys_gives(engine: TransformersSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    """`DynamicCache` concatenates where ours has room: the same states, laid out otherwise."""
    requests, decoding = random_requests(150, threshold=-3.0, seed=5), Decoding(1.0, 30, "min_p")
    ours = engine.generate(requests, decoding)
    monkeypatch.setattr(engine_module, "growing_cache", lambda layers=(): DynamicCache(list(layers)))
    close(ours, engine.generate(requests, decoding))


def test_a_continued_response_is_the_same(engine: TransformersSampler) -> None:
    """With `Request.start`, noise and limits follow positions in the whole response."""
    requests, decoding = random_requests(6), Decoding(1.0, 12, disturbance=DIALS["noise"])
    for request, whole in zip(requests, engine.generate(requests, decoding), strict=True):
        rests = [
            replace(request, prompt_tokens=(*request.prompt_tokens, *whole.tokens[:start]), start=start)
            for start in range(len(whole.tokens))
        ]
        for start, rest in enumerate(engine.generate(rests, decoding)):
            assert rest.tokens == whole.tokens[start:]


def test_a_verified_response_is_the_trainers_own(folders: dict[str, Path], tmp_path: Path) -> None:
    trainer = random_policy("llama", "float32")
    exact, requests = sampler_of(trainer, tmp_path), random_requests(40, threshold=-6.0)
    for dtype, least in (("float32", 0.999), ("bfloat16", 0.8)):
        proposer = engine_of(folders["llama"], "llama", dtype)
        sampler = VerifiedSampler(proposer, trainer, STOP_TOKENS, MAX_LENGTH)
        decoding = Decoding(1.0, 24, "min_p")
        assert all(map(same_bits, sampler.generate(requests, decoding), exact.generate(requests, decoding)))
        assert sampler.metrics()["verification/agreement"] > least

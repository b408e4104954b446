"""Speculative verification: the trainer's samples, to the bit, whatever proposes them.

The exact engine draws with the same noise, so that it says, token for token, what a verified response must be.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from cases_fixture import rest_long
from exact_fixture import MAX_LENGTH, STOP_TOKENS, V, random_policy, random_requests, same_bits, sampler_of
from scipy.stats import chisquare
from torch import Tensor
from transformers import PreTrainedModel

from tailrl.config.sampler import Disturbance
from tailrl.kernels.batch_invariant import pad_rows
from tailrl.kernels.exact_logprobs import Scoring, head_logits
from tailrl.kernels.packing import pack_batch
from tailrl.model.forward import head_weight, hidden_states
from tailrl.objective.noise import gumbel
from tailrl.objective.safe_set import safe_set
from tailrl.rollout import Decoding, Sampler, verified
from tailrl.rollout.exact import ExactSampler
from tailrl.rollout.types import Request, Rollout
from tailrl.rollout.verified import VerifiedSampler

DECODINGS = {
    "full": (Decoding(1.0, 24), 0.0),
    "min_p": (Decoding(0.8, 24, "min_p"), -3.0),
    "top_k": (Decoding(1.0, 24, "top_k"), 5.0),
}


@dataclass
class Nonsense:
    """Proposes random tokens, as many as it likes, end tokens among them."""

    seed: int = 0

    def generate(self, requests: Sequence[Request], decoding: Decoding) -> list[Rollout]:
        rng = np.random.default_rng(self.seed)
        self.seed += 1
        made = []
        for request in requests:
            length = int(rng.integers(1, decoding.max_new_tokens - request.start + 1))
            nothing = np.zeros(length, np.float32)
            tokens = tuple(rng.integers(0, V, length).tolist())
            made.append(Rollout(request.prompt_tokens, tokens, nothing, nothing, nothing.astype(np.int32), False))
        return made

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None: ...
    def release(self) -> None: ...
    def self_test(self, requests: Sequence[Request], decoding: Decoding) -> float:
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        return {}


@pytest.fixture(scope="module")
def trainer() -> PreTrainedModel:
    return random_policy("llama", "float32")


@pytest.fixture(scope="module")
def exact(trainer: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> ExactSampler:
    return sampler_of(trainer, tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def proposers(exact: ExactSampler, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sampler]:
    """The trainer itself, one a little and one far from it, and one that knows nothing."""
    made: dict[str, Sampler] = {"same": exact, "nonsense": Nonsense()}
    for name, scale in (("near", 0.02), ("far", 0.5)):
        other = random_policy("llama", "float32")
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter += scale * parameter.std() * torch.randn(parameter.shape, generator=generator)
        made[name] = sampler_of(other, tmp_path_factory.mktemp(name))
    return made


def verified_by(trainer: PreTrainedModel, proposer: Sampler) -> VerifiedSampler:
    return VerifiedSampler(proposer, trainer, STOP_TOKENS, MAX_LENGTH)


PROPOSERS = ("same", "near", "far", "nonsense")
CASES = [(proposer, name) for proposer in PROPOSERS for name in DECODINGS]
FAST = [case for case in CASES if case[0] in ("same", "nonsense") or case == ("near", "min_p")]


@pytest.mark.parametrize("case", rest_long(FAST, CASES, "-".join))
def test_a_response_is_the_trainers_with_any_proposer(
    trainer: PreTrainedModel, exact: ExactSampler, proposers: dict[str, Sampler], case: tuple[str, str]
) -> None:
    proposer, name = case
    decoding, threshold = DECODINGS[name]
    requests = random_requests(40, threshold=threshold)
    expected = exact.generate(requests, decoding)
    sampler = verified_by(trainer, proposers[proposer])
    found = sampler.generate(requests, decoding)
    assert all(same_bits(left, right) for left, right in zip(found, expected, strict=True))
    assert [rollout.stopped for rollout in found] == [rollout.stopped for rollout in expected]
    assert len({len(rollout.tokens) for rollout in found}) > 8, "responses of many lengths"
    metrics = sampler.metrics()
    if proposer == "same":
        assert (metrics["verification/rounds"], metrics["verification/agreement"]) == (1.0, 1.0)
        assert metrics["verification/proposed_per_kept"] == 1.0
    else:
        assert metrics["verification/rounds"] > 1
    if proposer == "near":
        assert 0.5 < metrics["verification/agreement"] < 1


def test_chunks_and_micro_batches_change_nothing(
    trainer: PreTrainedModel, exact: ExactSampler, proposers: dict[str, Sampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verified, "VERIFIED_TOKENS", 100)
    monkeypatch.setattr("tailrl.kernels.batch_invariant.CHUNK_LOGITS", 1)
    requests = random_requests(30, seed=3)
    found = verified_by(trainer, proposers["near"]).generate(requests, Decoding(1.0, 24))
    assert all(map(same_bits, found, exact.generate(requests, Decoding(1.0, 24))))


@torch.no_grad()
def next_probs(model: PreTrainedModel, prompt: Sequence[int], rule: str, threshold: float) -> Tensor:
    """π^mp of the next token, float64 [V], from the definition."""
    batch = pack_batch([prompt], [[0]])
    hidden_TH = hidden_states(model, batch.tokens_P, batch.packing)[batch.predict_T]
    logits_TV = head_logits(pad_rows(hidden_TH), head_weight(model), Scoring(rule), [0], [0])[:1].double()
    return logits_TV.masked_fill(~safe_set(logits_TV, rule, threshold), -torch.inf).softmax(-1)[0]


@pytest.mark.slow  # the exact engine's bits, which a response has by the test above, are tested in `test_exact.py`
@pytest.mark.parametrize("proposer", ["far", "nonsense"])
def test_it_samples_the_trainers_distribution(
    trainer: PreTrainedModel, proposers: dict[str, Sampler], proposer: str
) -> None:
    """Pairs of tokens against the enumerated π^mp(a) π^mp(b|a): the test fails a right sampler once in 10⁴ seeds."""
    prompt, draws = (5, 9, 17), 6000
    requests = [Request(prompt, seed, 4.0) for seed in range(draws)]
    found = verified_by(trainer, proposers[proposer]).generate(requests, Decoding(1.0, 2, "top_k"))
    first_V = next_probs(trainer, prompt, "top_k", 4.0)
    expected: dict[tuple[int, ...], float] = {}
    for a in first_V.nonzero().flatten().tolist():
        if a in STOP_TOKENS:
            expected[a,] = float(first_V[a])
            continue
        second_V = next_probs(trainer, (*prompt, a), "top_k", 4.0)
        expected |= {(a, b): float(first_V[a] * second_V[b]) for b in second_V.nonzero().flatten().tolist()}
    counts = dict.fromkeys(expected, 0)
    for rollout in found:
        counts[rollout.tokens] += 1
    # Cells that expect few draws share one.
    large = [cell for cell in expected if draws * expected[cell] >= 8]
    observed = [counts[cell] for cell in large] + [draws - sum(counts[cell] for cell in large)]
    wanted = [draws * expected[cell] for cell in large] + [draws * (1 - sum(expected[cell] for cell in large))]
    keep = [i for i, w in enumerate(wanted) if w > 1e-9]
    assert len(keep) > 5
    assert chisquare([observed[i] for i in keep], [wanted[i] for i in keep]).pvalue > 1e-4


def test_the_proposers_own_disturbance_is_not_the_trainers(trainer: PreTrainedModel, exact: ExactSampler) -> None:
    requests = random_requests(20, seed=5)
    noisy = Decoding(1.0, 16, disturbance=Disturbance(noise=1.0))
    found = verified_by(trainer, exact).generate(requests, noisy)
    assert all(map(same_bits, found, exact.generate(requests, Decoding(1.0, 16))))
    shared = replace(noisy, disturbance=Disturbance(noise=1.0, side="both"))
    found = verified_by(trainer, exact).generate(requests, shared)
    assert all(map(same_bits, found, exact.generate(requests, shared)))


def test_a_continued_response_is_the_same(exact: ExactSampler) -> None:
    """With `Request.start`, noise and limits follow positions in the whole response."""
    requests, rests, expected = random_requests(10), [], []
    for request, whole in zip(requests, exact.generate(requests, Decoding(1.0, 12)), strict=True):
        for start in range(len(whole.tokens)):
            tokens = (*request.prompt_tokens, *whole.tokens[:start])
            rests.append(replace(request, prompt_tokens=tokens, start=start))
            expected.append(whole.tokens[start:])
    assert [rollout.tokens for rollout in exact.generate(rests, Decoding(1.0, 12))] == expected


def test_shared_noise_agrees_as_often_as_the_bound_says() -> None:
    """P(draws differ) ≤ 2 d / (1 + d) at a total variation distance of d; within 4 standard errors of 4,000 draws."""
    rng = np.random.default_rng(0)
    draws = 4000
    noise_TV = gumbel(range(draws), [0] * draws, 30)
    for sigma in (0.01, 0.1, 0.5, 2.0):
        logits_V = torch.from_numpy(rng.normal(0, 2, 30))
        other_V = logits_V + sigma * torch.from_numpy(rng.standard_normal(30))
        distance = float((logits_V.softmax(0) - other_V.softmax(0)).abs().sum() / 2)
        differ_T = (logits_V + noise_TV).argmax(-1) != (other_V + noise_TV).argmax(-1)
        bound = 2 * distance / (1 + distance)
        assert 0 < differ_T.double().mean() <= bound + 4 * (bound * (1 - bound) / draws) ** 0.5

"""Score centering against expectations that are written out over a whole vocabulary, by automatic differentiation."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tailrl.config.arm import Arm, Correction
from tailrl.config.rejection import Rejection
from tailrl.config.vocabulary import Vocabulary
from tailrl.objective.centering import expected_score
from tailrl.objective.loss import surrogate
from tailrl.objective.safe_set import safe_set, token_logprobs
from tailrl.probes.gradients.enumeration import random_model, sampler_logits
from tailrl.probes.gradients.quality import response_terms
from tailrl.runtime.errors import StudyError

STATES, V = 6, 9
generator = torch.Generator().manual_seed(2)
TRAIN = 1.5 * torch.randn(STATES, V, dtype=torch.float64, generator=generator)
INFER = TRAIN + 0.6 * torch.randn(STATES, V, dtype=torch.float64, generator=generator)
TOKENS = [
    Correction(centering="full"),
    Correction(centering="full", token="tis", token_threshold=1.3),
    Correction(centering="full", token="mask", token_threshold=1.5),
    Correction(centering="full", token="tis", token_threshold=2.0, token_lower=0.7),
    Correction(centering="full", token="is"),
]


def weight(ratio: float, correction: Correction) -> float:
    most, lower = correction.token_threshold, correction.token_lower
    if correction.token == "tis":
        return max(lower or 0.0, min(ratio, most))
    if correction.token == "mask":
        return ratio if (lower or 1 / most) <= ratio <= most else 0.0
    return ratio if correction.token == "is" else 1.0


def gradient(logits: Tensor, logq: Tensor, correction: Correction, safe: Tensor | None = None) -> Tensor:
    given = logits.clone().requires_grad_()
    masked = given if safe is None else given.masked_fill(~safe, -torch.inf)
    (found,) = torch.autograd.grad(expected_score(masked.log_softmax(-1), logq, correction).sum(), given)
    return found


def expectation(logits: Tensor, q: Tensor, correction: Correction) -> Tensor:
    """E_q[w ∇ log p], one token at a time."""
    total = torch.zeros_like(logits)
    for s in range(len(logits)):
        p = logits[s].softmax(-1)
        for v in range(V):
            if q[s, v] > 0:
                score = torch.nn.functional.one_hot(torch.tensor(v), V) - p
                total[s] += q[s, v] * weight((p[v] / q[s, v]).item(), correction) * score
    return total


@pytest.mark.parametrize("correction", TOKENS, ids=lambda c: f"{c.token}-{c.token_lower}")
def test_the_exact_form_is_the_expected_gradient(correction: Correction) -> None:
    found = gradient(TRAIN, INFER.log_softmax(-1), correction)
    torch.testing.assert_close(found, expectation(TRAIN, INFER.softmax(-1), correction), rtol=0, atol=1e-12)
    if correction.token == "is":
        assert found.abs().max() < 1e-12, "Σ_v p_v ∇ log p_v is 0"


@pytest.mark.parametrize("k", [1, 3, V - 1])
@pytest.mark.parametrize("correction", TOKENS, ids=lambda c: f"{c.token}-{c.token_lower}")
def test_the_top_k_form_is_the_expectation_under_a_tail_like_the_trainers(correction: Correction, k: int) -> None:
    """The same expectation, under the distribution that the form models: q on the head, ρ p elsewhere."""
    q, p = INFER.softmax(-1), TRAIN.softmax(-1)
    head = torch.zeros_like(q, dtype=torch.bool).scatter_(-1, q.topk(k).indices, True)
    rho = (1 - (q * head).sum(-1, keepdim=True)) / (1 - (p * head).sum(-1, keepdim=True))
    modelled = torch.where(head, q, rho * p)
    top = correction.model_copy(update={"centering": "top_k", "centering_k": k})
    found = gradient(TRAIN, q.log(), top)
    torch.testing.assert_close(found, expectation(TRAIN, modelled, correction), rtol=0, atol=1e-12)


def test_the_top_k_form_of_all_tokens_is_exact() -> None:
    for correction in TOKENS:
        top = correction.model_copy(update={"centering": "top_k", "centering_k": V})
        logq = INFER.log_softmax(-1)
        torch.testing.assert_close(gradient(TRAIN, logq, top), gradient(TRAIN, logq, correction), rtol=0, atol=1e-9)


def test_pruned_distributions_are_centred_on_what_they_share() -> None:
    """Tokens outside the trainer's set send no gradient, those outside the sampler's are never drawn."""
    train, infer = safe_set(TRAIN, "min_p", -2.0), safe_set(INFER, "top_k", 3)
    assert (train & ~infer).any() and (infer & ~train).any()
    correction = TOKENS[1]
    logq = INFER.masked_fill(~infer, -torch.inf).log_softmax(-1)
    found = gradient(TRAIN, logq, correction, train)
    pruned, q = TRAIN.masked_fill(~train, -torch.inf), logq.exp() * train
    torch.testing.assert_close(found, expectation(pruned, q, correction), rtol=0, atol=1e-12)
    assert (found[~train] == 0).all()


@pytest.mark.parametrize("correction", TOKENS[:4], ids=lambda c: f"{c.token}-{c.token_lower}")
def test_the_drift_of_an_equal_advantage_is_gone(correction: Correction) -> None:
    """With A = 1 everywhere the mean gradient is all drift: 0 with centering, and not without."""
    logits = TRAIN.repeat_interleave(V, 0).requires_grad_()
    infer, tokens = INFER.repeat_interleave(V, 0), torch.arange(V).repeat(STATES)
    logq = infer.log_softmax(-1)
    chance = logq.exp().gather(-1, tokens[:, None]).squeeze(-1).detach()
    means = []
    for centred in (True, False):
        own = correction if centred else correction.model_copy(update={"centering": "none"})
        expected = expected_score(logits.log_softmax(-1), logq, own) if centred else None
        # Each draw by its chance: the advantage is the weight of the sum.
        loss = surrogate(
            token_logprobs(logits, tokens, "full"),
            logq.gather(-1, tokens[:, None]).squeeze(-1),
            chance,
            torch.arange(len(tokens)),
            len(tokens),
            1,
            own,
            None,
            expected_T=expected,
        ).loss
        (slope,) = torch.autograd.grad(loss, logits)
        means.append(slope.view(STATES, V, V).sum(1))
    assert means[0].abs().max() < 1e-12 and means[1].abs().max() > 1e-2


# --- whole responses, all of them ----------------------------------------------------------------------

PRUNED: dict[str, Any] = {"rule": "min_p", "rho": "e-1.5"}


def drift(correction: Correction, vocabulary: dict[str, Any], length: int) -> float:
    """The norm of the expected gradient over every response there is, each with A = 1: what centering is to remove."""
    model = random_model(5, length, 2, seed=0)
    sampler_SV = sampler_logits(model.logits_SV, "noise", 0.7, 0)
    rewarded = replace(model, reward_KN=torch.ones_like(model.reward_KN))
    arm = Arm(vocabulary=Vocabulary(**vocabulary)).model_copy(update={"correction": correction})
    terms = response_terms(rewarded, sampler_SV, arm)
    by_state = torch.zeros(terms.states, 5, dtype=torch.float64)
    weighted = (terms.term_KNTV * terms.chance_KN[..., None, None]).flatten(0, 2)
    return by_state.index_add(0, terms.state_KNT.flatten(), weighted).norm().item()


def beside(**settings: Any) -> Correction:
    """Centering beside settings that may be refused beside it."""
    return Correction().model_copy(update={"centering": "full", **settings})


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("vocabulary", [{}, PRUNED, {**PRUNED, "side": "replay"}], ids=["full", "min_p", "replay"])
@pytest.mark.parametrize(
    "weights",
    [{}, {"token": "tis", "token_threshold": 1.2}, {"token": "mask", "token_threshold": 1.2, "token_lower": 0.0}],
    ids=["none", "tis", "mask"],
)
def test_centering_removes_the_drift_of_whole_responses(
    weights: dict[str, Any], vocabulary: dict[str, Any], length: int
) -> None:
    """Beside a pruned vocabulary too: a sampled token outside the trainer's set is dropped alone."""
    assert drift(Correction.model_validate({"centering": "full", **weights}), vocabulary, length) < 1e-12
    assert drift(Correction.model_validate(weights), vocabulary, length) > 1e-2


@pytest.mark.parametrize(
    "settings",
    [
        {"veto": 0.5},
        {"veto_above": 2.0},
        {"sequence": "geometric", "sequence_threshold": 1.2},
        {"sequence": "reject_k3", "sequence_threshold": 0.05},
        {"sequence": "mis"},
        {"reject": (Rejection(of="k3", by="mean", above=0.05),)},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_beside_what_drops_whole_responses_a_drift_stays(settings: dict[str, Any]) -> None:
    """So settings refuse it: centering knows a token's own chance, and not that of the tokens after it."""
    assert drift(beside(**settings), {}, 3) > 1e-2
    plain = {name: [rule.model_dump() for rule in v] if name == "reject" else v for name, v in settings.items()}
    with pytest.raises(ValueError, match="a drift would stay"):
        Correction.model_validate({"centering": "full", **plain})


def test_centering_without_the_samplers_distribution_is_refused() -> None:
    tokens = torch.arange(STATES)
    own = (-torch.ones(STATES), torch.ones(STATES), tokens, STATES, 1)
    with pytest.raises(StudyError, match=r"^correction\.centering needs the sampler's whole distribution"):
        surrogate(token_logprobs(TRAIN.float(), tokens, "full"), *own, Correction(centering="full"), None)


def test_a_token_far_below_the_trainers_keeps_its_share_of_the_expectation() -> None:
    """q w = p for the weight e^Δ, although q is 0 and e^Δ infinite in float32; what is never drawn has no share."""
    logits = torch.tensor([[0.0, 0.5, -1.0]])
    logq = torch.tensor([[-120.0, 0.0, -torch.inf]])
    expected = expected_score(logits.log_softmax(-1), logq, Correction(centering="full", token="is"))
    p = logits.double().softmax(-1)[0]
    log_p = logits.double().log_softmax(-1)[0]
    assert expected.item() == pytest.approx((p[0] * log_p[0] + p[1] * log_p[1]).item(), rel=1e-6)

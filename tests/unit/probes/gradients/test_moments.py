"""Mean and variance of a step's gradient against brute force over every step there is, and against drawn steps."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from cases_fixture import rest_long
from numpy.typing import NDArray

from tailrl.config.arm import Arm
from tailrl.objective.advantages import ESTIMATORS
from tailrl.objective.centering import expected_score
from tailrl.objective.loss import surrogate
from tailrl.objective.safe_set import safe_set, token_logprobs
from tailrl.probes.gradients.enumeration import SequenceModel, constrained, random_model, sampler_logits
from tailrl.probes.gradients.moments import draw_steps, magnitude_table, magnitudes, mean_and_variance
from tailrl.probes.gradients.quality import response_terms

ARMS: dict[str, dict[str, Any]] = {
    "naive": {},
    "is": {"correction": {"sequence": "is"}},
    "dvp_mis": {"vocabulary": {"rule": "min_p", "rho": "e-2"}, "correction": {"sequence": "mis", "veto": 0.1}},
    "dvp_fill": {"vocabulary": {"rule": "min_p", "rho": "e-2", "outside": "paper_fill"}},
    "token_tis": {"correction": {"token": "tis", "token_threshold": 1.1}},
    "sampler": {"vocabulary": {"rule": "top_k", "k": 2, "side": "sampler"}, "deliberate": True},
    "bypass": {"clip": {"ratio": "bypass", "low": 0.1, "high": 0.1}},
    "decoupled": {"clip": {"ratio": "decoupled"}},
    "opsm": {"correction": {"reject": [{"of": "k1", "by": "mean", "above": 0.05, "when": "negative"}]}},
    "dppo": {"correction": {"token": "is", "reject": [{"of": "tv", "by": "token", "above": 0.05, "when": "outward"}]}},
    "centred": {"correction": {"centering": "full", "token": "tis", "token_threshold": 1.1}},
    "centred_top": {"correction": {"centering": "top_k", "centering_k": 1}},
    "replay": {"vocabulary": {"rule": "top_k", "k": 2, "side": "replay"}, "correction": {"centering": "full"}},
    **{loss: {"clip": {"ratio": "bypass", "low": 0.1, "high": 0.1, "loss": loss}} for loss in ("gspo", "cispo")},
    **{loss: {"clip": {"ratio": "bypass", "loss": loss}} for loss in ("sapo", "vespo")},
}


def tiny(prompts: int, length: int) -> tuple[SequenceModel, torch.Tensor]:
    """A model of three tokens, and a sampler's logits."""
    model = random_model(3, length, prompts, seed=11)
    return model, sampler_logits(model.logits_SV, "noise", 0.6, 1)


def step_gradients(
    model: SequenceModel, sampler_SV: torch.Tensor, arm: Arm, prompts: int, group: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Probability and −gradient of the loss of every step, each through the loss as training calls it.

    Advantages come from the estimator on the step's own rewards; nothing is known of their signs or of independence.
    """
    count, length = len(model.tokens_NT), model.tokens_NT.shape[1]
    threshold, vocabulary = arm.vocabulary.threshold(3), arm.vocabulary
    logq_SV = constrained(sampler_SV, "full" if vocabulary.side == "trainer" else vocabulary.rule, threshold)
    logp_infer = model.gather(logq_SV)
    rule = "full" if vocabulary.side == "sampler" else vocabulary.rule
    safe_SV = safe_set(sampler_SV if vocabulary.side == "replay" else model.logits_SV, rule, threshold)
    prompt_B = [k for k in range(prompts) for _ in range(group)]
    found, probability = [], []
    for drawn in itertools.product(range(count), repeat=prompts * group):
        chosen = list(zip(prompt_B, drawn, strict=True))
        chance = math.prod(math.exp(logp_infer[k, y].sum()) for k, y in chosen)
        if chance == 0:
            continue
        logits = model.logits_SV.clone().requires_grad_()
        rows = torch.cat([model.state_KNT[k, y] for k, y in chosen])
        tokens = torch.cat([model.tokens_NT[y] for _, y in chosen])
        rewards = torch.tensor([model.reward_KN[k, y] for k, y in chosen]).double().view(prompts, group)
        advantage = ESTIMATORS[arm.estimator](rewards).flatten().repeat_interleave(length)
        fill = vocabulary.outside == "paper_fill"
        logprobs = token_logprobs(logits[rows], tokens, rule, threshold, fill, safe_SV[rows])
        expected = None
        if arm.correction.centering != "none":
            logp = logits[rows].masked_fill(~safe_SV[rows], -torch.inf).log_softmax(-1)
            expected = expected_score(logp, logq_SV[rows], arm.correction)
        part = surrogate(
            logprobs,
            torch.cat([logp_infer[k, y] for k, y in chosen]),
            advantage,
            torch.arange(len(chosen)).repeat_interleave(length),
            len(chosen),
            len(chosen),
            arm.correction,
            arm.clip,
            expected_T=expected,
        )
        found.append(-torch.autograd.grad(part.loss, logits)[0].numpy())
        probability.append(chance)
    return np.array(probability), np.array(found)


CASES = [(name, *sizes) for name in ARMS for sizes in ((1, 2, 2), (2, 1, 2))]
FAST = [case for case in CASES if case[1] == 1 or case[0] in ("dvp_mis", "gspo")]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("case", rest_long(FAST, CASES, lambda case: "-".join(map(str, case))))
def test_every_step_there_is(case: tuple[str, int, int, int], estimator: str) -> None:
    name, prompts, length, group = case
    arm = Arm(estimator=estimator, **ARMS[name])
    model, sampler_SV = tiny(prompts, length)
    probability, gradients = step_gradients(model, sampler_SV, arm, prompts, group)
    assert probability.sum() == pytest.approx(1, abs=1e-12)
    expected = np.tensordot(probability, gradients, 1)
    variance = probability @ np.square(gradients - expected).sum((1, 2))
    mean_SV, found = mean_and_variance(response_terms(model, sampler_SV, arm), estimator, group)
    assert variance > 1e-3
    np.testing.assert_allclose(mean_SV, expected, atol=1e-12)
    assert found == pytest.approx(variance, rel=1e-9)


def test_rloo_is_a_covariance() -> None:
    """A group's RLOO gradient is the sample covariance of reward and term, whose mean and variance are textbook."""
    group = 5
    model, sampler_SV = tiny(prompts=1, length=2)
    terms = response_terms(model, sampler_SV, Arm(correction={"token": "mask", "token_threshold": 1.5}))
    chance, right = terms.chance_KN[0].numpy(), terms.right_KN[0].numpy()
    # The term of an advantage of 1: for a wrong response it was taken at −1.
    y = np.zeros((len(chance), len(model.logits_SV), 3))
    for n, t in np.ndindex(*model.tokens_NT.shape):
        y[n, model.state_KNT[0, n, t]] += (2 * right[n] - 1) * terms.term_KNTV[0, n, t].numpy()
    x = right - chance @ right
    y -= np.tensordot(chance, y, 1)
    covariance = np.tensordot(chance * x, y, 1)
    fourth = np.tensordot(chance * x**2, y**2, 1)
    spread = (chance @ x**2) * np.tensordot(chance, y**2, 1)
    expected = (fourth - (group - 2) / (group - 1) * covariance**2 + spread / (group - 1)) / group
    mean_SV, variance = mean_and_variance(terms, "rloo", group)
    np.testing.assert_allclose(mean_SV, covariance, atol=1e-13)
    assert variance == pytest.approx(expected.sum(), rel=1e-10)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_moments_of_an_advantage(estimator: str) -> None:
    """Over all 64 ways in which two groups of three can be right or wrong."""
    success, group = np.array([0.3, 0.8]), 3
    ways = np.array(list(itertools.product((0.0, 1.0), repeat=6))).reshape(-1, 2, group)
    chance = np.where(ways == 1, success[:, None], 1 - success[:, None]).prod((1, 2))
    sizes = np.array([ESTIMATORS[estimator](torch.from_numpy(way)).abs().numpy() for way in ways])
    found = magnitudes(estimator, success, group)
    for k, r in itertools.product((0, 1), repeat=2):
        given = chance * (ways[:, k, 0] == r)
        given /= given.sum()
        assert found.first_KR[k, r] == pytest.approx(given @ sizes[:, k, 0], rel=1e-12)
        assert found.second_KR[k, r] == pytest.approx(given @ sizes[:, k, 0] ** 2, rel=1e-12)
        for other, s in itertools.product((0, 1), repeat=2):
            both = chance * (ways[:, k, 0] == r) * (ways[:, other, 1] == s)
            both /= both.sum()
            expected = both @ (sizes[:, k, 0] * sizes[:, other, 1])
            assert found.pair_KRKR[k, r, other, s] == pytest.approx(expected, rel=1e-12)


def test_an_advantage_without_its_rewards_sign_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ESTIMATORS, "turned", lambda rewards: -rewards)
    with pytest.raises(ValueError, match="turned: an advantage has another sign"):
        magnitude_table("turned", 4)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("name", ["is", "dvp_mis", "bypass"])
def test_drawn_steps_have_the_exact_mean_and_variance(name: str, estimator: str) -> None:
    """Each coordinate's mean within 5 standard errors (a coordinate fails by chance once in 1.7 million), and the
    mean square within 5 of its own."""
    arm, draws, group = Arm(estimator=estimator, **ARMS[name]), 20000, 4
    model, sampler_SV = tiny(prompts=2, length=2)
    terms = response_terms(model, sampler_SV, arm)
    drawn = draw_steps(terms, estimator, group, draws, torch.Generator().manual_seed(0)).numpy()
    mean_SV, variance = mean_and_variance(terms, estimator, group)
    error = drawn.std(0, ddof=1) / math.sqrt(draws)
    assert (np.abs(drawn.mean(0) - mean_SV.numpy()) <= 5 * error + 1e-12).all()
    squares = np.square(drawn - mean_SV.numpy()).sum((1, 2))
    assert abs(squares.mean() - variance) < 5 * squares.std(ddof=1) / math.sqrt(draws)


def test_what_the_sampler_cannot_draw_is_never_drawn() -> None:
    arm = Arm(vocabulary={"rule": "top_k", "k": 1})
    model, sampler_SV = tiny(prompts=2, length=2)
    terms = response_terms(model, sampler_SV, arm)
    assert ((terms.chance_KN > 0).sum(-1) == 1).all()
    drawn = draw_steps(terms, "rloo", 3, 50, torch.Generator().manual_seed(1))
    assert not drawn.any(), "one response alone has no advantage over the others"

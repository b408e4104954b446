"""KL to a reference policy: gradients against a float64 oracle of explicit sums, and which estimators are biased."""

import math

import pytest
import torch
from torch import Tensor

from tailrl.config.arm import Arm
from tailrl.config.load import parse_study
from tailrl.config.reference_kl import ReferenceKL
from tailrl.objective.reference_kl import ESTIMATES, kl_loss, reward_penalty, token_kl
from tailrl.runtime.errors import StudyError

V = 6
GENERATOR = torch.Generator().manual_seed(3)
LOGITS = torch.randn(V, generator=GENERATOR, dtype=torch.float64)
REFERENCE = torch.randn(V, generator=GENERATOR, dtype=torch.float64).log_softmax(-1)
INSIDE = torch.zeros(V, dtype=torch.bool)


def of_kl(logits_V: Tensor, reverse: bool) -> Tensor:
    """The exact gradient of KL(π ‖ π_ref), or of KL(π_ref ‖ π), by its sum over all tokens."""
    logits_V = logits_V.clone().requires_grad_()
    logp_V = logits_V.log_softmax(-1)
    kl = (logp_V.exp() * (logp_V - REFERENCE)).sum() if reverse else (REFERENCE.exp() * (REFERENCE - logp_V)).sum()
    return torch.autograd.grad(kl, logits_V)[0]


def expected_in_loss(estimator: str) -> Tensor:
    """E_π of the gradient that each token's term sends: each token once, weighted by its probability."""
    total = torch.zeros(V, dtype=torch.float64)
    for token in range(V):
        logits_V = LOGITS.clone().requires_grad_()
        logp_T = logits_V.log_softmax(-1)[[token]]
        loss = kl_loss(ReferenceKL(coefficient=2, estimator=estimator), logp_T, REFERENCE[[token]], INSIDE[:1], 4)
        total += logp_T.detach().exp() * torch.autograd.grad(loss, logits_V)[0] * 4 / 2
    return total


def expected_in_reward(estimator: str) -> Tensor:
    """E_π of (penalty of a response) × ∇ log π, for responses of one token."""
    total = torch.zeros(V, dtype=torch.float64)
    settings = ReferenceKL(coefficient=1, estimator=estimator, where="reward")
    for token in range(V):
        logits_V = LOGITS.clone().requires_grad_()
        logp_T = logits_V.log_softmax(-1)[[token]]
        at = (logp_T, REFERENCE[[token]], INSIDE[:1])
        penalty = reward_penalty(settings, *at, torch.zeros(1, dtype=torch.int64), 1)
        total += logp_T.detach().exp() * penalty * torch.autograd.grad(logp_T.sum(), logits_V)[0]
    return total


def test_the_estimates_are_their_definitions_and_their_means_are_the_divergence() -> None:
    logp_V = LOGITS.log_softmax(-1)
    for name in ESTIMATES:
        found_T = token_kl(name, logp_V, REFERENCE, INSIDE)
        for own, ref, found in zip(logp_V.tolist(), REFERENCE.tolist(), found_T.tolist(), strict=True):
            log_r = ref - own
            wanted = {"k1": -log_r, "k2": log_r**2 / 2, "k3": math.exp(log_r) - 1 - log_r}[name]
            assert found == pytest.approx(wanted, abs=1e-12)
    divergence = (logp_V.exp() * (logp_V - REFERENCE)).sum()
    for name in ("k1", "k3"):
        torch.testing.assert_close((logp_V.exp() * token_kl(name, logp_V, REFERENCE, INSIDE)).sum(), divergence)


def test_expected_gradients_in_the_loss() -> None:
    """k1: none. k2: of KL(π ‖ π_ref). k3: of KL(π_ref ‖ π)."""
    torch.testing.assert_close(expected_in_loss("k1"), torch.zeros(V, dtype=torch.float64), rtol=0, atol=1e-14)
    torch.testing.assert_close(expected_in_loss("k2"), of_kl(LOGITS, reverse=True))
    torch.testing.assert_close(expected_in_loss("k3"), of_kl(LOGITS, reverse=False))
    assert (of_kl(LOGITS, reverse=True) - of_kl(LOGITS, reverse=False)).abs().max() > 0.1


def test_expected_gradients_in_the_reward() -> None:
    torch.testing.assert_close(expected_in_reward("k1"), of_kl(LOGITS, reverse=True))
    both = of_kl(LOGITS, reverse=True) - of_kl(LOGITS, reverse=False)
    torch.testing.assert_close(expected_in_reward("k3"), both)
    assert (expected_in_reward("k2") - of_kl(LOGITS, reverse=True)).abs().max() > 0.1


def test_a_response_gets_its_own_sum_and_an_outside_token_nothing() -> None:
    logp_T, ref_T = torch.tensor([-1.0, -2.0, 0.0, -0.5]), torch.tensor([-1.5, -1.0, -30.0, -1.0])
    outside_T, sequence_T = torch.tensor([False, False, True, False]), torch.tensor([0, 0, 0, 2])
    settings = ReferenceKL(coefficient=0.1, estimator="k1", where="reward")
    found = reward_penalty(settings, logp_T, ref_T, outside_T, sequence_T, 3)
    torch.testing.assert_close(found, torch.tensor([0.1 * (0.5 - 1.0), 0.0, 0.05]))
    logp_T.requires_grad_()
    kl_loss(ReferenceKL(), logp_T, ref_T, outside_T, 1).backward()
    assert logp_T.grad is not None and logp_T.grad[2] == 0 and (logp_T.grad[[0, 1, 3]] != 0).all()


@pytest.mark.parametrize(("estimator", "where"), [(name, place) for name in ESTIMATES for place in ("loss", "reward")])
def test_an_estimator_without_the_divergences_gradient_is_refused(estimator: str, where: str) -> None:
    arm = {"reference_kl": {"estimator": estimator, "where": where}}
    if (estimator, where) in (("k2", "loss"), ("k3", "loss"), ("k1", "reward")):
        assert Arm.model_validate(arm).reference_kl == ReferenceKL(estimator=estimator, where=where)
        return
    with pytest.raises(ValueError, match=rf"reference_kl: .*{estimator} in the {where}"):
        Arm.model_validate(arm)
    assert Arm.model_validate({**arm, "deliberate": True}).reference_kl is not None


@pytest.mark.parametrize(
    ("arm", "training", "words"),
    [
        ({}, {"loss_mean": "kept"}, r"training\.loss_mean: kept rescales the whole gradient"),
        ({"correction": {"token": "tis", "normalise": True}}, {}, r"correction\.normalise rescales the whole gradient"),
    ],
)
def test_what_would_rescale_the_penalty_is_refused(
    arm: dict[str, object], training: dict[str, str], words: str
) -> None:
    study = {"name": "s", "training": training}
    with pytest.raises(StudyError, match=words):
        parse_study({**study, "arms": {"a": {**arm, "reference_kl": {}}}})
    parse_study({**study, "arms": {"a": {**arm, "reference_kl": {"estimator": "k1", "where": "reward"}}}})

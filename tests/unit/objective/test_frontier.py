"""Remedies that are made of others, or of one term more: each against its definition in float64."""

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from tailrl.config.arm import Arm, Clip, Correction
from tailrl.config.load import parse_study
from tailrl.objective.corrections import correct, sequence_weight
from tailrl.objective.loss import surrogate
from tailrl.objective.safe_set import TokenLogprobs
from tailrl.runtime.errors import StudyError

rng = np.random.default_rng(8)
INFER = np.log(rng.uniform(0.02, 0.95, 40))
TRAIN = np.minimum(INFER + rng.normal(0, 0.6, 40), -0.001)
ADVANTAGE = rng.normal(size=40)
ADVANTAGE[7] = 0.0


def found_loss(
    correction: Correction, clip: Clip | None = None, outside: int | None = None
) -> tuple[float, list[float]]:
    """The loss of 40 responses of one token, and its gradient."""
    logp = torch.tensor(TRAIN, requires_grad=True)
    zero, sequence = torch.zeros(40, dtype=torch.float64), torch.arange(40)
    outside_T = torch.zeros(40, dtype=torch.bool)
    if outside is not None:
        outside_T[outside] = True
    scored = TokenLogprobs(logp, logp.detach(), zero, sequence, zero, outside_T)
    loss = surrogate(scored, torch.tensor(INFER), torch.tensor(ADVANTAGE), sequence, 40, 40, correction, clip).loss
    return loss.item(), torch.autograd.grad(loss, logp)[0].tolist()


@pytest.mark.parametrize("clip", [None, Clip(ratio="bypass", loss="free")])
def test_ipo_is_the_ratio_where_probabilities_are_near_and_a_pull_everywhere(clip: Clip | None) -> None:
    """r A 1[|p − q| ≤ ε] + τ (log r)²: value with the ratio's own loss, and gradient with both."""
    epsilon, tau = 0.1, 0.05
    rule = ({"of": "abs_tv", "by": "token", "above": epsilon, "ratio": "r_rollout"},)
    settings = {"reject": rule, "log_ratio_penalty": tau} | ({"token": "is"} if clip is None else {})
    value, gradient = found_loss(Correction.model_validate(settings), clip)
    wanted_value, wanted = 0.0, []
    for p, q, a in zip(TRAIN, INFER, ADVANTAGE, strict=True):
        r, near = math.exp(p - q), abs(math.exp(p) - math.exp(q)) <= epsilon
        wanted_value += (-near * r * a + tau * (p - q) ** 2) / 40
        wanted.append((-near * r * a + 2 * tau * (p - q)) / 40)
    assert gradient == pytest.approx(wanted, rel=1e-12)
    assert 5 < sum(abs(math.exp(p) - math.exp(q)) > epsilon for p, q in zip(TRAIN, INFER, strict=True)) < 35
    if clip is not None:
        assert value == pytest.approx(wanted_value, rel=1e-12)
    assert gradient[7] == pytest.approx(2 * tau * (TRAIN[7] - INFER[7]) / 40)  # without an advantage too


def test_a_token_outside_the_trainers_set_is_not_pulled() -> None:
    assert found_loss(Correction(log_ratio_penalty=1.0), outside=3)[1][3] == found_loss(Correction(), outside=3)[1][3]


@pytest.mark.parametrize(
    ("arm", "words"),
    [
        ({"correction": {"token": "tis", "normalise": True, "log_ratio_penalty": 1e-3}}, "normalise rescales"),
        (
            {"correction": {"reject": [{"of": "k2", "by": "batch", "above": 0.02, "ratio": "r_ppo"}]}},
            "by: batch judges an update's tokens before it",
        ),
        ({"correction": {"centering": "full", "log_ratio_penalty": 1e-3}}, "log_ratio_penalty pulls the policy"),
        (
            {"correction": {"log_ratio_penalty": 1e-3}, "training": {"loss_mean": "kept"}},
            "training.loss_mean: kept rescales the whole gradient",
        ),
        ({"clip": {"ratio": "bypass", "proximal": "loglinear"}}, "proximal: loglinear stands for π_train_old"),
        ({"clip": {"ratio": "recompute", "proximal": "loglinear"}}, "clip.proximal: loglinear gives the sampler's own"),
        (
            {"clip": {"ratio": "decoupled", "proximal": "loglinear"}, "correction": {"token": "tis"}},
            "clip.ratio: decoupled already divides by the sampler's probability",
        ),
        ({"correction": {"token": "tis", "sequence": "geometric_tis"}}, "both weigh by the ratio"),
        ({"sampler": {"quantized_trainer": True}}, "quantized_trainer needs an engine of few bits"),
        (
            {"sampler": {"quantization": "int8", "verify": True, "quantized_trainer": True}},
            "verify samples the trainer's own policy",
        ),
    ],
)
def test_what_counts_twice_is_refused(arm: dict[str, object], words: str) -> None:
    with pytest.raises(StudyError) as caught:
        parse_study({"name": "s", "arms": {"a": arm}})
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["geometric_tis", "geometric_mis"])
def test_weights_of_a_response_by_a_mean(name: str) -> None:
    """AReaL's, ROLL's and ms-swift's geometric means, one response at a time."""
    lengths = [3, 1, 5, 0, 2]
    sequence = torch.tensor([n for n, length in enumerate(lengths) for _ in range(length)])
    delta = torch.tensor(rng.normal(0, 0.8, len(sequence)))
    for threshold in (0.7, 1.3, 100.0):
        wanted = []
        for n in range(len(lengths)):
            own = delta[sequence == n].tolist()
            mean = math.exp(math.fsum(own) / max(len(own), 1))
            wanted.append(0.0 if name.endswith("mis") and mean > threshold else min(mean, threshold))
        weight, rejected = sequence_weight(name)(delta, sequence, len(lengths), threshold)
        assert weight.tolist() == pytest.approx(wanted, rel=1e-12)
        assert rejected.tolist() == [w == 0 for w in wanted]
    inside = torch.zeros_like(sequence, dtype=torch.bool)
    found = correct(
        delta, inside, sequence, len(lengths), Correction.model_validate({"sequence": name, "sequence_threshold": 1.0})
    )
    above = [w > 1 for w in sequence_weight(name)(delta, sequence, len(lengths), math.inf)[0][sequence].tolist()]
    assert found.truncated_T.tolist() == (above if name.endswith("tis") else [False] * len(sequence))
    assert any(above) and not all(above)


def test_obrs_is_token_tis_in_expectation() -> None:
    """Jackpot (arXiv 2602.06107) keeps a token with probability a = min(1, ρ/λ), and weighs it by min(Z max(λ, ρ), c).

    Z = Σ q a. Over the draw of the mask the weight is Z min(ρ, c/Z): token TIS at C = c/Z, times a constant. The mask
    adds variance alone. p and q are distributions of a whole vocabulary, of which Z is the exact sum.
    """
    q = rng.dirichlet(np.ones(12))
    p = rng.dirichlet(np.ones(12))
    ratio = p / q
    score = rng.normal(size=(12, 3))  # any gradient of log p
    for budget, clip in ((1.0, 2.0), (2.0, 1.5), (0.5, 100.0)):
        accept = np.minimum(1, ratio / budget)
        mass = float((q * accept).sum())
        assert clip >= mass * budget, "below that the clip would cut every accepted token"
        weight = np.minimum(mass * np.maximum(budget, ratio), clip)
        gradient = ((q * accept * weight)[:, None] * score).sum(0)
        tis = correct(
            torch.tensor(np.log(ratio)), torch.zeros(12, dtype=torch.bool), torch.arange(12), 12,
            Correction(token="tis", token_threshold=clip / mass),
        ).weight_T.numpy()  # fmt: skip
        np.testing.assert_allclose(accept * weight, mass * tis, rtol=1e-12)
        np.testing.assert_allclose(gradient, mass * ((q * tis)[:, None] * score).sum(0), rtol=1e-12)
        assert (q * accept * weight**2).sum() >= (q * (mass * tis) ** 2).sum()


def test_the_ratio_of_one_update_is_exactly_one() -> None:
    """NeMo-RL's force_on_policy_ratio, prime-rl's exact_on_policy_ratio: no forward pass is compared with another."""
    value, gradient = found_loss(Correction(), Clip(ratio="recompute"))
    assert value == pytest.approx(-ADVANTAGE.mean(), rel=1e-12)
    assert gradient == pytest.approx((-ADVANTAGE / 40).tolist(), rel=1e-14)


def test_a_framework_that_replays_takes_the_arms_rule() -> None:
    arm = Arm.model_validate({"correction": {"preset": "skyrl/replay"}, "vocabulary": {"rule": "min_p", "rho": "0.1"}})
    assert (arm.vocabulary.rule, arm.vocabulary.side) == ("min_p", "replay")
    plain = Arm.model_validate({"correction": {"preset": "skyrl/replay"}})
    assert (plain.vocabulary.rule, plain.vocabulary.side) == ("top_k", "replay")
    with pytest.raises(ValidationError, match="sets an arm's vocabulary too"):
        Correction.model_validate({"preset": "skyrl/replay"})

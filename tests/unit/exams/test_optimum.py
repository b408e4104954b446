"""Exact ascent of small models, held to sums written out here."""

import itertools
from dataclasses import replace

import pytest
import torch
import yaml

from exams import optimum
from tailrl.config.arm import Arm
from tailrl.probes.gradients.enumeration import SequenceModel, disturbed, random_model, return_gradient


@pytest.fixture
def model() -> SequenceModel:
    return random_model(vocabulary_size=6, length=3, prompts=2, seed=4)


def test_without_a_mismatch_the_arms_end_is_exact_ascents(model: SequenceModel) -> None:
    """RLOO's expected gradient equals the gradient of the return."""
    gradient = optimum.expected_gradient(Arm(), 4, lambda current: current.logits_SV)
    ours = optimum.ascend(model, gradient, 20, 0.5)
    exact = optimum.ascend(model, return_gradient, 20, 0.5)
    torch.testing.assert_close(ours.logits_SV, exact.logits_SV, rtol=0, atol=1e-10)
    assert optimum.rewards(exact)[1] > optimum.rewards(model)[1] + 0.1


def test_rewards_are_sums_over_responses(model: SequenceModel) -> None:
    vocabulary, (prompts, _) = 6, model.reward_KN.shape
    p_SV = model.logits_SV.softmax(-1)
    sampled = greedy = 0.0
    for k in range(prompts):
        for n, tokens in enumerate(itertools.product(range(vocabulary), repeat=3)):
            rows = [k, *(prompts + t * vocabulary + tokens[t] for t in range(2))]
            chances = [float(p_SV[row, token]) for row, token in zip(rows, tokens, strict=True)]
            sampled += float(model.reward_KN[k, n]) * chances[0] * chances[1] * chances[2] / prompts
            best = all(int(p_SV[row].argmax()) == token for row, token in zip(rows, tokens, strict=True))
            greedy += float(model.reward_KN[k, n]) * best / prompts
    assert optimum.rewards(model) == pytest.approx((greedy, sampled), abs=1e-12)


def test_a_sampler_that_never_draws_the_right_responses_leads_elsewhere(model: SequenceModel) -> None:
    """The planted fault: tokens of right responses to the first prompt get no chance at the first place."""
    right_V = torch.zeros(6, dtype=torch.bool)
    right_V[model.tokens_NT[model.reward_KN[0] > 0][:, 0]] = True
    blocked_SV = torch.zeros_like(model.logits_SV)
    blocked_SV[0, right_V] = -40.0

    gradient = optimum.expected_gradient(Arm(), 4, lambda current: current.logits_SV + blocked_SV)
    ours = optimum.rewards(optimum.ascend(model, gradient, 60, 0.6))
    exact = optimum.rewards(optimum.ascend(model, return_gradient, 60, 0.6))
    assert exact[1] > 0.99 > 0.9 > ours[1]


def test_where_the_gradient_is_zero_the_ascent_ends(model: SequenceModel) -> None:
    nothing = replace(model, reward_KN=torch.zeros_like(model.reward_KN))
    assert torch.equal(optimum.ascend(nothing, return_gradient, 5, 0.5).logits_SV, model.logits_SV)


def test_a_disturbance_is_of_the_current_weights_with_one_direction(model: SequenceModel) -> None:
    moved = replace(model, logits_SV=model.logits_SV + 1.0)
    first, second = (disturbed(one, "noise", 0.2, 7) - one.logits_SV for one in (model, moved))
    torch.testing.assert_close(first, second, rtol=0, atol=1e-12)


def test_the_design_gives_an_end_for_each_cause_k3_and_arm() -> None:
    design = yaml.safe_load(optimum.DESIGN.read_text(encoding="utf-8"))
    small = design | {"models": 2, "steps": 2, "vocabulary_size": 6, "causes": ["noise", "rounding"], "nats": [0.03]}
    found = list(optimum.ends(small))
    assert len(found) == 2 * (1 + 2 * len(design["arms"])) and all(0 <= end.sampled <= 1 for end in found)
    made = optimum.contrasts(found)
    assert len(made) == 2 * 2 * len(design["arms"]) and {one.difference.n for one in made} == {2}


def test_contrasts_are_paired_over_models() -> None:
    exact = [optimum.End(m, "none", 0.0, "exact", 1.0, 0.90 + 0.01 * m, 0.0) for m in range(3)]
    naive = [optimum.End(m, "noise", 0.1, "naive", 1.0, 0.80 + 0.01 * (m + (m == 2)), 0.1) for m in range(3)]
    greedy, sampled = optimum.contrasts(exact + naive)
    assert (greedy.score, greedy.difference.mean, greedy.difference.low) == ("greedy", 0.0, 0.0)
    # Differences −10, −10, −9 points: mean −29/3, standard error 1/3, t with 2 degrees of freedom 4.302653.
    mean, half = -0.29 / 3, 0.01 * 4.302653 / 3
    ends = (sampled.difference.mean, sampled.difference.low, sampled.difference.high)
    assert ends == pytest.approx((mean, mean - half, mean + half), abs=1e-7)

"""The optimizers against their definitions, and what the loss is a mean over."""

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from step_fixture import DVP, make_rollouts, run_of, samples_of
from torch import Tensor
from transformers import PreTrainedModel

from tailrl.config.training import Training
from tailrl.runtime.errors import StudyError
from tailrl.training.optimizer import make_optimizer, optimizer_step
from tailrl.training.samples import Sample
from tailrl.training.step import update
from tailrl.training.stopwatch import Stopwatch
from tailrl.training.token_table import TokenTable

RATE, GRADIENTS = 0.1, ([3.0, -4.0], [1.0, 0.5], [-2.0, 0.0])


def test_the_gradient_is_clipped_and_its_norm_before_is_returned() -> None:
    layer = torch.nn.Linear(2, 1, bias=False)
    layer.weight.data = torch.tensor([[1.0, 2.0]])
    layer.weight.grad = torch.tensor([[3.0, 4.0]])
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    assert optimizer_step(layer, optimizer, max_grad_norm=0.5) == pytest.approx(5.0)  # type: ignore[arg-type]
    np.testing.assert_allclose(layer.weight.detach(), [[1 - 0.3, 2 - 0.4]], rtol=1e-5)
    assert layer.weight.grad is None
    layer.weight.grad = torch.tensor([[math.inf, 0.0]])
    with pytest.raises(StudyError, match="gradient's norm is inf"):
        optimizer_step(layer, optimizer, max_grad_norm=0.5)  # type: ignore[arg-type]


def adamw(weights: list[float]) -> list[float]:
    """Loshchilov and Hutter 2019, algorithm 2, with epsilon 1e-8 and weight decay 0.1."""
    moments = [(0.0, 0.0)] * len(weights)
    for step, gradient in enumerate(GRADIENTS, start=1):
        for i, g in enumerate(gradient):
            first, second = 0.8 * moments[i][0] + 0.2 * g, 0.9 * moments[i][1] + 0.1 * g * g
            moments[i] = first, second
            change = (first / (1 - 0.8**step)) / (math.sqrt(second / (1 - 0.9**step)) + 1e-8)
            weights[i] -= RATE * (change + 0.1 * weights[i])
    return weights


def sgd(weights: list[float]) -> list[float]:
    """Heavy ball: the velocity is the sum of all gradients, each times 0.8 to the power of its age."""
    for step in range(len(GRADIENTS)):
        for i in range(len(weights)):
            weights[i] -= RATE * sum(0.8 ** (step - age) * GRADIENTS[age][i] for age in range(step + 1))
    return weights


@pytest.mark.parametrize(("name", "decay", "oracle"), [("adamw", 0.1, adamw), ("sgd", 0.0, sgd)])
def test_three_steps_match_the_definition(name: str, decay: float, oracle: Any) -> None:
    layer = torch.nn.Linear(2, 1, bias=False)
    layer.weight.data = torch.tensor([[1.0, 2.0]])
    settings = Training(optimizer=name, learning_rate=RATE, betas=(0.8, 0.9), weight_decay=decay)
    optimizer = make_optimizer(layer, settings)  # type: ignore[arg-type]
    for gradient in GRADIENTS:
        layer.weight.grad = torch.tensor([gradient])
        optimizer_step(layer, optimizer, max_grad_norm=100.0)  # type: ignore[arg-type]
    np.testing.assert_allclose(layer.weight.detach()[0], oracle([1.0, 2.0]), rtol=1e-5)


def test_sgd_refuses_what_it_does_not_use() -> None:
    with pytest.raises(StudyError, match=r"arms\.test\.training: optimizer: sgd does not use weight_decay"):
        run_of({"training": {"optimizer": "sgd", "weight_decay": 0.1}})


# --- what the loss is a mean over ------------------------------------------------------------------------


def moved(model: PreTrainedModel, samples: list[Sample], **training: Any) -> tuple[float, Tensor, TokenTable]:
    """Loss of one update, its change of the weights, and its record; the model itself stays unchanged."""
    run = run_of({"vocabulary": DVP, "correction": {"sequence": "mis"}}, max_grad_norm=1e9, **training)
    changed = copy.deepcopy(model)
    loss, _, record = update(changed, torch.optim.SGD(changed.parameters(), lr=1.0), samples, run, 0, Stopwatch())
    steps = [(new - old).detach().flatten() for new, old in zip(changed.parameters(), model.parameters(), strict=True)]
    return loss, torch.cat(steps), record


def test_the_mean_over_kept_responses_ignores_rejected_ones(model: PreTrainedModel) -> None:
    samples = samples_of(*make_rollouts(), run_of({"vocabulary": DVP}))
    alone = [moved(model, [sample])[2].weights.used_N.item() for sample in samples]
    kept = [sample for sample, weight in zip(samples, alone, strict=True) if weight > 0]
    assert 0 < len(kept) < len(samples)
    loss, steps, _ = moved(model, samples, loss_mean="kept")
    expected_loss, expected, _ = moved(model, kept)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    torch.testing.assert_close(steps, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    _, smaller, _ = moved(model, samples)
    torch.testing.assert_close(
        smaller * len(samples), steps * len(kept), rtol=0, atol=1e-5 * len(samples) * expected.abs().max().item()
    )


def test_where_no_response_is_kept_nothing_moves(model: PreTrainedModel) -> None:
    samples = samples_of(*make_rollouts(), run_of({"vocabulary": DVP}))
    alone = [moved(model, [sample])[2].weights.used_N.item() for sample in samples]
    rejected = [sample for sample, weight in zip(samples, alone, strict=True) if weight == 0]
    loss, steps, _ = moved(model, rejected, loss_mean="kept")
    assert loss == 0 and not steps.any()

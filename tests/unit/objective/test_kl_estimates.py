"""The three estimates of a KL divergence: their definitions, for tensors and arrays alike, and their expectations."""

import math

import numpy as np
import pytest
import torch

from tailrl.objective.kl_estimates import k1, k2, k3

RATIOS = [1.0, 0.5, 2.0, 1e-9, 1e9, 1 + 1e-12]


@pytest.mark.parametrize("ratio", RATIOS)
def test_each_is_its_definition(ratio: float) -> None:
    log_ratio = np.array([math.log(ratio)])
    assert k1(log_ratio)[0] == -math.log(ratio)
    assert k2(log_ratio)[0] == math.log(ratio) ** 2 / 2
    assert k3(log_ratio)[0] == pytest.approx(math.expm1(math.log(ratio)) - math.log(ratio), rel=1e-12, abs=0)


def test_near_one_nothing_cancels() -> None:
    """It is half of the square there, of which e^x − 1 − x has no digit."""
    assert k3(torch.tensor([1e-8], dtype=torch.float64)).item() == pytest.approx(1e-16 / 2, rel=1e-6, abs=0)
    assert k3(np.array([1e-8]))[0] == pytest.approx(1e-16 / 2, rel=1e-6, abs=0)


@pytest.mark.parametrize("estimate", [k1, k2, k3])
def test_a_tensor_and_an_array_have_the_same_values_and_a_tensor_its_gradient(estimate: object) -> None:
    log_ratio_T = torch.linspace(-3, 3, 41, dtype=torch.float64, requires_grad=True)
    value_T = estimate(log_ratio_T)  # type: ignore[operator]
    array = estimate(log_ratio_T.detach().numpy())  # type: ignore[operator]
    np.testing.assert_allclose(value_T.detach().numpy(), array, rtol=1e-14, atol=1e-16)
    value_T.sum().backward()
    slope = {k1: lambda x: -1 + 0 * x, k2: lambda x: x, k3: np.expm1}[estimate]  # type: ignore[index]
    np.testing.assert_allclose(log_ratio_T.grad, slope(log_ratio_T.detach().numpy()), rtol=1e-12, atol=1e-15)


def test_means_over_what_q_samples_are_the_divergence() -> None:
    q, p = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])
    divergence = float((q * np.log(q / p)).sum())
    for estimate in (k1, k3):
        assert (q * estimate(np.log(p / q))).sum() == pytest.approx(divergence, rel=1e-12)

"""The mismatch dial: each cause against plain float64 loops, and what it does to the mismatch against closed forms."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from definitions import disturbed, softmax
from numpy.typing import NDArray
from torch import Tensor, nn

from tailrl.config.sampler import Disturbance
from tailrl.objective.disturbance import computing_with, disturb, round_weights
from tailrl.objective.noise import normal
from tailrl.runtime.errors import StudyError

V = 300
SEEDS, POSITIONS = [3, 3, 8, 2**31 - 1], [0, 1, 1, 4000]
CAUSES: dict[str, dict[str, Any]] = {
    "noise": {"noise": 0.7},
    "bias": {"bias": 1.3},
    "floor": {"floor": 0.1},
    "small floor": {"floor": 1e-12},
    "all": {"noise": 0.2, "bias": 0.4, "floor": 0.03},
}


def logits_of(rows: int, scale: float = 4.0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(np.random.default_rng(rows).normal(0, scale, (rows, V)), dtype=dtype)


def numbers(settings: Disturbance) -> tuple[list[list[float]], list[list[float]]]:
    """The bias and the noise of each of the rows, nats."""
    bias = (settings.bias * normal([0], [0], V, "disturbance.bias").double()).expand(len(SEEDS), V)
    return bias.tolist(), (settings.noise * normal(SEEDS, POSITIONS, V, "disturbance.noise").double()).tolist()


# --- on logits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cause", CAUSES)
def test_each_disturbance_matches_its_definition(cause: str) -> None:
    settings, logits = Disturbance.model_validate(CAUSES[cause]), logits_of(4)
    rows = zip(logits.tolist(), *numbers(settings), strict=True)
    expected = [disturbed(*row, settings.floor) for row in rows]
    found = disturb(logits, SEEDS, POSITIONS, settings).softmax(-1)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert not np.allclose(found, logits.softmax(-1), rtol=1e-10, atol=0)
    in_float32 = disturb(logits.float(), SEEDS, POSITIONS, settings)
    assert in_float32.dtype == torch.float32
    np.testing.assert_allclose(in_float32.softmax(-1), expected, rtol=2e-5)


def test_no_disturbance_changes_nothing() -> None:
    logits = logits_of(4)
    for settings in (Disturbance(), Disturbance(staleness=3, weights="float8_e4m3")):
        assert disturb(logits, SEEDS, POSITIONS, settings) is logits


def test_the_floor_acts_after_the_noise() -> None:
    """No probability is below η/V, with noise that would push most of them far below it."""
    settings = Disturbance(noise=20.0, bias=20.0, floor=0.05)
    log_probs = disturb(logits_of(4, dtype=torch.float32), SEEDS, POSITIONS, settings).log_softmax(-1)
    least = math.log(0.05 / V)
    assert log_probs.min().item() == pytest.approx(least, abs=1e-5)
    assert (log_probs < least + 1e-3).float().mean() > 0.9


def test_a_floor_under_an_impossible_token_is_exact() -> None:
    logits = torch.tensor([[0.0, -1e4, -torch.inf]])
    found = disturb(logits, [0], [0], Disturbance(floor=0.3)).exp()
    np.testing.assert_allclose(found, [[0.8, 0.1, 0.1]], rtol=1e-6)


def test_noise_differs_between_states_and_bias_does_not() -> None:
    zeros = torch.zeros(4, V)
    noise = disturb(zeros, SEEDS, POSITIONS, Disturbance(noise=1.0))
    bias = disturb(zeros, SEEDS, POSITIONS, Disturbance(bias=1.0))
    assert torch.equal(bias, bias[:1].expand(4, V))
    correlations = np.corrcoef(np.vstack([noise.numpy(), bias[:1].numpy()])) - np.eye(5)
    # The largest of ten pairs of independent rows of 300 stays below 4.2 / √300 with 99.97 %.
    assert np.abs(correlations).max() < 4.2 / math.sqrt(V)


@pytest.mark.parametrize("cause", CAUSES)
def test_a_row_does_not_depend_on_the_batch(cause: str) -> None:
    """Bit for bit: alone, and in another order."""
    settings, logits = Disturbance.model_validate(CAUSES[cause]), logits_of(4, dtype=torch.float32)
    together = disturb(logits, SEEDS, POSITIONS, settings)
    assert torch.equal(disturb(logits, SEEDS, POSITIONS, settings), together)
    assert torch.equal(disturb(logits.flip(0), SEEDS[::-1], POSITIONS[::-1], settings).flip(0), together)
    for row, seed, position, expected in zip(logits, SEEDS, POSITIONS, together, strict=True):
        assert torch.equal(disturb(row[None], [seed], [position], settings)[0], expected)


@pytest.mark.parametrize("cause", CAUSES)
def test_the_gradient_flows_through(cause: str) -> None:
    """Against finite differences, of the log-probability of one token in each state."""
    settings = Disturbance.model_validate(CAUSES[cause])

    def score(logits: Tensor) -> Tensor:
        return disturb(logits, SEEDS[:2], POSITIONS[:2], settings).log_softmax(-1)[:, 7]

    logits = logits_of(2).requires_grad_()
    assert torch.autograd.gradcheck(score, (logits,), atol=1e-7)


# --- the size of the mismatch ----------------------------------------------------------------------------


def k3(log_train: NDArray[np.float64], log_infer: NDArray[np.float64]) -> NDArray[np.float64]:
    """E_{a ~ π_infer}[K3] of each state, summed over the whole vocabulary."""
    delta = log_train - log_infer
    return (np.exp(log_infer) * (np.expm1(delta) - delta)).sum(-1)


@pytest.mark.parametrize("sigma", [0.05, 0.1])
def test_noise_makes_a_k3_of_half_its_variance(sigma: float) -> None:
    """E[k3] = KL(π_infer ‖ π_train) = σ²/2 (1 − Σ p²) to second order in σ; 8,000 states, an interval of 99.9 %.

    The third order vanishes by symmetry; the fourth is an eighth of a cumulant of at most 9 σ⁴.
    """
    logits, states = torch.linspace(0, -9, 60, dtype=torch.float64), 8000
    noisy = disturb(logits.expand(states, 60), list(range(states)), [5] * states, Disturbance(noise=sigma))
    found = k3(logits.log_softmax(-1).numpy(), noisy.log_softmax(-1).numpy())
    probs = np.array(softmax(logits.tolist()))
    expected = sigma**2 / 2 * (1 - float((probs**2).sum()))
    half_width = 3.29 * found.std(ddof=1) / math.sqrt(states)
    assert half_width < 0.1 * expected
    assert abs(found.mean() - expected) < half_width + 1.5 * sigma**4


def test_a_bias_makes_the_same_k3_over_vocabularies() -> None:
    """Of one state alone it is Σ p b²/2 − (Σ p b)²/2 to second order, with the b that every run has."""
    logits = logits_of(1, scale=2.0)
    bias = 0.01 * normal([0], [0], V, "disturbance.bias").double().numpy()[0]
    found = k3(
        logits.log_softmax(-1).numpy(), disturb(logits, [1], [1], Disturbance(bias=0.01)).log_softmax(-1).numpy()
    )
    probs = np.array(softmax(logits[0].tolist()))
    expected = (probs @ bias**2 - (probs @ bias) ** 2) / 2
    assert found[0] == pytest.approx(expected, rel=0.02)


def test_a_floor_makes_the_k3_of_a_mixture() -> None:
    """In a state that is sure of one token: p' = (1 − η) + η/V, and η/V for each of the others."""
    eta, logits = 0.1, torch.tensor([[0.0, *[-60.0] * (V - 1)]], dtype=torch.float64)
    infer = disturb(logits, [0], [0], Disturbance(floor=eta)).log_softmax(-1).numpy()
    train = logits.log_softmax(-1).numpy()
    p, rest = 1 - eta + eta / V, eta / V
    kl = p * math.log(p) + (V - 1) * rest * (math.log(rest) + 60)
    assert k3(train, infer)[0] == pytest.approx(kl, rel=1e-6)


# --- on weights ------------------------------------------------------------------------------------------


def rounded(weight: Tensor, dtype: str) -> Tensor:
    [(_, found)] = round_weights([("w", weight)], dtype)
    assert found.dtype == weight.dtype
    return found


def nearest(value: float, bits: int, smallest_exponent: int) -> float:
    """The nearest number with so many bits behind the leading one, ties to even; subnormal below the exponent."""
    exponent = max(math.floor(math.log2(abs(value))), smallest_exponent) if value else smallest_exponent
    unit = 2.0 ** (exponent - bits)
    return round(value / unit) * unit


@pytest.mark.parametrize(("dtype", "bits", "exponent"), [("bfloat16", 7, -126), ("float16", 10, -14)])
@pytest.mark.parametrize("shape", [(40, 30), (200,)])
def test_sixteen_bits_round_to_the_nearest(dtype: str, bits: int, exponent: int, shape: tuple[int, ...]) -> None:
    weight = torch.tensor(np.random.default_rng(0).normal(0, 0.3, shape), dtype=torch.float32)
    expected = [nearest(value, bits, exponent) for value in weight.flatten().tolist()]
    assert rounded(weight, dtype).flatten().tolist() == expected


@pytest.mark.parametrize("scale", [1e-6, 0.02, 3.0, 1e6])
def test_eight_bits_round_matrices_within_their_own_range(scale: float) -> None:
    """Three bits, from 2^-6 of 448 on subnormal; relative to the matrix's largest weight, whatever that is."""
    weight = torch.tensor(np.random.default_rng(0).normal(0, scale, (40, 30)), dtype=torch.float32)
    unit = weight.abs().max() / 448
    expected = [nearest(value, 3, -6) for value in (weight / unit).flatten().tolist()]
    np.testing.assert_allclose(rounded(weight, "float8_e4m3").flatten() / unit, expected, rtol=1e-6)
    assert (rounded(weight, "float8_e4m3") - weight).abs().max() <= 2.0**-4 * weight.abs().max()
    norm = weight[0]
    assert torch.equal(rounded(norm, "float8_e4m3"), norm)


def test_a_matrix_of_zeros_stays() -> None:
    assert rounded(torch.zeros(3, 3), "float8_e4m3").tolist() == [[0.0] * 3] * 3


def test_no_dtype_rounds_nothing() -> None:
    weights = [("a", torch.rand(3, 2)), ("b", torch.rand(2))]
    for (name, weight), (known, same) in zip(weights, round_weights(iter(weights), None), strict=True):
        assert name == known and weight is same


def test_a_weight_beyond_the_dtype_is_one_sentence() -> None:
    weights = [("small", torch.ones(2, 2)), ("head", torch.tensor([[1e5]]))]
    with pytest.raises(StudyError, match=r"^disturbance\.weights: head holds weights too large for float16$"):
        list(round_weights(weights, "float16"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3", None])
def test_parameters_are_rounded_within_the_block_only(dtype: str | None) -> None:
    """The gradient is that at the rounded weights, found on the exact ones; also after an error."""
    layer = nn.Linear(5, 4)
    exact = {name: p.detach().clone() for name, p in layer.named_parameters()}
    expected = dict(round_weights(exact.items(), dtype))
    inputs = torch.rand(3, 5)
    with computing_with(layer, round_weights(exact.items(), dtype)):
        for name, parameter in layer.named_parameters():
            assert torch.equal(parameter, expected[name])
        layer(inputs).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter, exact[name])
    assert dtype is None or not torch.equal(exact["weight"], expected["weight"])
    outputs = inputs @ expected["weight"].T + expected["bias"]
    torch.testing.assert_close(layer.weight.grad, 2 * outputs.T @ inputs)
    with pytest.raises(ZeroDivisionError), computing_with(layer, expected.items()):
        raise ZeroDivisionError
    assert torch.equal(layer.weight, exact["weight"])


def test_a_weight_that_two_layers_share_stays_shared() -> None:
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    module = nn.Sequential(first, second)
    with computing_with(module, round_weights(module.state_dict().items(), "bfloat16")):
        assert first.weight is second.weight and torch.equal(first.weight, first.weight.bfloat16().float())
    assert first.weight is second.weight


def test_computing_with_earlier_weights_leaves_a_delayed_gradient() -> None:
    """d/dw (w x)² at the earlier w, found on the present one; a name that there is no parameter for is passed over."""
    layer = nn.Linear(1, 1, bias=False)
    present = layer.weight.detach().clone()
    earlier, x = torch.tensor([[0.7]]), torch.tensor([[3.0]])
    with computing_with(layer, [("weight", earlier), ("head.weight", torch.ones(2))]):
        layer(x).square().backward()
    assert layer.weight.grad is not None and layer.weight.grad.item() == pytest.approx(2 * 0.7 * 3.0**2)
    assert torch.equal(layer.weight, present)

"""The comparison against plain loops over float64 probabilities, and where it is known in closed form."""

import math
from dataclasses import fields

import numpy as np
import pytest
import torch
from definitions import safe_tokens, softmax
from torch import Tensor

from tailrl.config.distributions import HEAD_BELOW, TAIL_FROM
from tailrl.probes.distributions.comparison import EDGES, SCALED_BINS, Positions, compare

P, V = 40, 97
LOG_RHOS = (-13.0, -3.0)


def random_logits(sigma: float, seed: int = 0, scale: float = 4.0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of P states, the same with iid noise, and tokens drawn from the latter."""
    rng = np.random.default_rng(seed)
    trainer_PV = torch.tensor(rng.normal(0, scale, (P, V)), dtype=torch.float32)
    sampler_PV = trainer_PV + torch.tensor(rng.normal(0, sigma, (P, V)), dtype=torch.float32)
    tokens_P = torch.distributions.Categorical(logits=sampler_PV).sample()
    return trainer_PV, sampler_PV, tokens_P


def kl(p: list[float], q: list[float]) -> float:
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("sigma", [0.01, 0.5, 3.0])
def test_every_field_is_that_of_plain_loops(sigma: float) -> None:
    trainer_PV, sampler_PV, tokens_P = random_logits(sigma)
    found = compare(trainer_PV, sampler_PV, tokens_P, LOG_RHOS)
    for i in range(P):
        p, q, token = softmax(trainer_PV[i].tolist()), softmax(sampler_PV[i].tolist()), int(tokens_P[i])
        delta = [math.log(a / b) for a, b in zip(p, q, strict=True)]
        half_range = (max(delta) - min(delta)) / 2
        expected = {
            "logp_train_P": math.log(p[token]),
            "logp_infer_P": math.log(q[token]),
            "tv_P": math.fsum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2,
            "kl_train_infer_P": kl(p, q),
            "kl_infer_train_P": kl(q, p),
            "delta_max_P": max(map(abs, delta)),
            "half_range_P": half_range,
            "entropy_train_P": -math.fsum(a * math.log(a) for a in p),
            "entropy_infer_P": -math.fsum(b * math.log(b) for b in q),
        }
        for name, value in expected.items():
            assert getattr(found, name)[i] == pytest.approx(value, rel=1e-9, abs=1e-13), name
        assert found.flip_P[i] == (p.index(max(p)) != q.index(max(q)))
        for s, log_rho in enumerate(LOG_RHOS):
            own, other = safe_tokens(p, "min_p", log_rho), safe_tokens(q, "min_p", log_rho)
            sizes = sum(own), sum(other), sum(a and b for a, b in zip(own, other, strict=True))
            names = ("kept_train_PS", "kept_infer_PS", "kept_both_PS")
            assert tuple(int(getattr(found, name)[i, s]) for name in names) == sizes
            for name, probs, safe in (("log_kept_train_PS", p, own), ("log_kept_infer_PS", q, other)):
                mass = math.fsum(a for a, kept in zip(probs, safe, strict=True) if kept)
                assert getattr(found, name)[i, s] == pytest.approx(math.log(mass), abs=1e-13)
            beyond = math.fsum(b for b, kept in zip(q, own, strict=True) if not kept)
            assert found.outside_PS[i, s] == pytest.approx(beyond, abs=1e-13)
            kept = [math.fsum(a for a, inside in zip(*side, strict=True) if inside) for side in ((p, own), (q, other))]
            pairs = [(p[k] / kept[0], q[k] / kept[1]) for k in range(V) if own[k] and other[k]]
            k3 = math.fsum(b * (a / b - 1 - math.log(a / b)) for a, b in pairs)
            assert found.k3_PS[i, s] == pytest.approx(k3, rel=1e-9, abs=1e-13)
        variance, square = float(np.var(delta)), math.fsum(a * a for a in p)
        others = [math.fsum(p[k] * q[k] for k in range(V) if k != a) for a in range(V)]
        paper = [variance * ((1 - p[a]) * (1 - q[a]) + others[a]) for a in range(V)]
        second = [variance * (0.5 - 2 * p[a] + 1.5 * square) for a in range(V)]
        for b in range(len(EDGES) - 1):
            inside = [k for k in range(V) if EDGES[b] <= -math.log(p[k]) < EDGES[b + 1]]
            sums = [math.fsum(q[k] * f(delta[k]) for k in inside) for f in (lambda _: 1.0, abs, lambda d: -d)]
            for name, value in zip(("mass_PB", "size_PB", "signed_PB"), sums, strict=True):
                assert getattr(found, name)[i, b] == pytest.approx(value, abs=1e-13)
            for name, mode in (("paper_PB", paper), ("second_PB", second)):
                predicted = math.fsum(q[k] * mode[k] for k in inside)
                assert getattr(found, name)[i, b] == pytest.approx(predicted, rel=1e-9, abs=1e-12), name
        for name, inside in (
            ("head_PH", [k for k in range(V) if -math.log(p[k]) < HEAD_BELOW]),
            ("tail_PH", [k for k in range(V) if -math.log(p[k]) >= TAIL_FROM]),
        ):
            scaled = [-delta[k] / half_range for k in inside]
            expected_H, _ = np.histogram(scaled, SCALED_BINS, (-2, 2), weights=[q[k] for k in inside])
            np.testing.assert_allclose(getattr(found, name)[i], expected_H, atol=1e-13)
    assert len(set(found.flip_P.tolist())) == (1 if sigma < 0.1 else 2)
    assert (found.kept_both_PS < found.kept_train_PS).any()


def test_the_prediction_to_second_order_is_what_iid_noise_gives() -> None:
    """One state met under many noises, its tokens by their probability: within four standard errors, bin by bin."""
    rng = np.random.default_rng(1)
    states, tokens, sigma = 20_000, 30, 0.1
    trainer_V = torch.tensor(rng.normal(0, 2.5, tokens))
    noise_PV = torch.tensor(rng.normal(0, sigma, (states, tokens)))
    found = compare(
        trainer_V.expand(states, tokens), trainer_V + noise_PV, torch.zeros(states, dtype=torch.int64), [-3.0]
    )
    filled = found.mass_PB.mean(axis=0) > 0.02
    assert filled.sum() >= 4
    difference_PB = (found.signed_PB - found.second_PB)[:, filled]
    error_B = difference_PB.std(axis=0) / math.sqrt(states)
    assert (np.abs(difference_PB.mean(axis=0)) < 4 * error_B + 2 * sigma**3).all()
    # The paper's value does not hold here: it is nowhere negative.
    off_PB = (found.signed_PB - found.paper_PB)[:, filled]
    assert (np.abs(off_PB.mean(axis=0)) > 10 * error_B).any()


def test_equal_logits_give_exact_zeros() -> None:
    trainer_PV, _, tokens_P = random_logits(0.0)
    found = compare(trainer_PV, trainer_PV.clone(), tokens_P, LOG_RHOS)
    names = ("tv", "kl_train_infer", "kl_infer_train", "delta_max", "half_range", "flip")
    zeros = [getattr(found, f"{name}_P") for name in names] + [
        found.size_PB,
        found.signed_PB,
        found.paper_PB,
        found.second_PB,
        found.k3_PS,
    ]
    zeros += [found.logp_train_P - found.logp_infer_P, found.kept_train_PS - found.kept_both_PS]
    assert not any(values.any() for values in zeros)
    assert not found.head_PH.any() and not found.tail_PH.any(), "there is no ε_max to divide by"
    assert found.mass_PB.sum(axis=1) == pytest.approx(1)


def test_masked_k3_of_sets_that_hold_every_token_is_the_divergence() -> None:
    found = compare(*random_logits(0.5), (-13.0, -200.0))
    np.testing.assert_array_equal(found.k3_PS[:, 1], found.kl_infer_train_P)
    assert (found.kept_both_PS[:, 1] == V).all() and (found.kept_both_PS[:, 0] < V).any()


def test_masked_k3_of_one_token_that_both_sets_hold() -> None:
    """The engine keeps the first two of three tokens, q' = (2/3, 1/3); the trainer the first alone: r = 3/2 there."""
    trainer_PV, sampler_PV = torch.tensor([[0.9, 0.05, 0.05]]).log(), torch.tensor([[0.6, 0.3, 0.1]]).log()
    found = compare(trainer_PV, sampler_PV, torch.tensor([0]), [math.log(0.4)])
    assert (found.kept_train_PS[0, 0], found.kept_infer_PS[0, 0]) == (1, 2)
    assert found.k3_PS[0, 0] == pytest.approx(2 / 3 * (0.5 - math.log(1.5)))


def test_a_shift_of_the_logits_is_no_difference() -> None:
    trainer_PV, _, tokens_P = random_logits(0.0)
    found = compare(trainer_PV.double(), trainer_PV.double() + 100, tokens_P, LOG_RHOS)
    assert max(found.tv_P.max(), found.delta_max_P.max(), found.kl_train_infer_P.max()) < 1e-12


@pytest.mark.parametrize("eta", [1e-8, 0.1, 0.9])
def test_a_floor_in_closed_form(eta: float) -> None:
    """q = (1 − η) p + η/V differs from p by η (1/V − p): the total variation is η times that of p and a flat one."""
    trainer_PV, *_ = random_logits(0.0, scale=2.0)
    tokens_P = torch.zeros(P, dtype=torch.int64)
    probs = [softmax(row) for row in trainer_PV.tolist()]
    sampler_PV = torch.tensor([[math.log((1 - eta) * p + eta / V) for p in row] for row in probs], dtype=torch.float64)
    found = compare(trainer_PV, sampler_PV, tokens_P, LOG_RHOS)
    flat = [math.fsum(abs(p - 1 / V) for p in row) / 2 for row in probs]
    assert found.tv_P == pytest.approx(eta * np.array(flat), rel=1e-6)
    assert not found.flip_P.any()


def test_two_swapped_logits_flip_and_move_their_difference() -> None:
    trainer_PV, *_ = random_logits(0.0)
    first_P2 = trainer_PV.topk(2).indices
    sampler_PV = trainer_PV.scatter(1, first_P2, trainer_PV.gather(1, first_P2.flip(1)))
    found = compare(trainer_PV, sampler_PV, first_P2[:, 0], LOG_RHOS)
    gap_P = trainer_PV.double().softmax(-1).gather(1, first_P2).diff(dim=1)[:, 0].neg().numpy()
    assert found.flip_P.all()
    assert found.tv_P == pytest.approx(gap_P, rel=1e-9)
    assert found.entropy_train_P == pytest.approx(found.entropy_infer_P, rel=1e-12)
    second_safe_PS = trainer_PV.gather(1, first_P2).diff(dim=1).numpy() >= np.array(LOG_RHOS)
    assert (found.kept_train_PS == found.kept_infer_PS).all()
    assert (found.kept_train_PS - found.kept_both_PS == ~second_safe_PS).all()
    assert 0 < second_safe_PS.sum() < second_safe_PS.size


def test_of_equal_logits_the_first_is_chosen() -> None:
    trainer_PV, tied_PV = torch.tensor([[0.0, 1.0, 0.5], [1.0, 0.0, 0.5]]), torch.tensor([[1.0, 1.0, 0.5]]).repeat(2, 1)
    assert compare(trainer_PV, tied_PV, torch.tensor([1, 1]), LOG_RHOS).flip_P.tolist() == [True, False]


def test_divergences_of_engines_that_nearly_agree_are_not_rounding() -> None:
    """At noise of 1e-7 nats, half the variance of Δ under p is KL to a relative 1e-6; p ln(p/q) would be noise."""
    rng = np.random.default_rng(1)
    trainer_PV = torch.tensor(rng.normal(0, 3, (P, V)))
    sampler_PV = trainer_PV + torch.tensor(rng.normal(0, 1e-7, (P, V)))
    found = compare(trainer_PV, sampler_PV, torch.zeros(P, dtype=torch.int64), LOG_RHOS)
    p_PV, shift_PV = trainer_PV.softmax(-1), sampler_PV - trainer_PV
    variance_P = (p_PV * shift_PV.square()).sum(-1) - (p_PV * shift_PV).sum(-1).square()
    for name in ("kl_train_infer_P", "kl_infer_train_P"):
        assert getattr(found, name) == pytest.approx((variance_P / 2).numpy(), rel=1e-5)
    safe_PV = trainer_PV >= trainer_PV.amax(-1, keepdim=True) + LOG_RHOS[1]
    own_PV = p_PV * safe_PV / (p_PV * safe_PV).sum(-1, keepdim=True)
    variance_P = (own_PV * shift_PV.square()).sum(-1) - (own_PV * shift_PV).sum(-1).square()
    assert (found.kept_both_PS[:, 1] == safe_PV.sum(-1).numpy()).all()
    assert found.k3_PS[:, 1] == pytest.approx((variance_P / 2).numpy(), rel=1e-5, abs=1e-22)


def test_probabilities_of_zero_are_no_trouble() -> None:
    """A floor lifts a token from e⁻⁹⁰⁰, which float64 has no number for, to 0.05."""
    trainer_PV = torch.tensor([[0.0, -900.0]], dtype=torch.float64)
    sampler_PV = torch.tensor([[0.95, 0.05]], dtype=torch.float64).log()
    found = compare(trainer_PV, sampler_PV, torch.tensor([1]), LOG_RHOS)
    assert found.tv_P[0] == pytest.approx(0.05)
    assert found.kl_train_infer_P[0] == pytest.approx(-math.log(0.95))
    assert found.kl_infer_train_P[0] == pytest.approx(0.95 * math.log(0.95) + 0.05 * (math.log(0.05) + 900))
    assert found.delta_max_P[0] == pytest.approx(900 + math.log(0.05))


def test_delta_weighted_with_the_engine_is_what_total_variation_says() -> None:
    """Σ q |p/q − 1| = 2 TV, whatever the two are; and −Δ weighted with q sums to KL(q ‖ p)."""
    found = compare(*random_logits(0.7, seed=4), LOG_RHOS)
    assert found.signed_PB.sum(axis=1) == pytest.approx(found.kl_infer_train_P, abs=1e-13)
    assert (found.tv_P**2 <= found.kl_train_infer_P / 2).all(), "Pinsker"
    # The exact worst case behind Prop. 4.2: the token's logit is off by ε_max one way, all others the other way.
    p_P, delta_P = np.exp(found.logp_train_P), found.logp_train_P - found.logp_infer_P
    bound_P = np.log(p_P + (1 - p_P) * np.exp(2 * found.half_range_P))
    assert (np.abs(delta_P) <= bound_P + 1e-12).all()


def test_states_one_after_another() -> None:
    trainer_PV, sampler_PV, tokens_P = random_logits(0.3)
    whole = compare(trainer_PV, sampler_PV, tokens_P, LOG_RHOS)
    parts = [
        compare(trainer_PV[s], sampler_PV[s], tokens_P[s], LOG_RHOS) for s in (slice(0, 9), slice(9, 9), slice(9, P))
    ]
    joined = Positions.joined(parts)
    for field in fields(Positions):
        np.testing.assert_array_equal(getattr(joined, field.name), getattr(whole, field.name))

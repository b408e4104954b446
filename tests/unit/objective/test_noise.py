"""Counter-based noise: its distributions, its independence, and that nothing but its place decides a number.

Every statistical test has a fixed seed and a level stated beside it: it passes or fails for good.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy import stats

from tailrl.objective import noise
from tailrl.objective.noise import DRAWN_AT_ONCE, gumbel, normal

LEVEL = 1e-4
"""A correct generator falls below this p-value once in ten thousand seeds."""

SEEDS = [0, 1, 2, 3, 7, 12345, 2**31 - 1, 2**40 + 5]
POSITIONS = [0, 1, 2, 3, 100, 32767, 5, 6]


def uniform(seeds: Sequence[int], positions: Sequence[int], count: int, stream: str) -> torch.Tensor:
    """The uniforms in (0, 1) that the other laws are made of."""
    return noise._drawn(seeds, positions, count, stream, noise._uniform)


DRAWS = {"uniform": lambda *a: uniform(*a, "test"), "gumbel": gumbel, "normal": normal}


def rows(count: int, tokens: int, draw: str = "uniform", seed: int = 0) -> np.ndarray:
    """`count` positions of one response, float64 [count, tokens]."""
    return DRAWS[draw]([seed] * count, list(range(count)), tokens).double().numpy()


# --- distributions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draw", "law"), [("uniform", stats.uniform), ("gumbel", stats.gumbel_r), ("normal", stats.norm)]
)
@pytest.mark.parametrize("shape", [(1, 200_000), (200_000, 1), (400, 500)])
def test_numbers_follow_their_law(draw: str, law: stats.rv_continuous, shape: tuple[int, int]) -> None:
    """Along the vocabulary, along a response, and over both."""
    values = rows(*shape, draw)
    assert values.shape == shape
    assert stats.kstest(values.ravel(), law.cdf).pvalue > LEVEL


@pytest.mark.parametrize("stream", ["a", "b", "normal", "gumbel"])
def test_uniforms_are_uniform_over_response_seeds(stream: str) -> None:
    """A thousand responses, at their first and at a late position: chi-square over 64 equal bins."""
    for position in (0, 4095):
        values = uniform(list(range(1000)), [position] * 1000, 200, stream).numpy()
        counts = np.histogram(values, bins=64, range=(0, 1))[0]
        assert stats.chisquare(counts).pvalue > LEVEL


def test_the_bits_of_a_uniform_are_fair() -> None:
    """Each of the 20 upper ones: a two-sided binomial test at LEVEL / 20."""
    values = (rows(300, 2000) * 2**20).astype(np.int64).ravel()
    for bit in range(20):
        ones = int(((values >> bit) & 1).sum())
        assert stats.binomtest(ones, values.size).pvalue > LEVEL / 20, bit


@pytest.mark.parametrize("draw", DRAWS)
def test_numbers_are_finite_float32(draw: str) -> None:
    values = DRAWS[draw](SEEDS, POSITIONS, 300_000)
    assert values.dtype == torch.float32 and values.shape == (8, 300_000) and values.isfinite().all()
    if draw == "uniform":
        assert values.min() > 0 and values.max() < 1


@pytest.mark.slow  # the tail of the normal below
def test_the_deep_tail_of_the_exponential_race() -> None:
    """P(E < x) = 1 − exp(−x) down to x of 1e-7, among 1e8 numbers; a Poisson test at LEVEL for each x."""
    edges = [1e-5, 1e-6, 1e-7]
    counts = np.zeros(len(edges), dtype=np.int64)
    for seed in range(10):
        race = torch.exp(-gumbel([seed] * 50, list(range(50)), 200_000))
        counts += [int((race < edge).sum()) for edge in edges]
    for edge, found in zip(edges, counts, strict=True):
        expected = -np.expm1(-edge) * 10 * 50 * 200_000
        low, high = stats.poisson.interval(1 - LEVEL, expected)
        assert low <= found <= high, edge


def test_both_tails_of_the_normal_are_there() -> None:
    """Beyond ±4 (3.2e-5 a side): Poisson tests at LEVEL."""
    values = normal(list(range(50)), [3] * 50, 400_000)
    expected = stats.norm.sf(4.0) * values.numel()
    low, high = stats.poisson.interval(1 - LEVEL, expected)
    assert low <= int((values > 4).sum()) <= high
    assert low <= int((values < -4).sum()) <= high
    assert values.max() > 5 and values.min() < -5


# --- independence ----------------------------------------------------------------------------------------


def assert_independent(left: np.ndarray, right: np.ndarray) -> None:
    """Rank correlation, and a chi-square test of an 8 × 8 table, which sees more than what is linear."""
    left, right = left.ravel(), right.ravel()
    assert stats.spearmanr(left, right).pvalue > LEVEL
    table = np.histogram2d(left, right, bins=8, range=[[0, 1], [0, 1]])[0]
    assert stats.chi2_contingency(table).pvalue > LEVEL


@pytest.mark.parametrize("step", [1, 2, 64, 1000])
def test_neighbouring_positions_are_independent(step: int) -> None:
    values = rows(step + 100, 2000)
    assert_independent(values[:100], values[step : step + 100])


@pytest.mark.parametrize("step", [1, 2, 3, 64, 256, 1024])
def test_neighbouring_tokens_are_independent(step: int) -> None:
    values = rows(100, 2000 + step)
    assert_independent(values[:, :2000], values[:, step:])


@pytest.mark.parametrize("step", [1, 2, 2**16, 2**31, 2**32, 2**63])
def test_neighbouring_seeds_are_independent(step: int) -> None:
    left, right = (uniform([seed + shift for seed in range(100)], [0] * 100, 2000, "x") for shift in (0, step))
    assert_independent(left.numpy(), right.numpy())


@pytest.mark.parametrize(("one", "other"), [("a", "b"), ("normal", "gumbel"), ("noise", "noise2"), ("", "x")])
def test_streams_are_independent_for_every_seed(one: str, other: str) -> None:
    """Also where the seeds differ by what the names do: adding name and seed would make those the same numbers."""
    for shift in (-1, 0, 1, 256, 257):
        seeds = range(1000, 1100)
        left = uniform(list(seeds), [0] * 100, 1000, one)
        right = uniform([seed + shift for seed in seeds], [0] * 100, 1000, other)
        assert_independent(left.numpy(), right.numpy())


def test_seed_and_position_are_not_exchanged() -> None:
    seeds, positions = zip(*((s, t) for s in range(60) for t in range(60)), strict=True)
    first = uniform(seeds, positions, 3, "x").numpy()
    assert len(np.unique(first.view(np.int32).reshape(-1, 3), axis=0)) == 3600


# --- nothing but the place -------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 7, 600, 2049])
@pytest.mark.parametrize("draw", DRAWS)
def test_a_row_is_the_same_bits_in_any_batch(draw: str, tokens: int) -> None:
    """Alone, in another order, repeated, and with a longer vocabulary behind it."""
    together = DRAWS[draw](SEEDS, POSITIONS, tokens)
    for row, seed, position in zip(together, SEEDS, POSITIONS, strict=True):
        assert torch.equal(DRAWS[draw]([seed], [position], tokens)[0], row)
        assert torch.equal(DRAWS[draw]([9, seed, 9], [1, position, 2], tokens + 13)[1, :tokens], row)
    assert torch.equal(DRAWS[draw](SEEDS[::-1], POSITIONS[::-1], tokens), together.flip(0))


@pytest.mark.parametrize(("positions", "tokens"), [(300, 2049), (3, 2 * DRAWN_AT_ONCE + 1)])
@pytest.mark.parametrize("draw", DRAWS)
def test_a_row_is_the_same_bits_in_any_block(draw: str, positions: int, tokens: int) -> None:
    together = DRAWS[draw]([5] * positions, list(range(positions)), tokens)
    for place in (0, positions // 2, positions - 1):
        assert torch.equal(DRAWS[draw]([5], [place], tokens)[0], together[place])


@pytest.mark.parametrize("draw", DRAWS)
def test_no_rows_give_an_empty_tensor(draw: str) -> None:
    assert DRAWS[draw]([], [], 5).shape == (0, 5)


def test_seeds_beyond_64_bits_wrap_and_negative_ones_are_seeds() -> None:
    assert torch.equal(uniform([2**64 + 3], [0], 5, "x"), uniform([3], [0], 5, "x"))
    assert not torch.equal(uniform([-3], [0], 5, "x"), uniform([3], [0], 5, "x"))


def test_the_numbers_do_not_depend_on_torchs_seed() -> None:
    torch.manual_seed(1)
    first = normal([4], [2], 50)
    torch.manual_seed(2)
    assert torch.equal(normal([4], [2], 50), first)


# --- what they are for -----------------------------------------------------------------------------------


def test_the_gumbel_argmax_is_a_sample() -> None:
    """Chi-square over 200,000 draws from a distribution with a tail of 1e-3 and less."""
    probs = np.arange(1, 41.0) ** -2.0
    probs /= probs.sum()
    scores = torch.from_numpy(np.log(probs)) + gumbel([11] * 200_000, list(range(200_000)), 40)
    counts = np.bincount(scores.argmax(-1).numpy(), minlength=40)
    assert stats.chisquare(counts, probs * counts.sum()).pvalue > LEVEL

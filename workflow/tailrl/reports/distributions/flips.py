"""Flips, tokens that get other experts in the trainer than in an engine: by layer, and by the router's margin.

Positions are of tokens in their responses. Intervals are clustered by problem.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrl.reports.distributions.numbers import Compared
from tailrl.stats.intervals import Interval, ratio_interval

MARGINS = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, math.inf)
"""Edges of the bins of a router's margin, nats."""

NARROW = 0.03
"""A margin below this, in nats, is narrow: bfloat16 rounds a logit of 8 by up to 0.03."""


@dataclass(frozen=True, slots=True)
class LayerFlips:
    """The tokens of one engine in one layer of experts, or over all.

    Attributes:
        layer: its number, from 1; `mean`: every token in every layer; `any`: tokens that flip in some layer.
        positions: tokens that were compared; `mean` counts a token in each layer.
        flip_share: the share of them that flip.
        first_share: of the tokens that flip in no earlier layer, the share that flips here. NaN for `mean` and `any`.
        margin_median: median of the trainer's margin, nats; for `any` of a token's smallest one.
        narrow_share: the share of margins below NARROW.
    """

    engine: str
    layer: str
    positions: int
    flips: int
    flip_share: Interval
    first_share: Interval
    margin_median: float
    narrow_share: Interval


@dataclass(frozen=True, slots=True)
class MarginFlips:
    """Tokens of one engine whose margin lies in [margin_from, margin_to), nats, in one layer or, `mean`, in each.

    Attributes:
        positions: such tokens; share: of all tokens of the row's layer.
        flip_share: the share of them that flips.
    """

    engine: str
    layer: str
    margin_from: float
    margin_to: float
    positions: int
    share: Interval
    flips: int
    flip_share: Interval


@dataclass(frozen=True, slots=True)
class ProblemFlips:
    """Tokens of one problem's responses in one layer whose margin lies in [margin_from, margin_to), nats."""

    engine: str
    layer: str
    problem: int
    margin_from: float
    margin_to: float
    positions: int
    flips: int


def routed(compared: Compared) -> bool:
    """Whether the engine said which experts it chose."""
    return "expert_flip_PL" in compared.arrays


def flips_by_layer(compared: Compared) -> Iterator[LayerFlips]:
    """The rows of one engine: each layer, their mean, and any; none without routes."""
    if not routed(compared):
        return
    flip_PL, margin_PL = compared.arrays["expert_flip_PL"], compared.arrays["margin_PL"]
    for layer in range(flip_PL.shape[1]):
        before_PL = ~_any(flip_PL[:, :layer])
        one = slice(layer, layer + 1)
        yield _of_layer(compared, str(layer + 1), flip_PL[:, one], margin_PL[:, one], before_PL)
    yield _of_layer(compared, "mean", flip_PL, margin_PL, np.zeros_like(flip_PL))
    any_P1, least_P1 = _any(flip_PL), margin_PL.min(1, keepdims=True)
    yield _of_layer(compared, "any", any_P1, least_P1, np.zeros_like(any_P1))


def _any(flip_PL: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Whether a token flips in one of these layers, [P, 1]; without a layer it does not."""
    return np.asarray(flip_PL.any(1))[:, None]


def _of_layer(
    compared: Compared, layer: str, flip_PL: NDArray[Any], margin_PL: NDArray[Any], before_PL: NDArray[Any]
) -> LayerFlips:
    """A row of these layers; `before_PL` marks the tokens that flipped in no earlier layer."""
    clusters_P, whole_PL = compared.clusters, np.ones_like(flip_PL)
    return LayerFlips(
        compared.engine,
        layer,
        flip_PL.size,
        int(flip_PL.sum()),
        _share(flip_PL, whole_PL, clusters_P),
        _share(flip_PL & before_PL, before_PL, clusters_P),
        float(np.median(margin_PL)),
        _share(margin_PL < NARROW, whole_PL, clusters_P),
    )


def flips_by_margin(compared: Compared) -> Iterator[MarginFlips]:
    """The rows of one engine, a bin of the margin each: of each layer, then of all; none without routes."""
    if not routed(compared):
        return
    flip_PL, margin_PL = compared.arrays["expert_flip_PL"], compared.arrays["margin_PL"]
    layers = {str(layer + 1): slice(layer, layer + 1) for layer in range(flip_PL.shape[1])}
    for name, own in {**layers, "mean": slice(None)}.items():
        for low, high in itertools.pairwise(MARGINS):
            # A token that gets every expert has no margin: infinite, it is in the last bin.
            inside_PL = (margin_PL[:, own] >= low) & ((margin_PL[:, own] < high) | (high == math.inf))
            flipped_PL = flip_PL[:, own] & inside_PL
            yield MarginFlips(
                compared.engine,
                name,
                low,
                high,
                int(inside_PL.sum()),
                _share(inside_PL, np.ones_like(inside_PL), compared.clusters),
                int(flipped_PL.sum()),
                _share(flipped_PL, inside_PL, compared.clusters),
            )


def flips_by_problem(compared: Compared) -> Iterator[ProblemFlips]:
    """What the intervals of the other two are computed from; none without routes."""
    if not routed(compared):
        return
    flip_PL, margin_PL = compared.arrays["expert_flip_PL"], compared.arrays["margin_PL"]
    # Edges as numbers of the margins, as in the comparisons above: a margin on an edge is in the upper bin.
    bin_PL = np.searchsorted(np.array(MARGINS[1:-1], margin_PL.dtype), margin_PL, side="right")
    problems, problem_P = np.unique(compared.clusters, return_inverse=True)
    bins = len(MARGINS) - 1
    for layer in range(flip_PL.shape[1]):
        cell_P = problem_P * bins + bin_PL[:, layer]
        positions = np.bincount(cell_P, minlength=len(problems) * bins)
        flips = np.bincount(cell_P, flip_PL[:, layer], len(problems) * bins).astype(int)
        for cell, (number, place) in enumerate(itertools.product(problems, range(bins))):
            margins = MARGINS[place], MARGINS[place + 1]
            counts = int(positions[cell]), int(flips[cell])
            yield ProblemFlips(compared.engine, str(layer + 1), int(number), *margins, *counts)


def _share(hit_PL: NDArray[Any], of_PL: NDArray[Any], clusters_P: NDArray[Any]) -> Interval:
    """The share of the marked tokens and layers that are hit, clustered by problem; NaN where none is marked."""
    return ratio_interval(hit_PL.sum(1), of_PL.sum(1), clusters_P)

"""Flips by layer and by margin against counts that are written out, and files that cannot be used."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailrl.artifacts.manifest import MANIFEST, files_in, write_manifest
from tailrl.artifacts.probes import WHERE, ExpertFlips, Positions, read_positions
from tailrl.reports.distributions.flips import MARGINS, NARROW, flips_by_layer, flips_by_margin, flips_by_problem
from tailrl.reports.distributions.numbers import Compared
from tailrl.runtime.errors import StudyError
from tailrl.stats.intervals import cluster_interval, ratio_interval

P, L = 400, 3


@pytest.fixture
def compared() -> Compared:
    """Flips that are likelier at a small margin, and in the last layer."""
    rng = np.random.default_rng(0)
    margin_PL = np.exp(rng.normal(-2, 2, (P, L))).astype(np.float32)
    margin_PL[:3, 0] = 0.0, NARROW, np.inf  # the edges of bins
    flip_PL = rng.random((P, L)) < np.array([0.5, 0.5, 1.0]) * np.exp(-margin_PL)
    return Compared("one", {}, {"problem_P": np.arange(P) // 4, "expert_flip_PL": flip_PL, "margin_PL": margin_PL})


def test_by_layer(compared: Compared) -> None:
    flip_PL, margin_PL = compared.arrays["expert_flip_PL"].tolist(), compared.arrays["margin_PL"].tolist()
    rows = list(flips_by_layer(compared))
    assert [row.layer for row in rows] == ["1", "2", "3", "mean", "any"]
    for layer, row in enumerate(rows[:L]):
        own = [flips[layer] for flips in flip_PL]
        first = [flips[layer] for flips in flip_PL if not any(flips[:layer])]
        assert (row.positions, row.flips) == (P, sum(own))
        assert row.flip_share == cluster_interval(own, compared.clusters) and row.flip_share.n == P // 4
        assert row.first_share.mean == pytest.approx(sum(first) / len(first))
        assert row.narrow_share.mean == pytest.approx(sum(m[layer] < np.float32(NARROW) for m in margin_PL) / P)
        assert row.margin_median == pytest.approx(np.median([m[layer] for m in margin_PL]))
    assert rows[1].first_share != rows[1].flip_share and rows[0].first_share == rows[0].flip_share
    every, some = rows[L:]
    assert (every.positions, every.flips) == (P * L, sum(map(sum, flip_PL)))
    assert every.flip_share.mean == pytest.approx(np.mean([row.flip_share.mean for row in rows[:L]]))
    assert (some.positions, some.flips) == (P, sum(map(any, flip_PL)))
    assert some.margin_median == pytest.approx(np.median([min(m) for m in margin_PL]))
    assert np.isnan(every.first_share.mean) and np.isnan(some.first_share.mean)


def test_by_margin(compared: Compared) -> None:
    flip_PL, margin_PL = compared.arrays["expert_flip_PL"], compared.arrays["margin_PL"]
    rows = list(flips_by_margin(compared))
    bins = len(MARGINS) - 1
    assert [row.layer for row in rows] == [layer for layer in ("1", "2", "3", "mean") for _ in range(bins)]
    for number, row in enumerate(rows):
        layers = [number // bins] if row.layer != "mean" else range(L)
        pairs = [(m, f) for layer in layers for m, f in zip(margin_PL[:, layer], flip_PL[:, layer], strict=True)]
        last = row.margin_to == np.inf
        inside = [f for m, f in pairs if m >= np.float32(row.margin_from) and (last or m < np.float32(row.margin_to))]
        assert (row.positions, row.flips) == (len(inside), sum(inside))
        assert row.share.mean == pytest.approx(len(inside) / len(pairs))
        assert row.flip_share.mean == pytest.approx(sum(inside) / len(inside))
    assert sum(row.positions for row in rows[-bins:]) == P * L, "every token in every layer has a bin"


def test_an_engine_without_routes_has_no_rows(compared: Compared) -> None:
    plain = Compared("one", {}, {"problem_P": compared.clusters})
    assert [*flips_by_layer(plain), *flips_by_margin(plain), *flips_by_problem(plain)] == []


def test_the_intervals_come_from_the_counts_by_problem(compared: Compared) -> None:
    """Of each layer and of their mean, over all margins and in a bin."""
    rows = list(flips_by_problem(compared))
    assert {row.problem for row in rows} == set(range(P // 4))
    shares = {(row.layer, None): row.flip_share for row in flips_by_layer(compared)}
    shares |= {(row.layer, row.margin_from): row.flip_share for row in flips_by_margin(compared)}
    for (layer, margin), expected in shares.items():
        if layer != "any":
            own = [row for row in rows if row.layer == layer or layer == "mean"]
            own = [row for row in own if margin in (None, row.margin_from)]
            found = ratio_interval([r.flips for r in own], [r.positions for r in own], [r.problem for r in own])
            ends = (expected.mean, expected.low, expected.high)
            assert (found.mean, found.low, found.high) == pytest.approx(ends, rel=1e-12, nan_ok=True)


def written(folder: Path, **changes: Any) -> Path:
    """positions.npz with one number for each of two positions, and flips of three layers."""
    names = [*WHERE, *Positions.__slots__]
    more = {"expert_flip_PL": np.ones((2, 3), bool), "margin_PL": np.ones((2, 3), np.float32)} | changes
    kept = {name: values for name, values in more.items() if values is not None}
    np.savez_compressed(folder / "positions.npz", **dict.fromkeys(names, np.zeros(2)), **kept)
    write_manifest(folder / MANIFEST, files_in(folder))
    return folder


def test_experts_are_read_where_the_engine_says_them(tmp_path: Path) -> None:
    assert set(ExpertFlips.__slots__) <= read_positions(written(tmp_path), routed=True).keys()
    assert not set(ExpertFlips.__slots__) & read_positions(tmp_path).keys()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"margin_PL": None}, "has no margin_PL"),
        ({"expert_flip_PL": None}, "has no expert_flip_PL"),
        ({"margin_PL": np.ones((3, 3))}, "its arrays hold 2, 3 numbers"),
        ({"margin_PL": np.ones((2, 2))}, "do not hold one number a layer"),
        ({"margin_PL": np.ones(2), "expert_flip_PL": np.ones(2, bool)}, "do not hold one number a layer"),
    ],
)
def test_arrays_that_do_not_fit_are_named(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=words) as caught:
        read_positions(written(tmp_path, **changes), routed=True)
    assert str(caught.value).startswith(f"{tmp_path / 'positions.npz'}: ")

"""The tables by lag and by depth, against sums over single tokens in float64."""

import math

import numpy as np
import pytest

from tailrl.diagnosis.diagnosis import diagnose_parts
from tailrl.diagnosis.lags import LagsAndDepths, Sizes, lag_words
from tailrl.diagnosis.log import LoggedRow, pack
from tailrl.diagnosis.page import html_page

LAGS = (0, 0, 1, 3, 12, -2, math.nan)


def rows(count: int = 210, seed: int = 3) -> list[LoggedRow]:
    """Responses of 1 to 40 tokens; a response's noise grows with its lag."""
    random = np.random.default_rng(seed)
    made = []
    for number in range(count):
        lag, length = LAGS[number % len(LAGS)], int(random.integers(1, 41))
        sampler_T = -random.exponential(1.0, length)
        noise_T = random.normal(0, 0.02 * (1 + abs(np.nan_to_num(lag))), length) * random.standard_t(3, length)
        trainer_T = np.minimum(sampler_T + noise_T, 0.0)
        made.append(
            LoggedRow(where=str(number), sampler_T=sampler_T, trainer_T=trainer_T, step=20.0, version=20.0 - lag)
        )
    return made


def table(made: list[LoggedRow], parts: int = 3) -> LagsAndDepths:
    sizes = LagsAndDepths()
    for part in range(parts):
        sizes.add(pack(made[part::parts]))
    return sizes


def delta(row: LoggedRow) -> np.ndarray:
    return row.trainer_T - row.sampler_T


def test_each_lag_has_the_numbers_of_its_own_tokens():
    made = rows()
    found = {row.name: row.sizes for row in table(made).lags()}
    expected = {"below 0": [-2], "0": [0], "1": [1], "3": [3], "9 to 16": [12], "not logged": [math.nan]}
    assert list(found) == list(expected)
    for name, (lag,) in expected.items():
        those = [row for row in made if row.step - row.version == lag or (lag != lag and row.version != row.version)]
        check(found[name], [delta(row) for row in those])
        whole_S = np.array([delta(row).sum() for row in those])
        assert found[name].responses == len(those)
        assert found[name].ess_responses == pytest.approx(
            np.exp(whole_S).sum() ** 2 / (len(whole_S) * np.exp(2 * whole_S).sum()), rel=1e-12
        )


def test_each_depth_has_the_tokens_of_its_places():
    made = rows()
    found = {row.name: row.sizes for row in table(made).depths()}
    places = {"1": (1, 1), "2": (2, 2), "3 to 4": (3, 4), "5 to 8": (5, 8), "9 to 16": (9, 16), "17 to 32": (17, 32)}
    for name, (least, most) in (places | {"33 to 64": (33, 64)}).items():
        check(found[name], [delta(row)[least - 1 : most] for row in made])
    assert len(found) == 7


def check(row, parts) -> None:
    """A row against the tokens themselves: sums to rounding, quantiles to the 1 % of a bin."""
    delta_T = np.concatenate(parts)
    size_T = np.abs(delta_T)
    assert row.tokens == len(delta_T)
    assert row.total / row.tokens == pytest.approx(delta_T.mean(), rel=1e-9, abs=1e-15)
    assert row.mean_abs == pytest.approx(size_T.mean(), rel=1e-12)
    assert row.largest == size_T.max()
    assert row.beyond.tolist() == [(size_T > nats).sum() for nats in (0.5, 1.0, 2.0)]
    ratio_T = np.exp(delta_T)
    assert row.ess == pytest.approx(ratio_T.sum() ** 2 / (len(ratio_T) * (ratio_T**2).sum()), rel=1e-12)
    for value, values_T, share in (
        (row.quantile(0.5), size_T, 0.5),
        (row.p99_abs, size_T, 0.99),
        (row.median, delta_T, 0.5),
    ):
        exact = np.sort(values_T)[math.ceil(share * len(values_T)) - 1]
        assert value == pytest.approx(exact, rel=0.006, abs=1e-9)


def test_responses_far_from_each_other_have_their_effective_sample_size():
    whole_S = np.array([-2000.0, -3.0, 700.0, 699.0])
    sizes = Sizes()
    for part_S in (whole_S[:1], whole_S[1:3], whole_S[3:]):
        sizes.add_responses(part_S)
    weight_S = np.exp(whole_S - 700.0)
    assert sizes.ess_responses == pytest.approx(weight_S.sum() ** 2 / (4 * (weight_S**2).sum()), rel=1e-12)


def test_two_halves_add_up_to_the_whole():
    made = rows()
    for halves in ((made[:100], made[100:]), (made[100:], made[:100])):
        whole, half, other = (table(part, 1).by_lag[0] for part in (made, *halves))
        half.merge(other)
        assert (half.counts == whole.counts).all()
        assert (half.tokens, half.responses, half.largest) == (whole.tokens, whole.responses, whole.largest)
        assert half.ess_responses == pytest.approx(whole.ess_responses, rel=1e-12)


def test_equal_numbers_are_zero_and_unsound_ones_are_left_out():
    sampler_T, trainer_T = np.array([-1.0, -1.0, np.nan, -np.inf, 0.5]), np.array([-1.0, -2.5, -1.0, -1.0, -1.0])
    (row,) = table([LoggedRow(where="", sampler_T=sampler_T, trainer_T=trainer_T, step=1, version=1)], 1).lags()
    assert (row.sizes.tokens, row.sizes.largest, row.sizes.quantile(0.5)) == (2, 1.5, 0.0)


def test_the_diagnosis_and_its_page_have_both_tables():
    found = diagnose_parts([("plain", pack(rows()))])
    assert [row.name for row in found.lags][:2] == ["below 0", "0"]
    page = html_page(found)
    floor = next(row for row in found.lags if row.name == "0")
    assert f"the engine's floor is {floor.sizes.mean_abs:.3g} nats".replace("'", "&#39;") in page
    assert '<th scope="row">17 to 32</th>' in page


def test_without_lag_0_the_floor_is_not_known():
    made = [row for row in rows() if row.step - row.version in (1, 3)]
    assert "floor is not known" in lag_words(table(made).lags())


def test_a_log_without_versions_says_so():
    made = [LoggedRow(where=row.where, sampler_T=row.sampler_T, trainer_T=row.trainer_T, step=3.0) for row in rows()]
    found = diagnose_parts([("plain", pack(made))])
    assert found.lags == ()
    assert "no version of the sampler" in html_page(found)

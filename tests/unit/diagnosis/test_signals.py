"""What tells causes apart, against plain loops and against what is planted; in any cut of the log."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from causes_fixture import Logits, V, log_softmax, rows, same, top_p

from tailrl.diagnosis.features import every, features, pattern, quantile, source, temperature
from tailrl.diagnosis.log import LoggedRow, pack
from tailrl.diagnosis.measure import Measured, measure
from tailrl.diagnosis.signals import LAGS, LOGIT_EDGE, PATTERNS, Signals, log_odds


def signals_of(found: list[LoggedRow]) -> Signals:
    return measure([("a", pack(found))]).signals


def test_sums_against_loops() -> None:
    found = rows(noise=0.3, count=9)
    sums = signals_of(found).sums
    pairs = [(t, s) for row in found for t, s in zip(row.trainer_T, row.sampler_T, strict=True)]
    assert sums["tokens"] == len(pairs)
    assert sums["squared"] == pytest.approx(sum((t - s) ** 2 for t, s in pairs))
    assert sums["positive"] == pytest.approx(sum((t - s) ** 2 for t, s in pairs if t > s))
    head = [(t, s) for t, s in pairs if (t + s) / 2 > -0.05]
    assert sums["head_signed"] == pytest.approx(sum(t - s for t, s in head))
    assert sums["head_rest"] == pytest.approx(sum(1 - math.exp((t + s) / 2) for t, s in head))
    assert sums["sure_and_not"] == sum(s > -0.05 and t < -3 for t, s in pairs)
    neighbours = 0.0
    for row in found:
        x = [(t - s) / max(1 - math.exp((t + s) / 2), 1e-4) for t, s in zip(row.trainer_T, row.sampler_T, strict=True)]
        x = [min(3.0, max(-3.0, value)) for value in x]
        neighbours += sum(a * b for a, b in pairwise(x))
    assert sums["neighbours"] == pytest.approx(neighbours)
    cut = [(min(abs(t - s), 3.0) ** 2, s) for t, s in pairs]
    assert sums["lost"] == pytest.approx(sum(value for value, s in cut if s > -0.05)) and sums["lost"] > 0
    found = features(signals_of(found))
    assert found["amount"] == pytest.approx(math.log10(sum(value for value, _ in cut) / len(cut)) / 2)


def test_a_cut_changes_nothing() -> None:
    found = [replace(row, reward=float(i % 2)) for i, row in enumerate(rows(noise=0.3, count=20))]
    cut = Measured()
    for part in (found[:3], found[3:4], found[4:]):
        cut.add("a", pack(part))
    assert features(cut.signals) == pytest.approx(features(signals_of(found)))
    assert cut.signals.least("trainer")[0] == min(row.trainer_T.min() for row in found)


@pytest.mark.parametrize("lag", [-2, -1, 1, 2])
def test_the_lag_is_the_planted_one(lag: int) -> None:
    """The trainer's number for a token stands `lag` places later."""
    found = [replace(row, trainer_T=np.roll(row.trainer_T, lag)) for row in rows(noise=0.01, count=30)]
    signals = signals_of(found)
    assert LAGS[int(signals.shifted.argmax())] == lag and signals.shifted.max() == signals.compared == 30


def test_lags_stay_within_a_sequence() -> None:
    tokens, _ = signals_of(rows(count=10, length=5)).lag_sums
    lengths = [5 + i % 5 for i in range(10)]
    assert tokens.tolist() == [sum(n - abs(lag) for n in lengths) for lag in LAGS]


@pytest.mark.parametrize("ratio", [0.6, 0.9, 1.2, 1.5])
def test_the_ratio_of_temperatures_is_found_where_one_token_has_the_rest(ratio: float) -> None:
    random = np.random.default_rng(0)
    logit_T = random.normal(0, 3, 4000)
    trainer_T, sampler_T = (-np.logaddexp(0, -logit_T / t) for t in (1.0, ratio))
    found, explained = temperature(signals_of([LoggedRow("here", sampler_T, trainer_T)]))
    assert found == pytest.approx(ratio, rel=0.06) and explained > 0.95


@pytest.mark.parametrize("others", [16, 64])
@pytest.mark.parametrize("ratio", [0.7, 1.4])
def test_the_ratio_of_temperatures_is_found_where_many_tokens_share_the_rest(ratio: float, others: int) -> None:
    random = np.random.default_rng(0)
    logit_T = random.normal(0, 3, 4000)
    trainer_T, sampler_T = (-np.logaddexp(0, np.log(others) - logit_T / t) for t in (1.0, ratio))
    found, explained = temperature(signals_of([LoggedRow("here", sampler_T, trainer_T)]))
    assert found == pytest.approx(ratio, rel=0.06) and explained > 0.95


def test_whether_every_response_is_hit() -> None:
    """Σℓ/√T of each response: its mean over its standard deviation."""
    found = [LoggedRow("here", np.full(4, -1.0), np.full(4, -1.0 - 0.1 * (i % 2) - 0.3)) for i in range(10)]
    assert every(signals_of(found)) == -5.0, "−7, cut"
    mixed = [LoggedRow("here", np.full(4, -1.0), np.full(4, -1.0 - 0.5 * (i == 3))) for i in range(10)]
    assert every(signals_of(mixed)) == pytest.approx(-0.1 / 0.3)
    assert every(signals_of(mixed[:7])) == 0.0, "few responses say nothing"


def errors(x_T: list[float], tokens: list[int]) -> Signals:
    """Tokens of probability one half, whose x is given."""
    found, p = np.array(x_T), np.log(0.5)
    row = LoggedRow("here", p - found / 4, p + found / 4, np.array(tokens))
    return signals_of([row])


def test_a_pattern_is_the_share_of_variance_between_groups() -> None:
    """Against the plain estimate from an analysis of variance of unequal groups."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 7, 300)
    x_T = random.normal(0, 0.3, 300) + np.linspace(-0.4, 0.4, 7)[tokens]
    groups = [x_T[tokens == g] for g in range(7)]
    within = sum(((own - own.mean()) ** 2).sum() for own in groups) / (300 - 7)
    between = sum(len(own) * (own.mean() - x_T.mean()) ** 2 for own in groups) / 6
    size = (300 - sum(len(own) ** 2 for own in groups) / 300) / 6
    expected = (between - within) / (between + (size - 1) * within)
    assert pattern(errors(list(x_T), list(tokens)), "token") == pytest.approx(expected, abs=1e-3) and expected > 0.3


def test_noise_has_no_pattern() -> None:
    """Nor have few tokens; a factor on the logits, as of a mistake inside a model, goes with the probability."""
    random = np.random.default_rng(1)
    noise = errors(list(random.normal(0, 0.3, 3000)), list(random.integers(0, 200, 3000)))
    assert abs(pattern(noise, "token")) < 0.05
    assert pattern(errors([0.1, 0.2], [3, 4]), "token") == 0.0 and pattern(Signals(), "odds") == 0.0
    wrong, noisy = (features(signals_of(rows(**log))) for log in ({"trainer": lambda z: 1.3 * z}, {"noise": 0.05}))
    assert wrong["by_odds"] > 0.3 > 0.05 > noisy["by_odds"] and wrong["bias"] > noisy["bias"]


def test_groups_of_patterns() -> None:
    """Each token is in one group of each kind: by the log-odds of p̄, its id, its place."""
    found = rows(noise=0.3, count=5, length=70)
    patterns = signals_of(found).patterns
    tokens = sum(len(row.sampler_T) for row in found)
    assert {name: groups[0].sum() for name, groups in patterns.items()} == dict.fromkeys(PATTERNS, tokens)
    assert patterns["place"][0, 5] == 5 and patterns["place"][0, 63] == tokens - 5 * 63
    means = np.concatenate([(row.trainer_T + row.sampler_T) / 2 for row in found])
    odds = means - np.log(-np.expm1(means))
    assert patterns["odds"][0, 10] == ((odds >= 1) & (odds < 2)).sum()
    ids = np.concatenate([row.token_T for row in found if row.token_T is not None])
    assert patterns["token"][0, ids[0]] == (ids == ids[0]).sum()


def test_the_source_of_the_tokens() -> None:
    """E[d] / E[d²]: −1 for tokens of the logged distribution, +1 for the trainer's, far below for a part of it."""

    def cool(logits_TV: Logits) -> Logits:
        return logits_TV / 0.6

    assert source(signals_of(rows(sampler=cool))) < -0.5
    assert source(signals_of(rows(sampler=cool, trainer=cool, logged=same))) > 0.5
    assert source(signals_of(rows(sampler=top_p(0.9)))) < -5
    assert source(signals_of(rows(count=5))) == pytest.approx(-1)  # no mismatch says nothing


def test_the_identity_behind_the_source() -> None:
    """With m = (p + q)/2: Σ q d = −Σ m d² and Σ p d = Σ m d², for any two distributions."""
    p_V, q_V = (np.exp(log_softmax(z)) for z in np.random.default_rng(0).normal(0, 2, (2, V)))
    d_V = np.tanh(np.log(p_V / q_V) / 2)
    squared = ((p_V + q_V) / 2 * d_V**2).sum()
    assert (q_V * d_V).sum() == pytest.approx(-squared) and (p_V * d_V).sum() == pytest.approx(squared)


def test_a_filling_is_left_out_and_a_truncated_sampler_is_not() -> None:
    """A run of exact zeros with an improbable token is a filling; exact zeros at probable tokens are top-p's."""
    found = rows(count=20)
    padded = [
        replace(
            row,
            sampler_T=np.append(row.sampler_T, [0.0, 0.0]),
            trainer_T=np.append(row.trainer_T, [-0.7, -8.0]),
            token_T=None,
        )
        for row in found
    ]
    signals = signals_of(padded)
    assert signals.zeros == {"sampler": 40, "trainer": 0}
    assert signals.sums["tokens"] == sum(len(row.sampler_T) for row in found)
    truncated = rows(sampler=top_p(0.8), count=50)
    assert sum((row.sampler_T == 0).sum() for row in truncated) > 100
    assert signals_of(truncated).zeros == {"sampler": 0, "trainer": 0}


def test_quantiles() -> None:
    found = rows(noise=0.2, count=60)
    x = np.concatenate(
        [
            np.abs(row.trainer_T - row.sampler_T) / np.maximum(1 - np.exp((row.trainer_T + row.sampler_T) / 2), 1e-4)
            for row in found
        ]
    )
    for share in (0.5, 0.9):
        assert quantile(signals_of(found).sizes, share) == pytest.approx(np.log10(np.quantile(x, share)), abs=0.06)


def test_the_fixture_logs_what_it_drew() -> None:
    logits_TV = np.random.default_rng(0).normal(size=(3, V))
    assert np.exp(log_softmax(logits_TV)).sum(-1) == pytest.approx(np.ones(3))
    kept_TV = np.isfinite(top_p(0.5)(logits_TV))
    mass_T = (np.exp(log_softmax(logits_TV)) * kept_TV).sum(-1)
    assert (mass_T >= 0.5).all() and (mass_T < 0.5 + np.exp(log_softmax(logits_TV)).max(-1)).all()


def test_odd_and_empty_parts() -> None:
    signals = Signals()
    log = pack([LoggedRow("here", np.array([np.nan, -1.0]), np.array([-1.0, np.inf]))])
    signals.add(log, np.isfinite(log.sampler_T) & np.isfinite(log.trainer_T))
    assert not signals.sums and not signals.compared


def test_log_odds() -> None:
    p = np.array([0.5, 0.25, 1e-30, 1.0])
    assert log_odds(np.log(p)) == pytest.approx([0, math.log(1 / 3), -LOGIT_EDGE, LOGIT_EDGE])

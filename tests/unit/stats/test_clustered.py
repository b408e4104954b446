"""Intervals for runs clustered in arms, and the permutation test over arms: against enumeration and simulation."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import special, stats
from slow_cases import slow_but

from tailrl.stats import clustered
from tailrl.stats.clustered import clustered_median, clustered_share, shuffled_skill
from tailrl.stats.intervals import share_interval

TRIALS = 600
ERROR = 3 * math.sqrt(0.05 * 0.95 / TRIALS)


# --- intervals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hits", "n"), [(0, 9), (9, 9), (1, 1), (1, 2), (3, 10), (7, 50), (199, 200)])
def test_one_run_per_arm_gives_clopper_and_pearsons_interval(hits: int, n: int) -> None:
    found = clustered_share([1] * hits + [0] * (n - hits), range(n))
    exact = stats.binomtest(hits, n).proportion_ci(0.95, method="exact")
    assert (found.mean, found.n) == (hits / n, n)
    assert (found.low, found.high) == pytest.approx((exact.low, exact.high), abs=1e-12)


def test_the_effective_number_of_runs_is_korn_and_graubards() -> None:
    """With equal arms, the variance of a share is the variance of the arms' shares divided by their number."""
    hits_AR = np.array([[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 1, 0]])
    share, n = hits_AR.mean(), hits_AR.size
    design = hits_AR.mean(axis=1).var(ddof=1) / 6 / (share * (1 - share) / (n - 1))
    size = n / design * (stats.t.ppf(0.975, n - 1) / stats.t.ppf(0.975, 5)) ** 2
    found = clustered_share(hits_AR.ravel(), np.repeat(list("abcdef"), 4))
    # The ends are where a tail of the binomial distribution, continued to a size that is no whole number, is 2.5 %.
    assert special.betainc(share * size, size - share * size + 1, found.low) == pytest.approx(0.025)
    assert special.betainc(share * size + 1, size - share * size, found.high) == pytest.approx(0.975)
    assert 3 < size < 6 and found.n == 6


def test_each_arm_counts_once_if_the_variance_is_unknown() -> None:
    """This is so if a single arm has all hits, or all misses: a second hit in it narrows nothing."""
    arm = np.repeat(np.arange(4), 5)
    for hits in (1, 2, 5):
        found = clustered_share(np.arange(20) < hits, arm)
        assert special.betainc(hits / 5 + 1, 4 - hits / 5, found.high) == pytest.approx(0.975), "4 runs"
    assert clustered_share(np.ones(20), arm).low == pytest.approx(stats.binomtest(4, 4).proportion_ci(0.95).low)
    assert clustered_share(np.zeros(20), arm).high == pytest.approx(stats.binomtest(0, 4).proportion_ci(0.95).high)
    alone = clustered_share([1, 1, 0], ["a"] * 3)
    assert alone.low < 0.05 and alone.high > 0.95
    # Arms that are more alike than chance would have it are worth no more than their runs.
    for last in (0, 1):
        exact = stats.binomtest(10 + last, 20).proportion_ci(0.95)
        found = clustered_share([last, 1, *[0, 1] * 9], np.repeat(np.arange(10), 2))
        assert (found.low, found.high) == pytest.approx((exact.low, exact.high))
    nothing = clustered_share([], [])
    assert math.isnan(nothing.mean) and math.isnan(nothing.low) and nothing.n == 0


SHARES = [(8, 0.5, 0.5), (14, 0.7, 0.8), (42, 0.2, 0.9), (25, 0.1, 0.95)]
MEDIANS = [(9, 0.7), (14, 0.8), (30, 0.8)]


@pytest.mark.parametrize("case", slow_but(SHARES[1:2], SHARES))
def test_intervals_of_shares_cover(case: tuple[int, float, float]) -> None:
    """Beta-binomial arms of 1 to 5 runs with the correlation `alike`. Wilson's interval would not cover."""
    arms, share, alike = case
    rng, both = np.random.default_rng(arms), 1 / alike - 1  # of the beta distribution, its two parameters together
    held = np.zeros((TRIALS, 2))
    for trial in range(TRIALS):
        arm = np.repeat(np.arange(arms), rng.integers(1, 6, arms))
        hit = rng.random(arm.size) < rng.beta(share * both, (1 - share) * both, arms)[arm]
        found = clustered_share(hit, arm), share_interval(int(hit.sum()), hit.size)
        held[trial] = [interval.low <= share <= interval.high for interval in found]
    assert held[:, 0].mean() >= 0.95 - ERROR
    assert held[:, 1].mean() < 0.85


@pytest.mark.parametrize("n", [1, 5, 6, 7, 8, 9, 15, 16, 40])
def test_one_run_per_arm_gives_order_statistics_for_the_median(n: int) -> None:
    """The outermost values beyond which the median lies with a probability of at most 2.5 % each."""
    values = np.random.default_rng(n).permutation(np.arange(1.0, n + 1))
    found = clustered_median(values, range(n))
    cuts = [cut for cut in range(1, n) if sum(math.comb(n, k) for k in range(cut)) / 2**n <= 0.025]
    assert (found.mean, found.n) == ((n + 1) / 2, n)
    if cuts:
        assert (found.low, found.high) == (max(cuts), n + 1 - max(cuts))
    else:
        assert n < 6 and math.isnan(found.low) and math.isnan(found.high)


def test_a_median_has_the_effective_number_of_runs_of_the_share_below_it() -> None:
    """A value is an end if the share beyond it could still be a half, given the effective number of runs."""
    values_AR = np.random.default_rng(2).normal(size=(12, 30)) + np.linspace(-0.2, 0.2, 12)[:, None]
    below_A, n = (values_AR <= np.median(values_AR)).mean(axis=1), values_AR.size
    size = 0.25 / (below_A.var(ddof=1) / 12) * (n / (n - 1)) * (stats.t.ppf(0.975, n - 1) / stats.t.ppf(0.975, 11)) ** 2
    assert 40 < size < 300
    hit_M = np.arange(n // 2) / n * size
    cut = int((special.betainc(hit_M + 1, size - hit_M, 0.5) >= 0.975).sum())
    found, ordered = clustered_median(values_AR.ravel(), np.repeat(np.arange(12), 30)), np.sort(values_AR.ravel())
    assert (found.low, found.high) == (ordered[cut - 1], ordered[n - cut])


def test_copies_of_a_run_within_an_arm_add_nothing() -> None:
    values = np.random.default_rng(0).normal(size=17)
    once, often = clustered_median(values, range(17)), clustered_median(np.repeat(values, 6), np.repeat(range(17), 6))
    assert (often.mean, often.n) == (once.mean, 17)
    assert often.low <= once.low and often.high >= once.high
    assert often.low > values.min() and often.high < values.max()
    assert clustered_median([], []).n == 0


@pytest.mark.parametrize("case", slow_but(MEDIANS[1:2], MEDIANS))
def test_intervals_of_medians_cover(case: tuple[int, float]) -> None:
    """Skewed leads of whole steps in arms of 1 to 5 runs, if there is an interval. Order statistics of independent runs
    would not cover."""
    arms, alike = case
    rng = np.random.default_rng(arms)
    held = np.zeros((TRIALS, 2))
    for trial in range(TRIALS):
        arm = np.repeat(np.arange(arms), rng.integers(1, 6, arms))
        own = math.sqrt(alike) * rng.normal(size=arms)[arm] + math.sqrt(1 - alike) * rng.normal(size=arm.size)
        leads = np.round(20 * np.exp(own))
        found = clustered_median(leads, arm), clustered_median(leads, range(arm.size))
        held[trial] = [interval.low <= 20 <= interval.high for interval in found]
        if math.isnan(found[0].low):
            held[trial] = math.nan
    assert np.isnan(held).any(axis=1).mean() < 0.1
    assert np.nanmean(held[:, 0]) >= 0.95 - ERROR
    assert np.nanmean(held[:, 1]) < 0.9


# --- the test that shuffles arms ---------------------------------------------------------------------

NEVER = math.inf
Runs = dict[tuple[str, int], tuple[tuple[float, ...], float]]
"""An arm: by study and seed, the steps of its alarms, by threshold, and of its collapse. Even seeds choose."""

TINY: dict[str, Runs] = {
    "early": {("one", 0): ((20.0, 30.0), 40.0), ("one", 1): ((25.0, 31.0), 45.0)},
    "late": {("one", 0): ((30.0, 33.0), 35.0), ("one", 1): ((44.0, 50.0), 45.0)},  # too late, but not for all
    "calm": {("one", 0): ((NEVER, NEVER), NEVER), ("one", 1): ((33.0, NEVER), NEVER)},
    "still": {("one", 0): ((NEVER, NEVER), NEVER), ("one", 1): ((NEVER, NEVER), NEVER)},
    "false": {("one", 0): ((12.0, NEVER), NEVER), ("one", 1): ((13.0, NEVER), 60.0)},
    "both": {("two", 0): ((15.0, 17.0), 20.0), ("two", 1): ((16.0, 19.0), 20.0), ("six", 1): ((9.0, NEVER), 11.0)},
    "other": {("two", 0): ((NEVER, NEVER), NEVER), ("two", 1): ((8.0, NEVER), NEVER), ("six", 1): ((9.0, 10.0), NEVER)},
    "alone": {("two", 0): ((10.0, NEVER), NEVER)},  # its places are no other arm's: it stays
}


def p_of(arms: Mapping[str, Runs]) -> float:
    runs = [(name, *at, *steps) for name, own in arms.items() for at, steps in own.items()]
    runs = [runs[place] for place in np.random.default_rng(3).permutation(len(runs))]
    names, studies, seeds, alarms, collapses = zip(*runs, strict=True)
    chooses = [seed % 2 == 0 for seed in seeds]
    return shuffled_skill(
        list(zip(*alarms, strict=True)), collapses, chooses, names, list(zip(studies, seeds, strict=True))
    )


def skill(runs: Iterable[tuple[float, float]]) -> float:
    """Sensitivity minus false alarms, run by run."""
    early: dict[bool, list[bool]] = {True: [], False: []}
    for alarm, collapse in runs:
        fell = collapse < math.inf
        early[fell].append(alarm < collapse if fell else alarm < math.inf)
    return sum(early[True]) / len(early[True]) - sum(early[False]) / len(early[False])


def judged(runs: Sequence[tuple[int, tuple[float, ...], float]]) -> float:
    """The skill on odd seeds of the threshold with most skill on even seeds; minus infinity if none has any."""
    even, odd = (
        [skill((alarms[f], collapse) for seed, alarms, collapse in runs if seed % 2 == half) for f in range(2)]
        for half in (0, 1)
    )
    return odd[even.index(max(even))] if max(even) > 1e-12 else -math.inf


def enumerated(arms: Mapping[str, Runs]) -> float:
    """The share of all permutations of whole arms' alarms among arms with runs at the same places."""
    found = []
    for way in itertools.permutations(arms):
        if all(arms[source].keys() == arms[own].keys() for source, own in zip(way, arms, strict=True)):
            pairs = zip(way, arms, strict=True)
            found.append(
                judged([(at[1], arms[source][at][0], arms[own][at][1]) for source, own in pairs for at in arms[own]])
            )
    seen = found[0]  # nothing has changed places
    return float(np.mean([one >= seen - 1e-12 for one in found]))


def test_p_agrees_with_enumeration_of_all_shuffles() -> None:
    exact = enumerated(TINY)
    assert 0.02 < exact < 0.5
    assert p_of(TINY) == pytest.approx(exact, abs=4 * math.sqrt(exact / clustered.SPLITS))
    assert p_of(TINY) == p_of(TINY)
    pair = {name: TINY[name] for name in ("both", "other")}
    assert p_of(pair) == pytest.approx(0.5, abs=0.02), "two arms change places or do not"
    stays = {"alone": TINY["alone"], "early": TINY["early"], "calm": {("two", 1): TINY["calm"]["one", 1]}}
    assert p_of(stays) == 1, "no arm has another to change places with"


def test_p_is_never_0_and_needs_runs_of_both_kinds_and_skill_to_choose_by() -> None:
    def arm(alarm: float, collapse: float) -> Runs:
        return {("s", seed): ((alarm,), collapse) for seed in (0, 1)}

    arms = {str(place): arm(10.0, 20.0) if place < 30 else arm(NEVER, NEVER) for place in range(60)}
    assert p_of(arms) == 1 / (1 + clustered.SPLITS)
    halves = [dict(list(arms.items())[part]) for part in (slice(30), slice(30, None))]
    assert all(math.isnan(p_of(half)) for half in halves)
    assert math.isnan(p_of({"a": {("s", 1): ((1.0,), 2.0)}, "b": {("s", 1): ((1.0,), NEVER)}})), "no run chooses"
    assert math.isnan(p_of({"a": arm(NEVER, 20.0), "b": arm(10.0, NEVER)})), "alarms where none is due"


def made(rng: np.random.Generator, arms: int, seeds: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Independent alarms of eight thresholds, (8, A, S), and collapses, (A, S). Mostly all runs of an arm have them, or
    none."""
    alarms = (rng.random((8, arms)) < 0.5)[:, :, None] ^ (rng.random((8, arms, seeds)) < 0.05)
    collapses = (rng.random(arms) < 0.5)[:, None] ^ (rng.random((arms, seeds)) < 0.05)
    return (
        np.where(alarms, rng.integers(10, 30, alarms.shape), NEVER),
        np.where(collapses, rng.integers(30, 80, collapses.shape), NEVER),
    )


@pytest.mark.slow  # the others of this file
def test_alarms_independent_of_collapses_have_no_skill(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 2.5 % are significant: half or less of those with a test that ignores the choice of the threshold, and a
    tenth of those with Fisher's test, which also assumes independent runs."""
    monkeypatch.setattr(clustered, "SPLITS", 399)
    rng, trials, arms, seeds = np.random.default_rng(5), 800, 12, 8
    arm, seed = np.repeat(np.arange(arms), seeds).tolist(), np.tile(np.arange(seeds), arms).tolist()
    even = np.array(seed) % 2 == 0
    ours, given, fishers = [], [], []
    for _ in range(trials):
        alarms, collapses = made(rng, arms, seeds)
        alarm_FR, collapse = alarms.reshape(8, -1), collapses.ravel()
        ours.append(shuffled_skill(alarm_FR, collapse, even, arm, seed) <= 0.025)
        fell, early_FR = np.isfinite(collapse), alarm_FR < collapse
        if len({*fell[even]}) < 2 or len({*fell[~even]}) < 2:
            continue
        skills = early_FR[:, fell & even].mean(axis=1) - early_FR[:, ~fell & even].mean(axis=1)
        early = early_FR[skills.argmax()]
        if skills.max() <= 0:
            continue
        given.append(shuffled_skill(alarm_FR[[skills.argmax()]], collapse, even, arm, seed) <= 0.025)
        fell, early = fell[~even], early[~even]
        counts = [[(fell & early).sum(), (fell & ~early).sum()], [(~fell & early).sum(), (~fell & ~early).sum()]]
        fishers.append(stats.fisher_exact(counts, alternative="greater").pvalue <= 0.025)
    assert np.mean(ours) <= 0.025 + 3 * math.sqrt(0.025 * 0.975 / trials)
    assert sum(given) / trials >= 0.05
    assert sum(fishers) / trials >= 0.25

"""What whole distributions of engines say about the papers' statements on tails and safe sets, engine by engine.

Units are places of 1,000 responses, clustered by problem; bounds and sets are facts, the sign of Δ has a test.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from tailrl.analysis.distributions import Compared
from tailrl.claims.decide import Verdict
from tailrl.claims.finding import CONTRADICTED, DVP, REPRODUCED, UNDECIDED, UNTESTABLE, VEXACT, interval
from tailrl.config.distributions import TAIL_FROM as TAIL
from tailrl.stats.intervals import CONFIDENCE, Interval, ratio_interval
from tailrl.stats.intervals import ONE_SIDED_LEVEL as LEVEL
from tailrl.stats.tests import holm

BOUND = "dvp.prop4_2.bound"
SIGN = "dvp.prop4_3.sign.whole"
MODE = "dvp.prop4_3.mode"
SECOND = "dvp.prop4_3.second_order"
NESTED = "dvp.safe_set.nested"
EQUAL = "vexact.zero_mismatch.distributions"


def judge_distributions(compared: Sequence[Compared]) -> list[Verdict]:
    """The verdicts, claim by claim: Prop. 4.2's bound, Prop. 4.3's sign and size, Thm 5.3's V_S ⊆ V'_S, equality."""
    # The trainer against itself is a measure of rounding, and no engine.
    engines = [one for one in compared if not one.record["settings"]["engine"]["rescored"]]
    exact = [one for one in engines if one.record["settings"]["engine"]["sampler"]["engine"] == "exact"]
    unequal = [one for one in engines if (one.arrays["delta_max_P"] > 0).any()]
    means = [_tail(one) for one in unequal]
    p_holm = [holm([side[index] for side in map(_one_sided, means)]).tolist() for index in (0, 1)]
    found = [_bound(one) for one in unequal]
    for one, mean, above, below in zip(unequal, means, *p_holm, strict=True):
        outcome = REPRODUCED if above <= LEVEL else CONTRADICTED if below <= LEVEL else UNDECIDED
        words = f"mean −Δ in the tail is {interval(mean.mean, mean.low, mean.high)} nats"
        if math.isnan(mean.mean):
            outcome, words = UNTESTABLE, "no place has a token in the tail"
        p = _two_sided(mean), float(np.minimum(1.0, 2 * np.minimum(above, below)))
        found.append(_line(SIGN, f"{DVP}, Prop. 4.3", one, outcome, words, "nats", mean, p))
    found += _sizes(unequal, means)
    found += [_nested(one, index) for one in engines for index in range(len(one.record["settings"]["rho"]))]
    return found + [_equal(one) for one in exact]


def _bound(one: Compared) -> Verdict:
    """Of the sampled tokens, how many exceed the first-order bound."""
    a = one.arrays
    size_P = np.abs(a["logp_train_P"] - a["logp_infer_P"])
    bound_P = 2 * a["half_range_P"] * -np.expm1(a["logp_train_P"])
    over_P = size_P > bound_P * (1 + 1e-9)
    share = float(over_P.mean())
    most = f", by {100 * float((size_P[over_P] / bound_P[over_P]).max() - 1):.2g} % at most" if over_P.any() else ""
    words = f"{int(over_P.sum())} of {len(over_P)} sampled tokens exceed it{most}"
    outcome = CONTRADICTED if over_P.any() else REPRODUCED
    ends = Interval(share, math.nan, math.nan, len(over_P))
    return _line(BOUND, f"{DVP}, Prop. 4.2", one, outcome, words, "share of tokens", ends)


def _tail(one: Compared, name: str = "signed", *, less: str | None = None) -> Interval:
    """Mean −Δ of tail tokens (`signed`) or what is predicted for them, each counted with the engine's probability of
    it; `less` a prediction, or as it is."""
    tail_B = np.array(one.record["edges"]) >= TAIL
    sums = {key: one.arrays[f"{key}_PB"][:, tail_B].sum(axis=1) for key in ("mass", name, less) if key}
    return ratio_interval(sums[name] - (sums[less] if less else 0.0), sums["mass"], one.clusters)


def _sizes(engines: Sequence[Compared], means: Sequence[Interval]) -> list[Verdict]:
    """The tail's mean −Δ less what is predicted for the same tokens: it can be told from it, or not."""
    tested = [
        (claim, one, mean, _tail(one, predicted), _tail(one, less=predicted))
        for claim, predicted in ((MODE, "paper"), (SECOND, "second"))
        for one, mean in zip(engines, means, strict=True)
        if not math.isnan(mean.mean)
    ]
    raw = [_two_sided(less) for *_, less in tested]
    found = []
    for (claim, one, mean, predicted, less), p, p_holm in zip(tested, raw, holm(raw).tolist(), strict=True):
        outcome = CONTRADICTED if p_holm <= 2 * LEVEL else UNDECIDED
        ends = (f"{interval(part.mean, part.low, part.high)} nats" for part in (mean, predicted))
        words = "mean −Δ in the tail is {}, predicted {}".format(*ends)
        family = "the engines and both predictions"
        found.append(_line(claim, f"{DVP}, Prop. 4.3", one, outcome, words, "nats", less, (p, p_holm), family))
    return found


def _two_sided(mean: Interval) -> float:
    # numpy's minimum keeps a NaN: a mean without an interval is no test.
    return float(np.minimum(1.0, 2 * np.minimum(*_one_sided(mean))))


def _one_sided(mean: Interval) -> tuple[float, float]:
    """p of the tests that the mean is above 0, and below, by the t distribution that its interval is of."""
    if math.isnan(mean.low) or mean.low == mean.high:
        return math.nan, math.nan
    own = stats.t(mean.n - 1)
    t = own.ppf((1 + CONFIDENCE) / 2) * mean.mean / ((mean.high - mean.low) / 2)
    return float(own.sf(t)), float(own.cdf(t))


def _nested(one: Compared, index: int) -> Verdict:
    train_P, both_P = (one.arrays[f"kept_{name}_PS"][:, index] for name in ("train", "both"))
    lacking, rho = int((both_P < train_P).sum()), one.record["settings"]["rho"][index]
    words = (
        f"ρ = {rho}: fails at {lacking} of {len(train_P)} places; overlap {(both_P / train_P).mean():.5f} on average"
    )
    outcome = CONTRADICTED if lacking else REPRODUCED
    ends = Interval(float((both_P < train_P).mean()), math.nan, math.nan, len(train_P))
    return _line(NESTED, f"{DVP}, Thm 5.3 and safe set", one, outcome, words, "share of places", ends)


def _equal(one: Compared) -> Verdict:
    equal_P = one.arrays["delta_max_P"] == 0
    outcome = REPRODUCED if equal_P.all() else CONTRADICTED
    words = f"at {int(equal_P.sum())} of {len(equal_P)} places"
    ends = Interval(float(equal_P.mean()), math.nan, math.nan, len(equal_P))
    return _line(EQUAL, f"{VEXACT}, zero-mismatch reference", one, outcome, words, "share of places", ends)


def _line(
    claim: str, source: str, one: Compared, verdict: str, words: str, unit: str, effect: Interval,
    p: tuple[float, float] = (math.nan, math.nan), family: str = "the engines",
) -> Verdict:  # fmt: skip
    return Verdict(
        id=claim,
        source=source,
        verdict=verdict,
        policy="the study's base policy",
        task="responses of the base policy",
        dose=one.words,
        arms=one.engine,
        seeds=1,
        effect=effect.mean,
        low=effect.low,
        high=effect.high,
        unit=unit,
        p=p[0],
        p_holm=p[1],
        seen=words,
        endpoint=f"Over places; intervals at {100 * CONFIDENCE:.0f} % over problems, p by Holm over {family}.",
    )

"""Verdicts from engines' whole distributions on the papers' statements on tails and safe sets, engine by engine.

Units are positions in 1,000 responses, clustered by problem. Bounds and sets are facts; the sign of Δ has a test.
"""

import math
from collections.abc import Sequence

import numpy as np

from tailrl.artifacts.claims import Verdict
from tailrl.claims.catalogue import CATALOGUE
from tailrl.claims.decide import Line, Scope, decide
from tailrl.claims.finding import Finding, fact
from tailrl.page_parts.number_text import short, with_interval
from tailrl.reports.distributions.numbers import Compared
from tailrl.stats.intervals import Interval, ratio_interval
from tailrl.stats.tests import above_and_below

BOUND = "dvp.prop4_2.bound"
SIGN = "dvp.prop4_3.sign.whole"
MODE = "dvp.prop4_3.mode"
SECOND = "dvp.prop4_3.second_order"
NESTED = "dvp.safe_set.nested"
EQUAL = "vexact.zero_mismatch.distributions"


def judge_distributions(compared: Sequence[Compared]) -> list[Verdict]:
    """The verdicts, claim by claim: Prop. 4.2's bound, Prop. 4.3's sign and size, Thm 5.3's V_S ⊆ V'_S, equality."""
    # The trainer compared with itself measures rounding; it is no engine.
    engines = [one for one in compared if one.settings.engine.rescored is None]
    exact = [one for one in engines if one.settings.engine.sampler.TRAINERS_BITS]
    unequal = [one for one in engines if (one.arrays["delta_max_P"] > 0).any()]
    tailed = [one for one in unequal if not math.isnan(_tail(one).mean)]
    found = [
        *((BOUND, one, _bound(one)) for one in unequal),
        *((SIGN, one, _sign(one)) for one in unequal),
        *((MODE, one, _size(one, "paper")) for one in tailed),
        *((SECOND, one, _size(one, "second")) for one in tailed),
        *((NESTED, one, _nested(one, index)) for one in engines for index in range(len(one.settings.rho))),
        *((EQUAL, one, _equal(one)) for one in exact),
    ]
    policy, task = "the study's base policy", "responses of the base policy"
    return decide([Line(CATALOGUE[claim], Scope(policy, task, one.words), finding) for claim, one, finding in found])


def _bound(one: Compared) -> Finding:
    """How many sampled tokens exceed the first-order bound."""
    a = one.arrays
    size_P = np.abs(a["logp_train_P"] - a["logp_infer_P"])
    bound_P = 2 * a["half_range_P"] * -np.expm1(a["logp_train_P"])
    over_P = size_P > bound_P * (1 + 1e-9)
    excess_P = size_P[over_P] / bound_P[over_P] - 1
    most = f", by {short(100 * float(excess_P.max()))} % at most" if over_P.any() else ""
    words = f"{int(over_P.sum())} of {len(over_P)} sampled tokens exceed it{most}"
    return fact((one.engine,), 1, float(over_P.mean()), words, not over_P.any())


def _tail(one: Compared, name: str = "signed", *, less: str | None = None) -> Interval:
    """Mean −Δ of tail tokens (`signed`) or a prediction of it, weighted with the engine's probability, nats.

    `less` names a prediction that is subtracted.
    """
    tail_B = np.array(one.record["edges"]) >= one.record["tail_from"]
    sums = {key: one.arrays[f"{key}_PB"][:, tail_B].sum(axis=1) for key in ("mass", name, less) if key}
    return ratio_interval(sums[name] - (sums[less] if less else 0.0), sums["mass"], one.clusters)


def _sign(one: Compared) -> Finding:
    """Whether the tail's mean −Δ is above 0."""
    mean = _tail(one)
    if math.isnan(mean.mean):
        return fact((one.engine,), 1, mean.mean, "no position has a token in the tail", None)
    words = f"mean −Δ in the tail is {with_interval(mean)} nats"
    return Finding((one.engine,), 1, mean.mean, mean.low, mean.high, words, *above_and_below(mean))


def _size(one: Compared, prediction: str) -> Finding:
    """Whether the tail's mean −Δ differs from the prediction for the same tokens."""
    less = _tail(one, less=prediction)
    mean, predicted = with_interval(_tail(one)), with_interval(_tail(one, prediction))
    words = f"mean −Δ in the tail is {mean} nats, predicted {predicted} nats"
    # numpy's minimum keeps NaN: a mean without an interval has no test.
    p = float(np.minimum(*above_and_below(less)))
    return Finding((one.engine,), 1, less.mean, less.low, less.high, words, p_for=p)


def _nested(one: Compared, index: int) -> Finding:
    train_P, both_P = (one.arrays[f"kept_{name}_PS"][:, index] for name in ("train", "both"))
    lacking, rho = int((both_P < train_P).sum()), one.settings.rho[index]
    overlap = f"{(both_P / train_P).mean():.5f}"
    words = f"ρ = {rho}: fails at {lacking} of {len(train_P)} positions; overlap {overlap} on average"
    return fact((one.engine,), 1, float((both_P < train_P).mean()), words, not lacking)


def _equal(one: Compared) -> Finding:
    equal_P = one.arrays["delta_max_P"] == 0
    words = f"at {int(equal_P.sum())} of {len(equal_P)} positions"
    return fact((one.engine,), 1, float(equal_P.mean()), words, bool(equal_P.all()))

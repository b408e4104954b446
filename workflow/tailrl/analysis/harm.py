"""What a mismatch costs, by cause and size: arms less their matched controls, over parts with a warm start each.

An arm is named after a quantised engine, or <cause>_<engine> after a cause on the dial with that engine's k3. Each has
a control, <arm>_control. The last engine has the largest k3. The primary endpoint is there.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, nan

import numpy as np

from tailrl.analysis.parts import CONTROL, Numbers, differences
from tailrl.stats.intervals import Interval, mean_interval
from tailrl.stats.tests import NO_DIFFERENCE, Difference, difference_from, holm

QUANTISED = "engine"
"""The cause of an arm that is a quantised engine."""
WITHIN = 2.0
"""A dialled cause has its engine's k3 where the ratio of the two is at most this, either way."""


@dataclass(frozen=True, slots=True)
class Harm:
    """avg@k of an arm less that of its matched control, shares of 1.

    Attributes:
        cause: `engine`, or what is dialled; engine: the quantised engine, or the one whose k3 the dose shall have.
        k3: the geometric mean over parts of a part's mean k3, nats, with its t interval in logarithms.
        harm: the mean over parts of the differences within a part, with a paired t interval.
        family: `primary` at the last engine, else `other`; harm_p_holm: p by Holm over the family.
        beyond: harm less that of the engine, likewise; of a dialled cause alone.
        beyond_p_holm: by Holm over all dialled causes, those that are not `alike` too.
        alike: whether k3 is within a factor of `WITHIN` of the engine's.
    """

    arm: str
    cause: str
    engine: str
    k3: Interval
    harm: Difference
    family: str
    harm_p_holm: float
    beyond: Difference
    beyond_p_holm: float
    alike: bool


def harms(scores: Sequence[Numbers], k3: Sequence[Numbers]) -> list[Harm]:
    """Every arm that has a control, in the parts' order; a difference is of the parts that have what it needs.

    Args:
        scores: avg@k by arm in each part, shares of 1.
        k3: the mean k3 of the first steps, likewise, nats.
    """
    names = list(dict.fromkeys(arm for part in scores for arm in part))
    arms = [arm for arm in names if f"{arm}_{CONTROL}" in names]
    placed = {arm: _place(arm, arms) for arm in arms}
    last = [engine for cause, engine in placed.values() if cause == QUANTISED][-1:]
    sizes = {arm: _size(k3, arm) for arm in arms}
    lost = {arm: differences(scores, arm, f"{arm}_{CONTROL}") for arm in arms}
    found = {arm: _over(lost[arm].values()) for arm in arms}
    beyond = {
        arm: _over(one - lost[engine][part] for part, one in lost[arm].items() if part in lost[engine])
        for arm, (cause, engine) in placed.items()
        if cause != QUANTISED
    }
    alike = {arm: _near(sizes[arm].mean, sizes[engine].mean) for arm, (_, engine) in placed.items()}
    primary, other = ({arm: found[arm] for arm in arms if (placed[arm][1] in last) == at} for at in (True, False))
    adjusted = _adjusted(primary) | _adjusted(other)
    compared = _adjusted(beyond)
    return [
        Harm(
            arm=arm,
            cause=cause,
            engine=engine,
            k3=sizes[arm],
            harm=found[arm],
            family="primary" if arm in primary else "other",
            harm_p_holm=adjusted[arm],
            beyond=beyond.get(arm, NO_DIFFERENCE),
            beyond_p_holm=compared.get(arm, nan),
            alike=alike[arm],
        )
        for arm, (cause, engine) in placed.items()
    ]


def _place(arm: str, arms: Sequence[str]) -> tuple[str, str]:
    """The cause and the engine of an arm's name: the longest name of another arm that ends it is the engine."""
    others = [other for other in arms if arm.endswith(f"_{other}")]
    engine = max(others, key=len, default="")
    return (arm.removesuffix(f"_{engine}"), engine) if engine else (QUANTISED, arm)


def _size(parts: Sequence[Numbers], arm: str) -> Interval:
    means = [float(np.mean(part[arm])) for part in parts if arm in part]
    logs = mean_interval([log(mean) for mean in means if mean > 0])
    return Interval(exp(logs.mean), exp(logs.low), exp(logs.high), logs.n)


def _near(one: float, other: float) -> bool:
    """False also where one is not known, which is NaN."""
    return other > 0 and 1 / WITHIN <= one / other <= WITHIN


def _over(values: Iterable[float]) -> Difference:
    return difference_from(list(values), 0.0)


def _adjusted(found: Mapping[str, Difference]) -> dict[str, float]:
    return dict(zip(found, holm([one.p for one in found.values()]).tolist(), strict=True))

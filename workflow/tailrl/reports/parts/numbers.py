"""The endpoints of a study in parts, as its `pooled` says: differences, means and slopes of numbers by arm and seed."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan

import numpy as np

from tailrl.claims.decide import equivalence
from tailrl.config.pooled import SCORE, Family, Pool, arm_weights, matching, named
from tailrl.stats.intervals import EQUIVALENCE_CONFIDENCE, Interval, geometric_interval, log_slope, mean_interval
from tailrl.stats.tests import NO_DIFFERENCE, Difference, arm_contrast, arm_difference, difference_from, holm

Numbers = Mapping[str, Mapping[int, float]]
"""A number of each arm's runs in one part, by seed."""

PartNumbers = Mapping[str, Mapping[str, Numbers]]
"""Each finished part's measures by name, `POOLED_SCORE` among them."""

POOLED_SCORE = SCORE
"""The measure whose differences are tested."""


@dataclass(frozen=True, slots=True)
class PooledLine:
    """The score of an arm minus that of a sum of others, shares of 1; which score is its family's `measure`.

    Attributes:
        part: the part whose seeds it is over; empty over parts. Between two parts both names.
        minus: the sum of arms.
        difference: over parts, the mean of the differences within a part, with a paired t interval. Of a single part,
            and within a part, it is Welch's over seeds. It has no p where only one part of a pool is there.
        difference_p_holm: p by Holm over the family, or over the part's lines of the family.
        least, most: the smallest and the largest difference within a part; NaN for one over seeds.
        counts: False where the arm's measure is not near that of the arm it is compared with, or not known.
    """

    family: str
    part: str
    arm: str
    minus: str
    difference: Difference
    difference_p_holm: float
    least: float
    most: float
    counts: bool


@dataclass(frozen=True, slots=True)
class PooledEquivalence:
    """Whether an arm and a sum of others score level: the line of the same family, arm and minus.

    Attributes:
        difference: the line's, with its 90 % interval; NaN where fewer than two parts are there.
        margin: of equivalence, a share of 1, as the study's file has it.
        verdict: see `equivalence`.
    """

    family: str
    arm: str
    minus: str
    difference: Interval
    margin: float
    verdict: str


@dataclass(frozen=True, slots=True)
class PooledMeasure:
    """The mean of a measure of an arm: over parts, or (`part`) over the seeds of one; units are the interval's n."""

    measure: str
    part: str
    arm: str
    value: Interval


@dataclass(frozen=True, slots=True)
class PooledChange:
    """A measure of an arm in one part minus that in the part that the others are compared with (Welch over seeds).

    Attributes:
        change_p_holm: p by Holm over the measure's arms and parts.
    """

    measure: str
    part: str
    arm: str
    change: Difference
    change_p_holm: float


@dataclass(frozen=True, slots=True)
class PooledSlope:
    """The slope of a measure's logarithm against another's, by least squares over parts, one a seed; over seeds."""

    measure: str
    against: str
    arm: str
    slope: Interval
    parts: int


def pooled_lines(pool: Pool, parts: PartNumbers) -> list[PooledLine]:
    """Every family's lines, in the order of its arms; one that no part has is there without numbers."""
    found: list[PooledLine] = []
    for name, family in pool.families.items():
        scores = {part: measures[family.measure] for part, measures in parts.items()}
        lines = list(_lines(pool, name, family, scores))
        for group in dict.fromkeys(line.part if family.holm == "part" else "" for line in lines):
            own = [place for place, line in enumerate(lines) if family.holm != "part" or line.part == group]
            adjusted = holm([lines[place].difference.p for place in own]).tolist()
            for place, p in zip(own, adjusted, strict=True):
                lines[place] = replace(lines[place], difference_p_holm=p)
        if family.near is not None:
            measure, factor = family.near.measure, family.near.factor
            size = {one.arm: one.value.mean for one in pooled_measures(pool, parts) if one.measure == measure}
            others = {line.arm: named(family.near.of, line.arm) for line in lines}
            lines = [replace(x, counts=_near(size.get(x.arm), size.get(others[x.arm]), factor)) for x in lines]
        found += lines
    return found


def pooled_equivalences(pool: Pool, parts: PartNumbers, lines: Sequence[PooledLine]) -> list[PooledEquivalence]:
    """What is said of the lines whose arm has a margin of equivalence, in their order."""
    found = []
    for line in lines:
        family = pool.families[line.family]
        margin = family.margin(line.arm)
        if margin is not None:
            weights = arm_weights(line.arm, line.minus)
            within = _in_each_part([measures[family.measure] for measures in parts.values()], weights)
            paired = difference_from(within, 0.0, exact=(), confidence=EQUIVALENCE_CONFIDENCE)
            interval = Interval(paired.mean, paired.low, paired.high, paired.n)
            verdict = equivalence(interval, margin, line.difference_p_holm)
            found.append(PooledEquivalence(line.family, line.arm, line.minus, interval, margin, verdict))
    return found


def pooled_measures(pool: Pool, parts: PartNumbers) -> list[PooledMeasure]:
    """The score and every measure of every arm that has it, measure by measure."""
    found = []
    for name in (POOLED_SCORE, *pool.measures):
        numbers = {part: measures[name] for part, measures in parts.items()}
        geometric = name in pool.measures and pool.measures[name].geometric
        interval = geometric_interval if geometric else mean_interval
        for arm in _arms(numbers.values()):
            own = {part: list(number[arm].values()) for part, number in numbers.items() if arm in number}
            if pool.unit == "seed":
                found += [PooledMeasure(name, part, arm, interval(seeds)) for part, seeds in own.items()]
            else:
                means = [float(np.mean(seeds)) for seeds in own.values()]
                (seeds,) = own.values() if len(own) == 1 and not geometric else (means,)
                found.append(PooledMeasure(name, "", arm, interval(seeds)))
    return found


def pooled_changes(pool: Pool, parts: PartNumbers) -> list[PooledChange]:
    """The score and every measure of the arms that a part shares with `pool.against`, measure by measure.

    A measure that is the same in all seeds of both parts, such as naive's mass outside the safe set, is left out.
    """
    if pool.against is None or pool.against not in parts:
        return []
    changes: list[PooledChange] = []
    for name in (POOLED_SCORE, *pool.measures):
        first = parts[pool.against][name]
        lines: list[PooledChange] = []
        for arm in first:
            for part, measures in parts.items():
                here, there = np.array([*measures[name].get(arm, {}).values()]), np.array([*first[arm].values()])
                if part != pool.against and here.size and np.ptp(np.concatenate([here, there])) > 0:
                    lines.append(PooledChange(name, part, arm, arm_difference(here, there), nan))
        adjusted = holm([line.change.p for line in lines]).tolist()
        changes += [replace(line, change_p_holm=p) for line, p in zip(lines, adjusted, strict=True)]
    return changes


def pooled_slopes(pool: Pool, parts: PartNumbers) -> list[PooledSlope]:
    """How measures grow over the parts, of every seed that all finished parts have; nothing with a single part."""
    found = []
    for slope in pool.slopes if len(parts) > 1 else ():
        pairs = [(measures[slope.against], measures[slope.of]) for measures in parts.values()]
        for arm in matching(_arms(y for _, y in pairs), slope.arms):
            seeds = set.intersection(*(set(x.get(arm, {})) & set(y.get(arm, {})) for x, y in pairs))
            slopes = [
                log_slope([x[arm][seed] for x, _ in pairs], [y[arm][seed] for _, y in pairs]) for seed in sorted(seeds)
            ]
            found.append(PooledSlope(slope.of, slope.against, arm, mean_interval(slopes), len(parts)))
    return found


def _lines(pool: Pool, name: str, family: Family, scores: Mapping[str, Numbers]) -> Iterator[PooledLine]:
    """A family's lines, before Holm."""
    for compared in family.of:
        for arm in compared.chosen(_arms(scores.values())):
            minus, weights = named(compared.minus, arm), arm_weights(arm, compared.minus)
            whole = {part: own for part, own in scores.items() if weights.keys() <= own.keys()}
            if pool.unit == "part":
                yield PooledLine(name, "", arm, minus, *_over(list(whole.values()), weights), True)
            elif family.between is None:
                for part, own in whole.items():
                    yield PooledLine(name, part, arm, minus, _within([(own, weights)]), nan, nan, nan, True)
            elif set(family.between) <= whole.keys():
                first, second = family.between
                both = [(whole[first], weights), (whole[second], {one: -weight for one, weight in weights.items()})]
                yield PooledLine(name, f"{first} - {second}", arm, minus, _within(both), nan, nan, nan, True)


def _over(parts: Sequence[Numbers], weights: Mapping[str, float]) -> tuple[Difference, float, float, float]:
    """The mean over parts with its p, a place for Holm's, and the smallest and largest difference of a part."""
    if not parts:
        return NO_DIFFERENCE, nan, nan, nan
    within = _in_each_part(parts, weights)
    several = len(parts) > 1
    # Equal differences are no zeros by nature, as those of an engine without a mismatch are.
    found = difference_from(within, 0.0, exact=()) if several else replace(_within([(parts[0], weights)]), p=nan)
    return found, nan, float(min(within)), float(max(within))


def _in_each_part(parts: Iterable[Numbers], weights: Mapping[str, float]) -> list[float]:
    """The difference in each part that has its arms, of means over seeds."""
    return [
        sum(weight * float(np.mean(list(part[arm].values()))) for arm, weight in weights.items())
        for part in parts
        if weights.keys() <= part.keys()
    ]


def _within(terms: Sequence[tuple[Numbers, Mapping[str, float]]]) -> Difference:
    """Over the seeds of one part, or of two."""
    pairs = [(list(own[arm].values()), weight) for own, weights in terms for arm, weight in weights.items() if weight]
    return arm_contrast([seeds for seeds, _ in pairs], [weight for _, weight in pairs])


def _near(one: float | None, other: float | None, factor: float) -> bool:
    return bool(one and other) and 1 / factor <= one / other <= factor  # type: ignore[operator]


def _arms(numbers: Iterable[Numbers]) -> list[str]:
    return list(dict.fromkeys(arm for own in numbers for arm in own))

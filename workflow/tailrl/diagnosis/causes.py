"""What caused a mismatch, by checks and a calibrated model, each cause with its evidence and how sure it is.

Faults of the log itself (NaN, masks, shifted or clipped log-probs) are found by checks. The other causes are told by
the shape of the mismatch: a multinomial logistic model of a few numbers (`features.py`). Its coefficients and the
checks' hit rates lie in `sure.yaml`. `make diagnose-exam` settles them on logs of known cause.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from pydantic import Field

from tailrl.artifacts.files import Record
from tailrl.diagnosis.evidence import evidence, numbers
from tailrl.diagnosis.features import features, seen_apart
from tailrl.diagnosis.measure import Measured
from tailrl.diagnosis.signals import Signals
from tailrl.diagnosis.sure import beyond_sixteen_bits, settled, shapes
from tailrl.runtime.data_files import models_beside

AGREE = 1e-4  # nats: two sides whose log-probs differ by less, in the root of the mean square, agree as float32 does
FLOORS = 3.0  # a mean square of ℓ below so many times that of the noise floor is no mismatch beyond it
FLOOR_ERRORS = 2.0
"""Standard errors, over sequences, by which a mismatch is above FLOORS: a few sequences whose sums a packing ordered
otherwise are none."""

FEW_SEQUENCES = 16  # sequences below which no standard error is asked for
LEAST_SURE = 0.3  # where no cause is as sure, `unknown` comes first: settled on models left out
NAMED = 0.1  # a cause that is less sure is not named
CLOSE = 0.4
"""A second cause that is at least so probable beside the first is as good as it. On settling logs, each predicted
without its policy, 0.90 of the answers were right so, and 0.20 left two causes open; with 0.5 it was 0.88 and 0.15."""

PENALISED = 0.7
"""Difference of the shares of tokens with Δ above 0, between those that already occurred and the others, from which a
penalty is told by it alone; how often rightly, the exam settles."""

DENSE = {"0"}  # what a log's column `experts` has where the model is no mixture of experts


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause of a mismatch.

    Attributes:
        name: its key in `causes.yaml`, which has its words and what to do.
        sure: the probability that it is the cause, calibrated on logs of known cause.
        evidence: sentences with the numbers that speak for it.
    """

    name: str
    sure: float
    evidence: tuple[str, ...]

    @property
    def words(self) -> "CauseWords":
        """Its words."""
        return cause_words()[self.name]

    @property
    def title(self) -> str:
        """What it is called."""
        return self.words.title


class CauseWords(Record):
    """A cause in words: its title, a verdict in one sentence, what to do, and what to log to be surer.

    `evidence`: sentences that speak for it, with places for `evidence.numbers`.
    `fault`: a fault of the log itself, not of the sampler or the trainer. `by_place`: told by where the mismatch is
    (where.yaml), not by its shape.
    """

    title: str
    verdict: str
    do: str
    log: str
    evidence: list[str] = Field(default_factory=list)
    fault: bool = False
    by_place: bool = False


@cache
def cause_words() -> dict[str, CauseWords]:
    """The words of every cause, by name."""
    return models_beside(__file__, "causes.yaml", CauseWords)


def find_causes(measured: Measured) -> tuple[Cause, ...]:
    """The causes that fit: faults of the log first, then the most probable first; none if the two sides agree.

    A shift or a clip hides what else there may be, so no other shape is looked for beside them. `unknown` has a shape
    too, that of some mistakes inside a model, and comes first where none is sure enough. Few tokens make all less sure.
    """
    signals = measured.signals
    faults = find_faults(measured)
    known = numbers(measured)
    found = [Cause(name, settled().checks[name], evidence(cause_words()[name].evidence, known)) for name in faults]
    if agrees(signals) or {"shift", "clipped"} & set(faults):
        return tuple(found)
    sure = shapes(features(signals), without={"routing"} if measured.experts == DENSE else set())
    if is_penalised(signals):
        told = settled().places["penalty"]
        sure = {name: (1 - told) * value for name, value in sure.items()} | {"penalty": told}
    sure = dict(sorted(sure.items(), key=lambda item: -item[1]))
    most = max(sure.values())
    if most < LEAST_SURE:
        sure = {"unknown": 1 - most, **{name: value for name, value in sure.items() if name != "unknown"}}
    enough = signals.sums["tokens"] / (signals.sums["tokens"] + settled().few_tokens)
    sure = {name: enough * value for name, value in sure.items()}
    named = [(name, value) for name, value in sure.items() if value >= NAMED]
    return (*found, *(Cause(name, value, evidence(cause_words()[name].evidence, known)) for name, value in named))


def find_faults(measured: Measured) -> tuple[str, ...]:
    """Faults of the log itself: names of `causes.yaml`."""
    signals = measured.signals
    tokens = signals.sums.get("tokens", 0.0)
    checks = {
        "nan": any(measured.odd.values()),
        "mask": sum(signals.zeros.values()) >= max(3.0, 1e-3 * tokens),
        "shift": signals.shifted.sum() > max(1.0, 0.3 * signals.compared),
        "clipped": any(map(signals.cut, ("sampler", "trainer"))),
    }
    return tuple(name for name, holds in checks.items() if holds)


def is_penalised(signals: Signals) -> bool:
    """Whether Δ has one side on tokens that already occurred, and the other side on the others."""
    return seen_apart(signals)[0] >= PENALISED


def fitting(causes: Sequence[Cause], signals: Signals) -> tuple[str, ...]:
    """Names of the causes that the page leaves open: the first, and a second that is close to it; of faults the first.

    Above what 16 bits give, rounding is one of two: weights or a cache of 8 or 4 bits, or a mistake.
    """
    shaped = [one for one in causes if not one.words.fault] or list(causes[:1])
    names = [one.name for one in shaped[:2] if one.sure >= CLOSE * shaped[0].sure]
    if names[:1] == ["precision"] and beyond_sixteen_bits(signals):
        names = ["precision", "prompt"]
    return tuple(names)


def agrees(signals: Signals) -> bool:
    """Whether there is nothing to explain: no token, float32's agreement, or no more than the noise floor."""
    sums = signals.sums
    if not sums.get("tokens") or sums["squared"] < AGREE**2 * sums["tokens"]:
        return True
    return bool(sums["again"]) and _within_floor(signals)


def disagrees_with_itself(signals: Signals) -> bool:
    """Whether the trainer differs from itself by more than float32 does, and by about as much as from the sampler.

    Then the log says nothing of the sampler: whatever it computes would be as far from one of the trainer's numbers.
    """
    scored_twice, squared = signals.sums.get("again", 0.0), signals.sums.get("again_squared", 0.0)
    return squared > 0 and squared >= AGREE**2 * scored_twice and _within_floor(signals)


def _within_floor(signals: Signals) -> bool:
    """Whether the mismatch of tokens that the trainer scored twice is no more than FLOORS times its noise floor."""
    paired_S, again_S = np.concatenate(signals.floors, 1)
    above_S = (paired_S - FLOORS * again_S)[(paired_S > 0) | (again_S > 0)]
    few = len(above_S) < FEW_SEQUENCES
    return float(above_S.sum()) <= (0.0 if few else FLOOR_ERRORS * math.sqrt(float((above_S**2).sum())))

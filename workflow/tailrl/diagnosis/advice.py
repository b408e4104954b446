"""Which remedy is advised for a log: one fixed rule, from the cause and the size of the mismatch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tailrl.diagnosis.causes import Cause, disagrees_with_itself
from tailrl.diagnosis.measure import Measured
from tailrl.diagnosis.metrics import quantity
from tailrl.diagnosis.replay import Replayed

NO_HARM = 1e-3
"""k3 in nats up to which no correction is advised: NeMo-RL's rule of thumb. Here 1.7e-5 did no harm that was detected
(docs/findings/rounding.md)."""

SURE = 0.5
"""The probability from which a cause counts."""

HEALTHY_ESS = 0.3
"""Effective sample size from which verl calls weights healthy (docs/algo/rollout_corr.md)."""

CLEANED = 0.1
"""Share of the mean k3 that may be left on the tokens that DVP keeps."""

NOISE = frozenset({"precision", "routing", "stale", "unknown"})
"""Causes that no setting removes at once: both sides compute the right thing, with noise or with older weights."""

TAIL = "floor"
"""The cause whose random tokens DVP keeps from being sampled."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do.

    Attributes:
        kind: `none`, no correction is needed; `fix`, remove the cause first; `remedy`, use `name` at `threshold`;
            `beyond`, no weight keeps enough of the sample.
        words: the same with its reason.
        name, threshold: the remedy's key in `replay.yaml` and its setting.
    """

    kind: Literal["none", "fix", "remedy", "beyond"]
    words: str
    name: str | None = None
    threshold: float = math.nan


def mistakes(causes: Sequence[Cause]) -> tuple[Cause, ...]:
    """The probable causes that are mistakes: all but NOISE and TAIL."""
    return tuple(one for one in causes if one.sure >= SURE and one.name not in {*NOISE, TAIL})


def advise(measured: Measured, causes: Sequence[Cause], remedies: Sequence[Replayed]) -> Advice:
    """The advice. The rule, in its order, with its reasons:

    1. A probable cause other than NOISE and TAIL is a mistake, and fixed first: weights would hide it, not remove it.
    2. Up to NO_HARM no correction: weights add variance, and no harm was detected at such a size.
    3. A trainer that differs from itself as much as from the sampler is mended first: weights are made of its numbers.
    4. Random tokens from the tail: DVP at the least ρ whose kept tokens have at most CLEANED of the mean k3. It gained
       most under a floor (docs/findings/remedies.md); weights of sequences rejected the clean responses there
       (docs/findings/mis-threshold.md).
    5. Anything else: token TIS at C = 2. It gained most on stale samples (docs/findings/stale.md) and never needs more
       than one token's ratio, while a response's ratio grows with its length.
    6. If that leaves an effective sample size below HEALTHY_ESS, no weight repairs the sample.
    """
    if not measured.tokens:
        return Advice("fix", "No token has sound log-probs of both sides: log them first.")
    if mistakes(causes):
        return Advice("fix", "Fix the cause first: a correction would hide it, and not remove it.")
    size = quantity(measured, "k3").mean
    if size <= NO_HARM:
        return Advice("none", f"No correction is needed: k3 is {size:.2g} nats, and none is advised up to {NO_HARM:g}.")
    if disagrees_with_itself(measured.signals):
        words = "Find first what changes the trainer's numbers, such as its packing, padding, dropout or kernels."
        return Advice("fix", words)
    if any(one.name == TAIL and one.sure >= SURE for one in causes):
        cleaning = [one for one in remedies if one.name == "dvp" and one.kept_k3 <= CLEANED * size]
        if cleaning:
            best = min(cleaning, key=lambda one: one.threshold)
            words = f"DVP with ρ = {best.threshold:.2g} keeps {best.kept_tokens:.1%} of the tokens, and"
            words = f"{words} {best.kept_k3 / size:.1%} of the mean k3" + (f" ({best.note})" if best.note else "")
            return Advice("remedy", f"{words}.", best.name, best.threshold)
    weights = next((one for one in remedies if (one.name, one.threshold) == ("token_tis", 2.0)), None)
    if weights is None:
        return Advice("fix", "No token has a sound recomputed log-prob: leave this column out, or log it soundly.")
    if weights.ess < HEALTHY_ESS:
        words = "No weights repair this sample: even token TIS leaves an effective sample size of"
        return Advice("beyond", f"{words} {weights.ess:.0%}. Make the sampler more precise, or its weights fresher.")
    words = f"Token TIS with C = 2 bounds every weight and leaves an effective sample size of {weights.ess:.0%}."
    return Advice("remedy", words, weights.name, weights.threshold)

"""What the exact gradients of tiny models say about the papers' theorems: facts, one for each kind of mismatch.

Nothing is sampled in a bias: it is a sum over every response, so that a claim holds in all models or fails in one. The
arms are found by their settings, as in a study that trains.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tailrl.analysis import arm_kinds
from tailrl.analysis.describe import DEFAULTS, flatten
from tailrl.analysis.format import short
from tailrl.analysis.gradients import MISMATCHES, NO_MISMATCH, Summary
from tailrl.claims.decide import Verdict
from tailrl.claims.finding import ASIDE, CONTRADICTED, DVP, REPRODUCED, UNTESTABLE

EXACT = 1e-9
"""A bias below this share of the gradient is rounding: the sums are in float64."""

BIASED = "dvp.thm4_1.bias"
UNBIASED = "dvp.rloo.unbiased"
CONSTRAINED = "dvp.thm5_3.unbiased"
TRADED = "dvp.mis.variance"


def judge_gradients(summaries: Sequence[Summary], arms: Mapping[str, Mapping[str, Any]]) -> list[Verdict]:
    """The verdicts, claim by claim and kind by kind.

    Args:
        summaries: of every arm at every dose.
        arms: the settings of each arm, as the study has them.
    """
    measured = {summary.arm for summary in summaries}
    settings = {arm: DEFAULTS | flatten(own) for arm, own in arms.items() if arm in measured}
    kinds = [kind for kind in dict.fromkeys(s.mismatch for s in summaries) if kind != NO_MISMATCH]
    naive, weighted, masked = (_arms(settings, role) for role in (arm_kinds.is_naive, _is_weighted, arm_kinds.is_mis))
    pruned = _arms(settings, lambda own: arm_kinds.is_pruned(own) and _has_whole_weight(own))
    found: list[Verdict] = []
    for arm in naive[:1]:
        own = _of(summaries, arm, NO_MISMATCH)
        largest = max(s.bias.high for s in own)
        words = (
            f"its bias is at most {largest:.1e} |∇J|, which is rounding" if largest <= EXACT else f"bias {largest:.2g}"
        )
        found.append(_fact(UNBIASED, f"{DVP}, RLOO", own, largest, words, holds=largest <= EXACT))
        found += [_growing_bias(_of(summaries, arm, kind)) for kind in kinds]
    for arm in pruned[:1]:
        found += [_constrained_bias(_of(summaries, arm, kind)) for kind in (NO_MISMATCH, *kinds)]
    for one, other in zip(masked[:1], weighted[:1], strict=False):
        found += [_trade(_of(summaries, one, kind), _of(summaries, other, kind)) for kind in kinds]
    return found


def _arms(settings: Mapping[str, Mapping[str, Any]], role: Callable[[Mapping[str, Any]], bool]) -> list[str]:
    return [arm for arm, own in settings.items() if own["estimator"] == "rloo" and role(own)]


def _has_whole_weight(own: Mapping[str, Any]) -> bool:
    return (own["correction.token"], own["correction.sequence"], own["correction.veto"]) == ("none", "is", None)


def _is_weighted(own: Mapping[str, Any]) -> bool:
    return own["vocabulary.rule"] == "full" and _has_whole_weight(own)


def _of(summaries: Sequence[Summary], arm: str, kind: str) -> list[Summary]:
    return sorted((s for s in summaries if s.arm == arm and s.mismatch == kind), key=lambda s: s.dose)


def _growing_bias(own: Sequence[Summary]) -> Verdict:
    """The bias of every model is above rounding at every dose, and its median grows with the dose."""
    medians = [s.bias.median for s in own]
    holds = all(s.bias.low > EXACT for s in own) and medians == sorted(medians)
    words = (
        f"its bias is {_along(own, [s.bias.median for s in own])} |∇J|, above rounding in {_models(own)} at every dose"
    )
    return _fact(BIASED, f"{DVP}, Thm 4.1", own, medians[-1], words, holds=holds)


def _constrained_bias(own: Sequence[Summary]) -> Verdict:
    """The bias against ∇J_mp is rounding in every model at every dose, where the theorem's V_S ⊆ V'_S holds."""
    source = f"{DVP}, Thm 5.3"
    largest, nested = (
        float(np.fmax.reduce(values))
        for values in ([s.bias_constrained.high for s in own], [s.nested_bias for s in own])
    )
    if math.isnan(largest):
        return _fact(CONSTRAINED, source, own, largest, "J_mp is flat in every model", holds=None)
    if largest <= EXACT:
        words = f"bias against ∇J_mp of at most {largest:.1e} |∇J_mp|, which is rounding, in {_models(own)}"
        return _fact(CONSTRAINED, source, own, largest, words, holds=True)
    words = f"bias against ∇J_mp of up to {short(largest)} |∇J_mp|"
    if nested > EXACT:
        return _fact(CONSTRAINED, source, own, largest, words, holds=False)
    models = f"{min(s.nested for s in own)} to {max(s.nested for s in own)} of {own[0].models} models by the dose"
    kept = "" if math.isnan(nested) else f"; of {nested:.1e} at most in those where it holds, {models}"
    words += f" in models where V_S ⊄ V'_S{kept}"
    return replace(_fact(CONSTRAINED, source, own, largest, words, holds=None), verdict=ASIDE)


def _trade(masked: Sequence[Summary], weighted: Sequence[Summary]) -> Verdict:
    """At the largest dose, MIS deviates less than the untruncated weight and is biased, in every model."""
    one, other = masked[-1], weighted[-1]
    words = (
        f"at the largest dose MIS deviates by {short(one.deviation_ratio.median)} and is biased by "
        f"{short(one.bias.median)} |∇J|; untruncated, {short(other.deviation_ratio.median)} and none"
    )
    if one.bias.high <= EXACT:
        words = "no response of this mismatch has a weight above C"
        return _fact(TRADED, f"{DVP}, MIS", masked, one.bias.median, words, holds=None)
    holds = one.bias.low > EXACT and one.deviation_ratio.high < other.deviation_ratio.low
    return _fact(TRADED, f"{DVP}, MIS", masked, one.bias.median, words, holds=holds)


def _fact(claim: str, source: str, own: Sequence[Summary], effect: float, words: str, *, holds: bool | None) -> Verdict:
    kind = own[0].mismatch
    return Verdict(
        id=claim,
        source=source,
        verdict=UNTESTABLE if holds is None else REPRODUCED if holds else CONTRADICTED,
        policy="tiny random models, all responses written down",
        task="digits that add up to the prompt's target",
        dose="no mismatch" if kind == NO_MISMATCH else MISMATCHES.get(kind, kind),
        arms=own[0].arm,
        seeds=own[0].models,
        effect=effect,
        low=math.nan,
        high=math.nan,
        unit="|∇J|",
        p=math.nan,
        p_holm=math.nan,
        seen=words,
        endpoint="An exact sum in every model, at every dose: no test is needed.",
    )


def _along(own: Sequence[Summary], values: Sequence[float]) -> str:
    """The first and the last dose with their values."""
    return " to ".join(f"{short(values[i])} at {own[i].dose:g}" for i in (0, -1))


def _models(own: Sequence[Summary]) -> str:
    return f"all {own[0].models} models"

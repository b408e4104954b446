"""Verdicts from the exact gradients of tiny models on the papers' theorems: facts, one per kind of mismatch.

A bias is a sum over every response, without sampling: a claim holds if it holds in all models. Arms are found by their
settings, as in a study that trains.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from tailrl.artifacts.claims import Verdict
from tailrl.claims.catalogue import CATALOGUE
from tailrl.claims.decide import Line, Scope, decide
from tailrl.claims.finding import Finding, fact
from tailrl.config.arm import ArmBlocks
from tailrl.config.arm_kinds import is_mis, is_naive, is_plain, is_pruned
from tailrl.config.gradients import NO_MISMATCH
from tailrl.page_parts.number_text import short
from tailrl.reports.gradients.numbers import CAUSE_TITLES, DOSE_LABELS, Summary

EXACT = 1e-9
"""A bias below this share of the gradient is rounding; the sums are float64."""

BIASED = "dvp.thm4_1.bias"
UNBIASED = "dvp.rloo.unbiased"
CONSTRAINED = "dvp.thm5_3.unbiased"
TRADED = "dvp.mis.variance"


def judge_gradients(summaries: Sequence[Summary], arms: Mapping[str, ArmBlocks], equal: bool = False) -> list[Verdict]:
    """The verdicts, claim by claim and kind by kind, from every arm's summaries and settings as in the study.

    `equal`: whether a dose is the k3 at which kinds are compared.
    """
    measured = {summary.arm for summary in summaries}
    settings = {arm: own for arm, own in arms.items() if arm in measured}
    kinds = [kind for kind in dict.fromkeys(s.mismatch for s in summaries) if kind != NO_MISMATCH]
    naive, weighted, masked = (_arms(settings, role) for role in (is_naive, _is_weighted, is_mis))
    pruned = _arms(settings, lambda own: is_pruned(own) and _has_whole_weight(own))
    found: list[tuple[str, str, Finding]] = []
    for arm in naive[:1]:
        found.append((UNBIASED, NO_MISMATCH, _no_bias(_of(summaries, arm, NO_MISMATCH))))
        found += [(BIASED, kind, _growing_bias(_of(summaries, arm, kind))) for kind in kinds]
    for arm in pruned[:1]:
        of_kinds = (NO_MISMATCH, *kinds)
        found += [(CONSTRAINED, kind, _constrained_bias(_of(summaries, arm, kind))) for kind in of_kinds]
    for one, other in zip(masked[:1], weighted[:1], strict=False):
        found += [(TRADED, kind, _trade(_of(summaries, one, kind), _of(summaries, other, kind))) for kind in kinds]
    return decide([Line(CATALOGUE[claim], _scope(kind, equal), finding) for claim, kind, finding in found])


def _scope(kind: str, equal: bool) -> Scope:
    label = f"{CAUSE_TITLES.get(kind, kind)}: k3 per token (nats)" if equal else DOSE_LABELS.get(kind, kind)
    dose = "no mismatch" if kind == NO_MISMATCH else label
    return Scope("tiny random models, all responses written down", "digits that add up to the prompt's target", dose)


def _arms(settings: Mapping[str, ArmBlocks], role: Callable[[ArmBlocks], bool]) -> list[str]:
    return [arm for arm, own in settings.items() if own.estimator == "rloo" and role(own)]


def _has_whole_weight(arm: ArmBlocks) -> bool:
    weights = arm.correction.token, arm.correction.sequence
    return weights == ("none", "is") and is_plain(arm) and not arm.correction.vetoes


def _is_weighted(arm: ArmBlocks) -> bool:
    return not arm.vocabulary.prunes and _has_whole_weight(arm)


def _of(summaries: Sequence[Summary], arm: str, kind: str) -> list[Summary]:
    return sorted((s for s in summaries if s.arm == arm and s.mismatch == kind), key=lambda s: s.dose)


def _no_bias(own: Sequence[Summary]) -> Finding:
    """Whether the bias is rounding in every model."""
    largest = max(s.bias.high for s in own)
    words = f"its bias is at most {largest:.1e} |∇J|, which is rounding" if largest <= EXACT else f"bias {largest:.2g}"
    return _fact(own, largest, words, largest <= EXACT)


def _growing_bias(own: Sequence[Summary]) -> Finding:
    """Whether every model's bias is above rounding at every dose, and the median grows with the dose."""
    medians = [s.bias.median for s in own]
    holds = all(s.bias.low > EXACT for s in own) and medians == sorted(medians)
    along = " to ".join(f"{short(medians[i])} at {own[i].dose:g}" for i in (0, -1))
    return _fact(own, medians[-1], f"its bias is {along} |∇J|, above rounding in {_models(own)} at every dose", holds)


def _constrained_bias(own: Sequence[Summary]) -> Finding:
    """Whether the bias against ∇J_mp is rounding at every dose in every model with the theorem's V_S ⊆ V'_S."""
    largest = float(np.fmax.reduce([s.bias_constrained.high for s in own]))
    nested = float(np.fmax.reduce([s.nested_bias for s in own]))
    if math.isnan(largest):
        return _fact(own, largest, "J_mp is flat in every model", None)
    if largest <= EXACT:
        words = f"bias against ∇J_mp of at most {largest:.1e} |∇J_mp|, which is rounding, in {_models(own)}"
        return _fact(own, largest, words, True)
    words = f"bias against ∇J_mp of up to {short(largest)} |∇J_mp|"
    if nested > EXACT:
        return _fact(own, largest, words, False)
    models = f"{min(s.nested for s in own)} to {max(s.nested for s in own)} of {own[0].models} models by the dose"
    kept = "" if math.isnan(nested) else f"; of {nested:.1e} at most in those where it holds, {models}"
    return replace(_fact(own, largest, f"{words} in models where V_S ⊄ V'_S{kept}", None), premise=False)


def _trade(masked: Sequence[Summary], weighted: Sequence[Summary]) -> Finding:
    """Whether at the largest dose MIS deviates less than the untruncated weight and is biased, in every model."""
    one, other = masked[-1], weighted[-1]
    if one.bias.high <= EXACT:
        return _fact(masked, one.bias.median, "no response of this mismatch has a weight above C", None)
    words = (
        f"at the largest dose MIS deviates by {short(one.deviation_ratio.median)} and is biased by "
        f"{short(one.bias.median)} |∇J|; untruncated, {short(other.deviation_ratio.median)} and none"
    )
    holds = one.bias.low > EXACT and one.deviation_ratio.high < other.deviation_ratio.low
    return _fact(masked, one.bias.median, words, holds)


def _fact(own: Sequence[Summary], effect: float, words: str, holds: bool | None) -> Finding:
    return fact((own[0].arm,), own[0].models, effect, words, holds)


def _models(own: Sequence[Summary]) -> str:
    return f"all {own[0].models} models"

"""Settings in words: an arm, its remedy, the mismatch under which it trains, its policy."""

from typing import Any

from tailrl.config.arm import ArmBlocks, Bounded, Clip, Correction
from tailrl.config.policy import Policy, ScratchPolicy
from tailrl.config.reference_kl import ReferenceKL
from tailrl.config.rejection import Rejection
from tailrl.config.sampler import Disturbance, SamplerSettings
from tailrl.config.vocabulary import ByRho, TopK, TopP, Vocabulary

ALL_TOKENS, UNWEIGHTED = "all tokens", "no weights"

_OF_SAMPLER = {"engine", "dtype", "verify", "quantization", "group_size", "kv_cache_dtype"}
"""Settings of a sampler that `describe_sampler` says."""


def describe(arm: ArmBlocks) -> list[str]:
    """An arm's own settings as clauses; arms with different settings have different descriptions."""
    clauses = [
        f"{arm.estimator.upper()} on {_vocabulary(arm.vocabulary)}",
        *([_clip(arm.clip)] if arm.clip else []),
        *_weights(arm.correction),
        *describe_disturbance(arm.disturbance),
        f"sampled by {describe_sampler(arm.sampler)}",
        *([_reference(arm.reference_kl)] if arm.reference_kl else []),
    ]
    return clauses + sampler_settings(arm.sampler)


def describe_remedy(arm: ArmBlocks) -> str:
    """An arm's remedies against tail and mismatch: its safe set and its weights; empty without any."""
    clauses = [_vocabulary(arm.vocabulary), *_weights(arm.correction)]
    return "; ".join(clause for clause in clauses if clause not in (ALL_TOKENS, UNWEIGHTED))


def short_remedy(arm: ArmBlocks) -> str:
    """An arm's remedies by the names that papers use, `naive` without any; details are left out."""
    vocabulary, correction = arm.vocabulary, arm.correction
    parts = []
    if vocabulary.prunes:
        rule = vocabulary.rule.replace("_", "-")
        pruned = "DVP" if rule == "min-p" else f"pruning by {rule}"
        at = (
            " with an adaptive ρ"
            if vocabulary.adapts
            else f" at ρ = {vocabulary.rho}"
            if isinstance(vocabulary, ByRho)
            else ""
        )
        parts.append(pruned + at + ("" if vocabulary.side == "both" else f" ({vocabulary.side})"))
    if correction.token != "none":
        parts.append(f"token {correction.token.upper()}")
    if correction.sequence != "none":
        name = correction.sequence
        parts.append(
            "rejection" if name.startswith("reject") else "MIS" if name == "mis" else f"sequence {name.upper()}"
        )
    if correction.reject:
        parts.append("rejection")
    if correction.centering != "none":
        parts.append("score centering")
    if correction.vetoes and not parts:
        parts.append("a veto")
    if arm.clip:
        parts.append(f"{arm.clip.loss.upper()} ({arm.clip.ratio})")
    named = " + ".join(parts) or "naive"
    return named if arm.estimator == "rloo" else f"{named}, {arm.estimator.upper()}"


def dose(arm: ArmBlocks) -> str:
    """The engine and its mismatch in words."""
    return ", ".join([describe_sampler(arm.sampler), *(describe_disturbance(arm.disturbance) or ["undisturbed"])])


def policy_name(policy: Policy) -> str:
    """The policy in words."""
    if not isinstance(policy, ScratchPolicy):
        return policy.folder or policy.source
    mixture = f" with {policy.experts} experts" if policy.experts else ""
    return f"from scratch, {policy.layers} layers of {policy.hidden_size}{mixture}, V = {policy.vocabulary_size}"


def describe_disturbance(disturbance: Disturbance) -> list[str]:
    """The disturbance in words; empty without one."""
    words = {
        "staleness": "weights of {} steps ago",
        "weights": "weights rounded to {}",
        "bias": "bias of {} nats",
        "noise": "noise of {} nats",
        "floor": "floor of {}",
    }
    causes = [text.format(value) for name, text in words.items() if (value := getattr(disturbance, name))]
    where = "sampler and trainer (matched control)" if disturbance.side == "both" else disturbance.side
    return [f"disturbed {where}: {', '.join(causes)}"] if causes else []


def describe_sampler(sampler: SamplerSettings) -> str:
    """Engine, number formats and verification."""
    formats = []
    if sampler.formats and sampler.formats.quantization:
        group = sampler.formats.group_size
        formats.append(f"weights in {sampler.formats.quantization}" + (f" by groups of {group}" if group else ""))
    if sampler.formats and sampler.formats.kv_cache_dtype != "auto":
        formats.append(f"a cache in {sampler.formats.kv_cache_dtype}")
    sides = " on both sides" if sampler.TRAINERS_BITS else ""
    few_bits = f" with {' and '.join(formats)}{sides}" if formats else ""
    verified = ", verified by the trainer" if sampler.verify else ""
    return f"{sampler.engine} in {sampler.dtype}{few_bits}{verified}"


def sampler_settings(sampler: SamplerSettings) -> list[str]:
    """The sampler's other settings beyond their defaults, by key."""
    others: dict[str, Any] = sampler.model_dump(mode="json", exclude_defaults=True, exclude=_OF_SAMPLER)
    return [f"sampler.{key} = {value}" for key, value in others.items()]


def _vocabulary(vocabulary: Vocabulary) -> str:
    details = [f"the {vocabulary.rule.replace('_', '-')} set" if vocabulary.prunes else ALL_TOKENS]
    if isinstance(vocabulary, ByRho):
        details.append(f"rho = {vocabulary.rho}")
    if isinstance(vocabulary, TopK):
        details.append(f"k = {vocabulary.k}")
    if isinstance(vocabulary, TopP):
        details.append(f"p = {vocabulary.p}")
    if vocabulary.target is not None:
        details.append(f"adapted to the budget of {vocabulary.target}")
    if vocabulary.easy is not None:
        details.append(f"adapted to the difficulty, up to rho = {vocabulary.easy}")
    if vocabulary.side != "both":
        one = f"in the {vocabulary.side} only"
        details.append("the sampler's set on both sides" if vocabulary.side == "replay" else one)
    if vocabulary.outside == "paper_fill":
        details.append("paper's fill outside")
    return ", ".join(details)


def _clip(clip: Clip) -> str:
    what = "clipped ratio" if clip.loss == "ppo" else f"{clip.loss} of the ratio"
    bounds = f", from 1 - {clip.low} to 1 + {clip.high}" if isinstance(clip, Bounded) else ""
    if clip.dual_bound is not None:
        bounds += f", and to {_number(clip.dual_bound)} where the advantage is negative"
    old = "" if clip.proximal == "recompute" else ", old log-probs between the sampler's and the policy's"
    return f"{what}, {clip.ratio}{old}{bounds}{_limit(clip.limit)}"


def _reference(penalty: ReferenceKL) -> str:
    return f"{_number(penalty.coefficient)} times {penalty.estimator} to the base policy in the {penalty.where}"


def _weights(correction: Correction) -> list[str]:
    """The correction: weights, rejections and vetoes."""
    clauses = []
    if correction.token != "none":
        bounded = "token_threshold" in correction.reads("token", correction.token)
        bound = f", C = {_number(correction.token_threshold)}" if bounded else ""
        clauses.append(f"token weights {correction.token}{bound}{_lower(correction.token_lower)}")
    if correction.sequence != "none":
        bound = f", C = {_number(correction.limit)}" if correction.sequence_bounded else ""
        by = " by r_ppo" if correction.rejects == "r_ppo" else ""
        clauses.append(f"sequence weights {correction.sequence}{by}{bound}{_lower(correction.sequence_lower)}")
    clauses += [_rejection(rule) for rule in correction.reject]
    if clauses:
        clauses[-1] += _limit(correction.log_ratio_limit)
    if correction.centering != "none":
        over = "all tokens" if correction.centering == "full" else f"the sampler's {correction.centering_k} likeliest"
        clauses.append(f"scores centred over {over}")
    if correction.normalise:
        clauses.append("normalised to a mean weight of 1")
    if correction.log_ratio_penalty is not None:
        clauses.append(f"{_number(correction.log_ratio_penalty)} times the squared log-ratio in the loss")
    clauses = clauses or [UNWEIGHTED]
    if correction.veto is not None:
        clauses.append(f"veto below a token ratio of {correction.veto}")
    if correction.veto_above is not None:
        clauses.append(f"veto above a token ratio of {correction.veto_above}")
    return clauses


def _rejection(rule: Rejection) -> str:
    if rule.by == "token":
        what = f"{rule.of} of a token"
    elif rule.by == "batch":
        what = f"tokens by the update's {rule.of}"
    else:
        what = f"a response's {rule.by} of {rule.of}"
    limits = [f"{side} {_number(limit)}" for side in ("above", "below") if (limit := getattr(rule, side)) is not None]
    ratio = "" if rule.ratio == "r_corr" else f" by {rule.ratio}"
    when = {"always": "", "negative": " where A < 0", "outward": " where A widens it"}[rule.when]
    return f"rejected: {what}{ratio} {' or '.join(limits)}{when}"


def _limit(limit: float | None) -> str:
    return "" if limit is None else f", log-ratios clamped to {_number(limit)} nats"


def _lower(bound: float | None) -> str:
    return "" if bound is None else f", from {_number(bound)}"


def _number(value: float | None) -> str:
    """All digits, so that different numbers stay different."""
    return str(value).removesuffix(".0")

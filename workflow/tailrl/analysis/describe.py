"""Arms in words, and what ran: both from the run.json of each training job."""

import itertools
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel

from tailrl.analysis.made_by import distinct, made_by
from tailrl.artifacts.results import Results, TrainedRun
from tailrl.config.arm import Arm, Clip, Correction
from tailrl.config.jobs import Run
from tailrl.config.rejection import Rejection
from tailrl.runtime.errors import few
from tailrl.tracking.metrics import SKIPPED, TIME, in_group

WORK = ("rollout", "forward", "backward", "optimizer")
"""The phases of a step: generation, scoring, gradients and update."""

_NAMES = {"study", "arm"}
_OWN = Arm.model_fields.keys() - {"training"}
"""The blocks of a run's settings that belong to its arm: `describe` covers all of them."""

ASSUMED = "(assumed)"
"""The mark, in a field's description, of a value that no paper confirms."""


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value})
    return flat


DEFAULTS = flatten(Arm().model_dump(mode="json"))
"""An arm's default settings, by dotted key."""

ALL_TOKENS, UNWEIGHTED = "all tokens", "no weights"


def describe_arms(results: Results) -> dict[str, str]:
    """Each arm in words; other settings are listed if the arms differ in them."""
    flat = {arm: flatten(results.runs[arm][0].record.settings) for arm in results.arms}
    keys = dict.fromkeys(key for settings in flat.values() for key in settings if _block(key) not in _NAMES | _OWN)
    differing = [key for key in keys if len({str(settings.get(key)) for settings in flat.values()}) > 1]
    return {
        arm: "; ".join([*describe(settings), *(f"{key} = {settings.get(key)}" for key in differing)])
        for arm, settings in flat.items()
    }


def describe(flat: Mapping[str, Any]) -> list[str]:
    """An arm's own settings (dotted keys) as clauses; arms with different settings have different descriptions.

    Each clause removes its settings from `left`. The remaining settings are listed by key, except for defaults.
    """
    left = {key: value for key, value in flat.items() if _block(key) in _OWN}
    estimator = str(left.pop("estimator", "an unrecorded estimator")).upper()
    clauses = [f"{estimator} on {_vocabulary(left)}", *_clip(left), *_weights(left), *describe_disturbance(left)]
    clauses.append(f"sampled by {describe_sampler(left)}")
    clauses += _reference(left)
    return clauses + [f"{key} = {value}" for key, value in left.items() if value != DEFAULTS.get(key)]


def arm_rows(results: Results) -> Iterator[dict[str, str]]:
    """Each arm, its remedy against the mismatch, and its description, as rows of a table."""
    for arm, words in describe_arms(results).items():
        remedy = describe_remedy(flatten(results.runs[arm][0].record.settings))
        yield {"arm": arm, "remedy": remedy, "what": words}


def describe_remedy(flat: Mapping[str, Any]) -> str:
    """An arm's remedies against tail and mismatch: its safe set and its weights; empty without any."""
    left = dict(flat)
    clauses = [_vocabulary(left), *_weights(left)]
    return "; ".join(clause for clause in clauses if clause not in (ALL_TOKENS, UNWEIGHTED))


def _vocabulary(left: dict[str, Any]) -> str:
    rule = left.pop("vocabulary.rule", "full")
    details = [ALL_TOKENS if rule == "full" else f"the {rule.replace('_', '-')} set"]
    details += [f"{name} = {value}" for name in ("rho", "k", "p") if (value := left.pop(f"vocabulary.{name}", None))]
    adapt = left.pop("vocabulary.adapt", "none")
    if adapt == "budget":
        details.append(f"adapted to the budget of {left.pop('vocabulary.budget', None)}")
    elif adapt == "difficulty":
        details.append(f"adapted to the difficulty, up to rho = {left.pop('vocabulary.rho_easy', None)}")
    if (side := left.pop("vocabulary.side", "both")) != "both":
        details.append("the sampler's set on both sides" if side == "replay" else f"in the {side} only")
    if left.get("vocabulary.outside") == "paper_fill":
        del left["vocabulary.outside"]
        details.append("paper's fill outside")
    return ", ".join(details)


def _clip(left: dict[str, Any]) -> list[str]:
    if not left.get("clip.ratio"):
        return []
    ratio, low, high = (left.pop(f"clip.{name}", None) for name in ("ratio", "low", "high"))
    loss = left.pop("clip.loss", "ppo")
    bounds = f", from 1 - {low} to 1 + {high}" if "low" in Clip.READS["loss"][loss] else ""
    if (dual := left.pop("clip.dual", None)) is not None:
        bounds += f", and to {_number(dual)} where the advantage is negative"
    what = "clipped ratio" if loss == "ppo" else f"{loss} of the ratio"
    return [f"{what}, {ratio}{bounds}{_limit(left, 'clip')}"]


def _reference(left: dict[str, Any]) -> list[str]:
    """The KL to the base policy in words; removed from `left`."""
    if (coefficient := left.pop("reference_kl.coefficient", None)) is None:
        return []
    estimator, where = (left.pop(f"reference_kl.{name}", None) for name in ("estimator", "where"))
    return [f"{_number(coefficient)} times {estimator} to the base policy in the {where}"]


def _weights(left: dict[str, Any]) -> list[str]:
    """The correction: weights and veto."""
    clauses = []
    if (token := left.get("correction.token", "none")) != "none":
        del left["correction.token"]
        threshold = left.pop("correction.token_threshold", None)
        bound = f", C = {_number(threshold)}" if "token_threshold" in Correction.READS["token"][token] else ""
        clauses.append(f"token weights {token}{bound}{_lower(left, 'token')}")
    if (sequence := left.get("correction.sequence", "none")) != "none":
        reads = Correction.READS["sequence"].get(sequence, ("sequence_threshold",))
        bound = f", C = {_number(_sequence_limit(left))}" if "sequence_threshold" in reads else ""
        del left["correction.sequence"]
        left.pop("correction.sequence_threshold", None)
        by = " by r_ppo" if left.pop("correction.rejects", "r_corr") == "r_ppo" else ""
        clauses.append(f"sequence weights {sequence}{by}{bound}{_lower(left, 'sequence')}")
    clauses += [_rejection(rule) for rule in left.pop("correction.reject", ())]
    if clauses:
        clauses[-1] += _limit(left, "correction")
    if (form := left.pop("correction.centering", "none")) != "none":
        k = left.pop("correction.centering_k", None)
        clauses.append("scores centred over " + ("all tokens" if form == "full" else f"the sampler's {k} likeliest"))
    if left.pop("correction.normalise", False):
        clauses.append("normalised to a mean weight of 1")
    clauses = clauses or [UNWEIGHTED]
    if (veto := left.pop("correction.veto", None)) is not None:
        clauses.append(f"veto below a token ratio of {veto}")
    if (veto := left.pop("correction.veto_above", None)) is not None:
        clauses.append(f"veto above a token ratio of {veto}")
    return clauses


def _limit(left: dict[str, Any], block: str) -> str:
    """The limit of a block's log-ratios in words; removed from `left`."""
    limit = left.pop(f"{block}.log_ratio_limit", None)
    return "" if limit is None else f", log-ratios clamped to {_number(limit)} nats"


def _lower(left: dict[str, Any], which: str) -> str:
    """The lower bound of a weight in words; removed from `left`."""
    bound = left.pop(f"correction.{which}_lower", None)
    return "" if bound is None else f", from {_number(bound)}"


def _rejection(settings: Mapping[str, Any]) -> str:
    """A rejection in words."""
    rule = Rejection.model_validate(settings)
    what = f"{rule.of} of a token" if rule.by == "token" else f"a response's {rule.by} of {rule.of}"
    limits = [f"{side} {_number(limit)}" for side in ("above", "below") if (limit := getattr(rule, side)) is not None]
    ratio = "" if rule.ratio == "r_corr" else f" by {rule.ratio}"
    when = {"always": "", "negative": " where A < 0", "outward": " where A widens it"}[rule.when]
    return f"rejected: {what}{ratio} {' or '.join(limits)}{when}"


def describe_disturbance(left: dict[str, Any]) -> list[str]:
    """The disturbance in words; empty without one. Its settings (dotted keys) are removed from `left`."""
    words = {
        "staleness": "weights of {} steps ago",
        "weights": "weights rounded to {}",
        "bias": "bias of {} nats",
        "noise": "noise of {} nats",
        "floor": "floor of {}",
    }
    causes = [text.format(value) for name, text in words.items() if (value := left.pop(f"disturbance.{name}", None))]
    side = left.pop("disturbance.side", "sampler")
    where = "sampler and trainer (matched control)" if side == "both" else side
    return [f"disturbed {where}: {', '.join(causes)}"] if causes else []


def describe_sampler(left: dict[str, Any]) -> str:
    """Engine, number formats and verification. Their settings (dotted keys) are removed from `left`."""
    engine, dtype = (left.pop(f"sampler.{name}", "unrecorded") for name in ("engine", "dtype"))
    few_bits = ("quantization", "group_size", "kv_cache_dtype")
    bits, group, cache = (left.pop(f"sampler.{name}", None) for name in few_bits)
    formats = [f"weights in {bits}" + (f" by groups of {group}" if group else "")] if bits else []
    formats += [f"a cache in {cache}"] if cache not in (None, "auto") else []
    sides = " on both sides" if engine == "exact" else ""
    few = f" with {' and '.join(formats)}{sides}" if formats else ""
    verified = ", verified by the trainer" if left.pop("sampler.verify", False) else ""
    return f"{engine} in {dtype}{few}{verified}"


def work_share(run: TrainedRun) -> float:
    """The share of `WORK` in a job's wall time past start-up; NaN if not timed."""
    past = run.record.wall_seconds - run.record.startup_seconds
    spent = np.sum([np.nansum(run.metric(in_group(TIME, phase))) for phase in WORK])
    return float(spent / past) if past > 0 and spent > 0 else float("nan")


OTHER_PROMPTS = (
    "The runs had different prompt tokens, made from the same problems: the chat template may hold the date, or the "
    "tokenizer changed"
)


def what_ran(results: Results) -> str:
    """Versions, commit, hardware, seconds and assumed values, as a Markdown list."""
    runs = results.all_runs()
    records = [run.record for run in runs]
    wall = [r.wall_seconds for r in records]
    shares = [share for share in map(work_share, runs) if not np.isnan(share)]
    timed = f"{min(wall):.0f} to {max(wall):.0f} s each, {sum(wall) / 3600:.2f} h in all"
    busy = f"at least {100 * min(shares):.0f} % of a job" if shares else "not recorded"
    left_out = sum(int((~np.isfinite(r.tokens.logp_train_T - r.tokens.logp_infer_T)).sum()) for r in runs)
    seeds = ", ".join(dict.fromkeys(str(run.seed) for run in runs))
    items = [
        f"Training jobs of the arms above, without those of ablations: {len(runs)}, seeds {seeds}",
        *made_by(records, f"; lm-eval {distinct(e.lm_eval for e in results.all_evaluations())}"),
        f"Wall time of the jobs: {timed}",
        f"Generation, forward, backward and optimizer: {busy}'s wall time past start-up (jobs timed: {len(shares)})",
        *([f"Made by another version of {few(results.edited)} than is there now"] if results.edited else []),
        *(
            [OTHER_PROMPTS]
            if len({r.fingerprint["prompts"] for r in records if "prompts" in r.fingerprint}) > 1
            else []
        ),
        *_interruptions(runs),
        *_assumed_values(results),
    ]
    if left_out:
        items.append(f"Sampled tokens left out of the figure of Δ, log-probability not finite: {left_out}")
    return "\n".join(f"- {item}." for item in items)


def _interruptions(runs: Sequence[TrainedRun]) -> list[str]:
    """Skipped updates, restarts from a checkpoint, and runs that a rule ended."""
    skipped, resumed, stopped = [], [], []
    for run in runs:
        name, skipped_N = f"{run.arm}, seed {run.seed}", run.metric(SKIPPED)
        if np.nansum(skipped_N):
            skipped.append(f"{name}: {np.nansum(skipped_N):.0f} of {skipped_N.size}")
        if steps := run.record.resumed_at_steps:
            resumed.append(f"{name}: from step {', '.join(map(str, steps))}")
        if why := run.record.stopped:
            stopped.append(f"{name}: {why}")
    recorded = any(SKIPPED in run.metrics for run in runs)
    items = [f"Updates skipped for a NaN or Inf: {'; '.join(skipped) or 'none'}"] if recorded else []
    items += [f"Went on from a checkpoint after an interruption: {'; '.join(resumed)}"] if resumed else []
    # A survival curve counts such a run as censored at its end, although its end is not random.
    return items + ([f"Ended early by a rule: {'; '.join(stopped)}"] if stopped else [])


def assumed_keys(model: type[BaseModel] = Run, prefix: str = "") -> list[str]:
    """The dotted keys of a run's settings whose descriptions mark the value as assumed."""
    keys = []
    for name, field in model.model_fields.items():
        if ASSUMED in (field.description or ""):
            keys.append(prefix + name)
        for inner in _models(field.annotation):
            keys += assumed_keys(inner, f"{prefix}{name}.")
    return keys


def _models(annotation: Any) -> Sequence[type[BaseModel]]:
    """The settings blocks in an annotation: itself, or the members of a union."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return list(itertools.chain.from_iterable(_models(member) for member in typing.get_args(annotation)))
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []


def _assumed_values(results: Results) -> list[str]:
    items = []
    for key in assumed_keys():
        used = {}
        for arm in results.arms:
            flat = flatten(results.runs[arm][0].record.settings)
            # Without a weight its threshold is never read.
            if key != "correction.sequence_threshold":
                used.update({arm: flat[key]} if key in flat else {})
            elif flat.get("correction.sequence", "none") not in ("none", "is"):
                used[arm] = _sequence_limit(flat)
        if used:
            values = ", ".join(f"{value} in {arm}" for arm, value in used.items())
            items.append(f"`{key}` is assumed, since the paper's value is unconfirmed: {values}")
    return items


def _sequence_limit(flat: Mapping[str, Any]) -> float:
    """C of the sequence weight, or its default."""
    sequence, threshold = flat["correction.sequence"], flat.get("correction.sequence_threshold")
    return Correction(sequence=sequence, sequence_threshold=threshold).limit


def _number(value: float | None) -> str:
    """All digits, so that different numbers stay different."""
    return str(value).removesuffix(".0")


def _block(key: str) -> str:
    return key.split(".")[0]

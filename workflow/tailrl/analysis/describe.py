"""What an arm is, in words, and what ran: both from the run.json that each training job wrote."""

import itertools
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel

from tailrl.artifacts.records import RunRecord
from tailrl.artifacts.results import Results, TrainedRun
from tailrl.config.arm import Arm, Correction
from tailrl.config.jobs import Run
from tailrl.tracking.metrics import SKIPPED, TIME, in_group

WORK = ("rollout", "forward", "backward", "optimizer")
"""The phases that are the work itself: generation, scoring, gradients and update."""

_NAMES = {"study", "arm"}
_OWN = Arm.model_fields.keys() - {"training"}
"""The blocks of a run's settings that are its arm's own: `describe` says all of them."""

ASSUMED = "(assumed)"
"""How the typed study marks, in a field's description, a value that no paper confirms."""


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value})
    return flat


DEFAULTS = flatten(Arm().model_dump(mode="json"))
"""An arm's own settings where a study says nothing, by dotted key."""


ALL_TOKENS, UNWEIGHTED = "all tokens", "no weights"


def describe_arms(results: Results) -> dict[str, str]:
    """Each arm in words; settings beyond the usual ones are listed where the arms differ in them."""
    flat = {arm: flatten(results.runs[arm][0].record.settings) for arm in results.arms}
    keys = dict.fromkeys(key for settings in flat.values() for key in settings if _block(key) not in _NAMES | _OWN)
    differing = [key for key in keys if len({str(settings.get(key)) for settings in flat.values()}) > 1]
    return {
        arm: "; ".join([*describe(settings), *(f"{key} = {settings.get(key)}" for key in differing)])
        for arm, settings in flat.items()
    }


def describe(flat: Mapping[str, Any]) -> list[str]:
    """An arm's own settings (dotted keys) as clauses: two arms that differ in any of them are described differently.

    Each clause takes the settings that it spells out from those that are left; what no clause took is listed by its
    key, unless it has its default.
    """
    left = {key: value for key, value in flat.items() if _block(key) in _OWN}
    clauses = [_objective(left), *_clip(left), *_weights(left), *describe_disturbance(left)]
    clauses.append(f"sampled by {describe_sampler(left)}")
    return clauses + [f"{key} = {value}" for key, value in left.items() if value != DEFAULTS.get(key)]


def arm_rows(results: Results) -> Iterator[dict[str, str]]:
    """Of each arm what it is, and of that what it does about the mismatch: the table behind the names."""
    for arm, words in describe_arms(results).items():
        remedy = describe_remedy(flatten(results.runs[arm][0].record.settings))
        yield {"arm": arm, "remedy": remedy, "what": words}


def describe_remedy(flat: Mapping[str, Any]) -> str:
    """What an arm does about the tail and the mismatch, its set and its weights; nothing where it does nothing."""
    left = dict(flat)
    clauses = [_vocabulary(left), *_weights(left)]
    return "; ".join(clause for clause in clauses if clause not in (ALL_TOKENS, UNWEIGHTED))


def _objective(left: dict[str, Any]) -> str:
    """Estimator and vocabulary."""
    return f"{str(left.pop('estimator', 'an unrecorded estimator')).upper()} on {_vocabulary(left)}"


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
        details.append(f"in the {side} only")
    if left.get("vocabulary.outside") == "paper_fill":
        del left["vocabulary.outside"]
        details.append("paper's fill outside")
    return ", ".join(details)


def _clip(left: dict[str, Any]) -> list[str]:
    if not left.get("clip.ratio"):
        return []
    ratio, low, high = (left.pop(f"clip.{name}", None) for name in ("ratio", "low", "high"))
    return [f"clipped ratio, {ratio}, from 1 - {low} to 1 + {high}"]


def _weights(left: dict[str, Any]) -> list[str]:
    """The correction: weights and veto."""
    clauses = []
    if (token := left.get("correction.token", "none")) != "none":
        del left["correction.token"]
        clauses.append(f"token weights {token}, C = {_number(left.pop('correction.token_threshold', None))}")
    if (sequence := left.get("correction.sequence", "none")) != "none":
        limit = _sequence_limit(left)
        del left["correction.sequence"]
        left.pop("correction.sequence_threshold", None)
        by = " by r_ppo" if left.pop("correction.rejects", "r_corr") == "r_ppo" else ""
        clauses.append(f"sequence weights {sequence}{by}, C = {_number(limit)}")
    clauses = clauses or [UNWEIGHTED]
    if (veto := left.pop("correction.veto", None)) is not None:
        clauses.append(f"veto below a token ratio of {veto}")
    return clauses


def describe_disturbance(left: dict[str, Any]) -> list[str]:
    """The mismatch dial in words, taken from the settings (dotted keys) that are left; nothing where it is off."""
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
    """Engine, dtype and who verifies, taken from the settings (dotted keys) that are left."""
    engine, dtype = (left.pop(f"sampler.{name}", "unrecorded") for name in ("engine", "dtype"))
    verified = ", verified by the trainer" if left.pop("sampler.verify", False) else ""
    return f"{engine} in {dtype}{verified}"


def work_share(run: TrainedRun) -> float:
    """Generation, forward, backward and optimizer's share of a job's wall time past start-up; NaN if untimed."""
    past = run.record.wall_seconds - run.record.startup_seconds
    spent = np.sum([np.nansum(run.metric(in_group(TIME, phase))) for phase in WORK])
    return float(spent / past) if past > 0 and spent > 0 else float("nan")


def what_ran(results: Results) -> str:
    """Versions, commit, hardware, seconds and assumed values, as a Markdown list."""
    runs = results.all_runs()
    records = [run.record for run in runs]
    evaluations = [results.base, *results.evaluations.values()]
    versions = [", ".join(f"{k} {v}" for k, v in sorted(r.versions.items())) for r in records]
    commits = [f"{r.commit or 'unknown'}{' with uncommitted changes' if r.dirty else ''}" for r in records]
    wall = [r.wall_seconds for r in records]
    shares = [share for share in map(work_share, runs) if not np.isnan(share)]
    timed = f"{min(wall):.0f} to {max(wall):.0f} s each, {sum(wall) / 3600:.2f} h in all"
    busy = f"at least {100 * min(shares):.0f} % of a job" if shares else "not recorded"
    left_out = sum(int((~np.isfinite(r.tokens.logp_train_T - r.tokens.logp_infer_T)).sum()) for r in runs)
    items = [
        f"Training jobs: {len(runs)}, seeds {', '.join(dict.fromkeys(str(run.seed) for run in runs))}",
        f"Commit: {_distinct(commits)}",
        f"Versions: {_distinct(versions)}; lm-eval {_distinct(e.lm_eval for e in evaluations)}",
        f"Hardware: {_distinct(_hardware(record) for record in records)}",
        f"Wall time of the jobs: {timed}",
        f"Generation, forward, backward and optimizer: {busy}'s wall time past start-up (jobs timed: {len(shares)})",
        *_interruptions(runs),
        *_assumed_values(results),
    ]
    if left_out:
        items.append(f"Sampled tokens left out of the figure of Δ, log-probability not finite: {left_out}")
    return "\n".join(f"- {item}." for item in items)


def _interruptions(runs: Sequence[TrainedRun]) -> list[str]:
    """What did not go straight on in a run: updates that were skipped, processes that ended before it, rules that
    ended it."""
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
    # A survival curve takes such a run as censored at its end, although that was no chance.
    return items + ([f"Ended early by a rule: {'; '.join(stopped)}"] if stopped else [])


def assumed_keys(model: type[BaseModel] = Run, prefix: str = "") -> list[str]:
    """The dotted keys of a run's settings whose description marks their value as assumed."""
    keys = []
    for name, field in model.model_fields.items():
        if ASSUMED in (field.description or ""):
            keys.append(prefix + name)
        for inner in _models(field.annotation):
            keys += assumed_keys(inner, f"{prefix}{name}.")
    return keys


def _models(annotation: Any) -> Sequence[type[BaseModel]]:
    """The settings blocks that an annotation holds: itself, or the members of a union."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return list(itertools.chain.from_iterable(_models(member) for member in typing.get_args(annotation)))
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []


def _assumed_values(results: Results) -> list[str]:
    items = []
    for key in assumed_keys():
        used = {}
        for arm in results.arms:
            flat = flatten(results.runs[arm][0].record.settings)
            # A threshold belongs to a weight: without one its value is never read.
            if key != "correction.sequence_threshold":
                used.update({arm: flat[key]} if key in flat else {})
            elif flat.get("correction.sequence", "none") not in ("none", "is"):
                used[arm] = _sequence_limit(flat)
        if used:
            values = ", ".join(f"{value} in {arm}" for arm, value in used.items())
            items.append(f"`{key}` is assumed, since the paper's value is unconfirmed: {values}")
    return items


def _sequence_limit(flat: Mapping[str, Any]) -> float:
    """C of the sequence's weight, its default filled in."""
    return Correction(
        sequence=flat["correction.sequence"], sequence_threshold=flat.get("correction.sequence_threshold")
    ).limit


def _number(value: float | None) -> str:
    """In full, so that no two numbers look alike."""
    return str(value).removesuffix(".0")


def _block(key: str) -> str:
    return key.split(".")[0]


def _hardware(record: RunRecord) -> str:
    machine = record.hardware
    gpu = f"GPU {machine.gpu}" if machine.gpu else "no GPU"
    return (
        f"{machine.cpu or 'CPU not recorded'}, {machine.cores or '?'} cores, {machine.memory_gb:.0f} GB, {gpu}, "
        f"{record.threads} thread(s) a job"
    )


def _distinct(values: Iterable[object]) -> str:
    return "; also ".join(dict.fromkeys(str(value) for value in values))

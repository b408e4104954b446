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
from tailrl.config.arm import ArmBlocks
from tailrl.config.base import Kinds
from tailrl.config.jobs import Run
from tailrl.config.words import describe, describe_remedy
from tailrl.runtime.errors import few
from tailrl.tracking.metrics import SKIPPED, TIME, in_group

WORK = ("rollout", "forward", "backward", "optimizer")
"""The phases of a step: generation, scoring, gradients and update."""

_OF_ARM = {"study", "arm", *ArmBlocks.model_fields}
"""The names of a run, and the blocks of its settings that `describe` covers."""

ASSUMED = "(assumed)"
"""The mark, in a field's description, of a value that no paper confirms."""


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value})
    return flat


def describe_arms(results: Results) -> dict[str, str]:
    """Each arm in words; other settings are listed if the arms differ in them."""
    runs = {arm: results.settings(arm) for arm in results.arms}
    flat = {arm: flatten(run.model_dump(mode="json", exclude=_OF_ARM)) for arm, run in runs.items()}
    keys = dict.fromkeys(key for settings in flat.values() for key in settings)
    differing = [key for key in keys if len({str(settings.get(key)) for settings in flat.values()}) > 1]
    return {
        arm: "; ".join([*describe(run), *(f"{key} = {flat[arm].get(key)}" for key in differing)])
        for arm, run in runs.items()
    }


def arm_rows(results: Results) -> Iterator[dict[str, str]]:
    """Each arm, its remedy against the mismatch, and its description, as rows of a table."""
    for arm, words in describe_arms(results).items():
        yield {"arm": arm, "remedy": describe_remedy(results.settings(arm)), "what": words}


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
    """The settings blocks in an annotation: itself, its kinds, or the members of a union."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return list(itertools.chain.from_iterable(_models(member) for member in typing.get_args(annotation)))
    if not isinstance(annotation, type) or not issubclass(annotation, BaseModel):
        return []
    return list(annotation.kinds().values()) if issubclass(annotation, Kinds) else [annotation]


def _assumed_values(results: Results) -> list[str]:
    items = []
    for key in assumed_keys():
        used = {}
        for arm in results.arms:
            run = results.settings(arm)
            # Without a weight its threshold is never read.
            if key != "correction.sequence_threshold":
                flat = flatten(run.model_dump(mode="json"))
                used.update({arm: flat[key]} if key in flat else {})
            elif run.correction.sequence_bounded:
                used[arm] = run.correction.limit
        if used:
            values = ", ".join(f"{value} in {arm}" for arm, value in used.items())
            items.append(f"`{key}` is assumed, since the paper's value is unconfirmed: {values}")
    return items

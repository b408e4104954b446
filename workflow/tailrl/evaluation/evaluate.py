"""Held-out evaluation: lm-eval over the project's engine, k sampled responses for each problem.

lm-eval has the documents, the repeats, the scoring and the aggregation (task eval_tasks/boxed.yaml, which calls
`harness`); the project's Sampler answers its requests. Every policy is sampled from its full distribution. A response's
random stream depends on the problem and the repeat alone, so that policies are compared on common random numbers.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from tailrl.artifacts.evaluation import (
    EvaluationFile,
    PolicyScores,
    Samples,
    header,
    manifest_of,
    write_evaluation,
    write_samples,
)
from tailrl.artifacts.manifest import policy_digest, vouched_checksum, write_manifest
from tailrl.config.jobs import Evaluation
from tailrl.config.source_files import at_start, job_files
from tailrl.evaluation.harness import FILTER, GREEDY, TASK, load_tasks, make_lm, read_held_out
from tailrl.evaluation.parts import EvaluatedPolicy, Evaluee, Parts
from tailrl.model.policy import (
    check_vocabulary,
    encode_prompt,
    load_config,
    load_policy,
    load_tokenizer,
    named_weights,
    required_length,
)
from tailrl.rollout import Sampler, make_sampler
from tailrl.rollout.prompts import prompts_digest, show_prompts
from tailrl.rollout.sampling import stop_tokens
from tailrl.rollout.types import Rollout
from tailrl.runtime.atomic_files import sync_files
from tailrl.runtime.errors import ModelError, StorageError, reason, say
from tailrl.runtime.timeouts import guarded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An arm's evaluation: its two files, and further fields of their manifest.

    Attributes:
        samples: one per policy and problem.
        made_from: arm, settings, digests of policies and problems.
    """

    summary: EvaluationFile
    samples: list[Samples]
    made_from: dict[str, Any]


def check_weights(folder: Path) -> None:
    """Raises StudyError if the folder's safetensors are missing, truncated or invalid; reads no tensor."""
    index = folder / "model.safetensors.index.json"
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"] if index.exists() else {}
        for name in sorted(set(weight_map.values())) or ["model.safetensors"]:
            with safe_open(folder / name, framework="pt"):
                pass
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{folder}: no weights could be read from it: {reason(error)}") from None


@dataclass(frozen=True, slots=True)
class Sampling:
    """An engine for the policies of an arm, their tokenizer, and the most tokens of prompt and response together."""

    sampler: Sampler
    tokenizer: "PreTrainedTokenizerBase"
    max_length: int


def evaluate(
    arm: str,
    policies: Sequence[tuple[int, Path]],
    problems_file: Path,
    settings: Evaluation,
    start: Callable[[], Sampling],
    kept: Path,
    snapshots: Sequence[tuple[int, int, Path]] = (),
    share: tuple[int, int] = (0, 1),
    prompts: str | None = None,
) -> Evaluated | None:
    """Evaluates the policies and snapshots of one arm, one after another, in one engine.

    Policies that an earlier process has evaluated are not evaluated again.

    Args:
        arm: the arm's name, for the record.
        policies: training seed and Hugging Face folder of each policy; all of one architecture.
        problems_file: JSONL, as `tasks.problem.write_problems` makes it.
        settings: k, temperature, length and the seed of the samples.
        start: starts the engine, if a policy is left to evaluate.
        kept: the folder of finished policies (`Parts`).
        snapshots: training seed, steps done, folder of each snapshot.
        share: this process's number and how many there are; policies are dealt to them round robin.
        prompts: the digest of the prompts' tokens (`rollout.prompts.prompts_digest`), for the record.

    Returns:
        The evaluation; None for a share, whose policies are in `kept`.

    Raises:
        StudyError: an unusable problems file, policy or prompt, before anything is sampled.
    """
    of_steps = [({"seed": seed, "step": step}, folder) for seed, step, folder in snapshots]
    named = [*(({"seed": seed}, folder) for seed, folder in policies), *of_steps]
    for _, folder in named:
        check_weights(folder)
    every = [Evaluee(whose, folder, policy_digest(folder)) for whose, folder in named]
    problems = vouched_checksum(problems_file)
    parts = Parts(kept, problems, settings, prompts)
    number, processes = share
    if missing := [policy for policy in every[number::processes] if parts.read(policy) is None]:
        own = len(every[number::processes])
        if len(missing) < own:
            say(f"arm {arm}: {own - len(missing)} of {own} policies are evaluated already")
        _evaluate(missing, parts, problems_file, settings, start(), prompts)
    if processes > 1:
        return None
    found = [_part(parts, policy) for policy in every]
    records = [part.scores for part in found]
    scores = {"policies": records[: len(policies)], "snapshots": records[len(policies) :]}
    summary = EvaluationFile.model_validate(header(arm, settings) | scores | {"lm_eval_version": version("lm_eval")})
    digests = [{**policy.whose, "sha256": policy.sha256} for policy in every]
    given = {"arm": arm, "settings": settings.model_dump(mode="json"), "policies": digests}
    made_from = {**given, "inputs": {"problems": problems}, "sources": at_start(job_files("evaluate", settings))}
    return Evaluated(summary, [sample for part in found for sample in part.samples], made_from)


def _part(parts: Parts, policy: Evaluee) -> EvaluatedPolicy:
    part = parts.read(policy)
    if part is None:
        raise StorageError(f"{parts.folder}: the evaluation of {policy.folder} is gone or damaged; run the study again")
    return part


def _evaluate(
    policies: Sequence[Evaluee],
    parts: Parts,
    problems_file: Path,
    settings: Evaluation,
    engine: Sampling,
    prompts: str | None,
) -> None:
    """Evaluates these policies, and keeps each when it is done."""
    from lm_eval import evaluate as run

    tasks = load_tasks(problems_file, settings, settings.samples)
    greedy_tasks = load_tasks(problems_file, settings, 1)
    for evaluee in policies:
        # Not straight from the file: it lacks a tied head, which the engine needs.
        policy = load_policy(evaluee.folder)
        with guarded(settings.rollout_timeout, "the hand-over of the weights"):
            engine.sampler.load_weights(named_weights(policy))
        lm = make_lm(engine.sampler, engine.tokenizer, settings, engine.max_length)
        # Not simple_evaluate, which collects data of the machine for 3 s with each policy.
        outcome = run(lm, {"tasks": tasks}, bootstrap_iters=0)
        scored = by_document(outcome)
        greedy: list[Any] = [None] * len(scored)
        if settings.greedy:
            one = make_lm(engine.sampler, engine.tokenizer, settings, engine.max_length, GREEDY)
            greedy = by_document(run(one, {"tasks": greedy_tasks}, bootstrap_iters=0))
        samples = []
        for sample, best in zip(scored, greedy, strict=True):
            (responses,) = sample["filtered_resps"]
            of_best = best["filtered_resps"][0][0] if best else None
            problem, answer = sample["doc"]["id"], sample["doc"]["answer"]
            samples.append(Samples(**evaluee.whose, id=problem, answer=answer, responses=responses, greedy=of_best))
        record = _record(evaluee.whose, outcome["results"][TASK], scored, greedy, lm.rollouts) | {"prompts": prompts}
        parts.write(evaluee, EvaluatedPolicy(scores=PolicyScores.model_validate(record), samples=samples))


def by_document(outcome: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """lm-eval's scored problems, in the order of the file."""
    return sorted(outcome["samples"][TASK], key=lambda sample: int(sample["doc_id"]))


def _record(
    whose: Mapping[str, int],
    aggregates: Mapping[str, Any],
    scored: Sequence[Mapping[str, Any]],
    greedy: Sequence[Mapping[str, Any] | None],
    rollouts: Sequence[Rollout],
) -> dict[str, Any]:
    """One policy's scores, from lm-eval's aggregates, scored problems and, where asked for, greedy responses."""
    return {
        **whose,
        "avg_at_k": aggregates[f"avg_at_k,{FILTER}"],
        "pass_at_k": aggregates[f"pass_at_k,{FILTER}"],
        "response_length_mean": fmean(len(rollout.tokens) for rollout in rollouts),
        "stopped_fraction": fmean(rollout.stopped for rollout in rollouts),
        "per_problem": [
            {"id": sample["doc"]["id"], "correct": sample["correct"], "greedy": best["correct"][0] if best else None}
            for sample, best in zip(scored, greedy, strict=True)
        ],
    }


def evaluate_arm(
    arm: str,
    policies: Sequence[tuple[int, Path]],
    problems_file: Path,
    settings: Evaluation,
    kept: Path,
    snapshots: Sequence[tuple[int, int, Path]] = (),
    share: tuple[int, int] = (0, 1),
) -> Evaluated | None:
    """`evaluate` with the first policy's tokenizer and an engine for it; raises StudyError likewise."""
    folder = policies[0][1]
    check_weights(folder)
    tokenizer, problems = load_tokenizer(folder), read_held_out(problems_file)
    prompts = [encode_prompt(tokenizer, problem.prompt) for problem in problems]

    def start() -> Sampling:
        config = load_config(folder)
        check_vocabulary(config, tokenizer, folder)
        show_prompts(tokenizer, prompts, stop_tokens(folder, tokenizer), f"arm {arm}")
        most, key = config.max_position_embeddings, "evaluation.max_new_tokens"
        length = required_length(problems, prompts, settings.max_new_tokens, most, key)
        with guarded(settings.rollout_timeout, "the engine's start"):
            sampler = make_sampler(settings.sampler, folder, length, settings.seed)
        return Sampling(sampler, tokenizer, length)

    digest = prompts_digest(prompts)
    return evaluate(arm, policies, problems_file, settings, start, kept, snapshots, share, digest)


def write_results(evaluated: Evaluated, json_path: Path, samples_path: Path) -> None:
    """Write the summary, the samples and their manifest, to the disk; raises StudyError if the disk refuses."""
    write_evaluation(json_path, evaluated.summary)
    write_samples(samples_path, evaluated.samples)
    write_manifest(manifest_of(json_path), (json_path, samples_path), **evaluated.made_from)
    sync_files(json_path, samples_path, manifest_of(json_path))

"""Everything that a report needs, read from a study's results folder and checked against the study."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from tailrl.artifacts.evaluation import ArmScores, manifest_of, read_evaluation_file
from tailrl.artifacts.manifest import MANIFEST, Manifest, check_outputs, digest_of, read_manifest, tell_of_sources
from tailrl.artifacts.metrics import FloatArray, Metrics, read_metrics
from tailrl.artifacts.records import RunRecord, read_record
from tailrl.artifacts.tokens import Tokens, read_tokens
from tailrl.config.jobs import Evaluation
from tailrl.config.study import BASE_ARM, Study
from tailrl.config.training import differing
from tailrl.runtime.errors import StudyError, one_line
from tailrl.tracking.metrics import STEP


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """One run: its metrics by key over N steps, the tokens that it kept, and its record."""

    arm: str
    seed: int
    metrics: Metrics
    tokens: Tokens
    record: RunRecord

    def metric(self, key: str) -> FloatArray:
        """The metric at each recorded step, (N,); all NaN if this run never logged it."""
        return self.metrics.get(key, np.full(len(self.metrics[STEP]), math.nan))


@dataclass(frozen=True, slots=True)
class Results:
    """The input of a report: `runs[arm]` and `evaluations[arm]`, in the order of arms and seeds.

    `base` is the untrained policy's evaluation, and `baselines` are its evaluations at other temperatures, by name.
    `edited` are source files that are not as the runs and evaluations had them.
    """

    arms: tuple[str, ...]
    runs: Mapping[str, tuple[TrainedRun, ...]]
    evaluations: Mapping[str, ArmScores]
    base: ArmScores
    baselines: Mapping[str, ArmScores] = field(default_factory=dict)
    edited: tuple[str, ...] = ()

    def all_evaluations(self) -> list[ArmScores]:
        """Every evaluation, those of the untrained policy first."""
        return [self.base, *self.baselines.values(), *(self.evaluations[arm] for arm in self.arms)]

    def all_runs(self) -> list[TrainedRun]:
        """Every run, arm by arm."""
        return [run for arm in self.arms for run in self.runs[arm]]


def read_results(study: Study, folder: str | Path, arms: Iterable[str]) -> Results:
    """Everything under `folder` (results/<study>) that a report on these arms needs.

    Raises:
        StudyError: a file is missing, unreadable or empty, was changed after its job, belongs to another study, or
            contradicts another file.
    """
    names, folder, seeds = tuple(arms), Path(folder), study.arm_seeds()
    runs = {arm: tuple(_read_run(study, folder, arm, seed) for seed in seeds[arm]) for arm in names}
    base_path = folder / "eval" / f"{BASE_ARM}.json"
    base, made = _read_evaluation(study.evaluation, base_path, BASE_ARM, (0,))
    baselines = {}
    for name, settings in study.baseline_evaluations().items():
        path = folder / "eval" / f"{name}.json"
        baselines[name], own = _read_evaluation(settings, path, name, (0,))
        if own.evaluated(0) != made.evaluated(0) or own.inputs != made.inputs:
            raise StudyError(f"{path}: is not of the policy and the problems of {base_path}; remove either")
    for run in (run for arm in names for run in runs[arm]):
        if run.record.fingerprint.get("base policy") != made.evaluated(0):
            job = _job(folder, run.arm, run.seed)
            raise StudyError(f"{job}: was not trained from the base policy that {base_path} evaluated; remove either")
    evaluations = {}
    for arm in names:
        path = folder / "eval" / f"{arm}.json"
        evaluations[arm], own = _read_evaluation(study.evaluation, path, arm, seeds[arm])
        if evaluations[arm].problems != base.problems or own.inputs != made.inputs:
            raise StudyError(f"{path}: its problems are not those that the base policy was evaluated on")
        _check_policies(path, evaluations[arm], own, folder / "train" / arm)
    trained = [_job(folder, run.arm, run.seed) for arm in names for run in runs[arm]]
    jobs = [folder / "data", folder / "base", *trained]
    manifests = [path for job in jobs if (path := job / MANIFEST).is_file()]
    manifests += [manifest_of(folder / "eval" / f"{arm}.json") for arm in (BASE_ARM, *baselines, *names)]
    for path in manifests:
        check_outputs(path)
    return Results(names, runs, evaluations, base, baselines, tell_of_sources(*manifests))


def read_job(job: Path) -> tuple[RunRecord, Metrics]:
    """The record and metrics of a finished run, in train/<arm>/seed<seed>.

    Raises:
        StudyError: a file cannot be used, belongs to another run, or lacks steps.
    """
    record, metrics = read_record(job, RunRecord), read_metrics(job)
    if (record.arm, f"seed{record.seed}") != (job.parent.name, job.name):
        raise StudyError(
            f"{job / 'run.json'}: is of arm {one_line(record.arm)}, seed {record.seed}, not of this folder's"
        )
    steps, planned = len(metrics[STEP]), record.run.training.steps
    if steps != read_manifest(job / MANIFEST).steps or not (steps == planned or (record.stopped and steps < planned)):
        raise StudyError(f"{job / 'metrics.jsonl'}: holds {steps} steps, and its run has {planned}")
    return record, metrics


def _job(folder: Path, arm: str, seed: int) -> Path:
    return folder / "train" / arm / f"seed{seed}"


def _read_run(study: Study, folder: Path, arm: str, seed: int) -> TrainedRun:
    job, settings = _job(folder, arm, seed), study.run(arm)
    record, metrics = read_job(job)
    wanted = settings.model_dump(mode="json")
    if settings.training.dtype == "auto":
        wanted["training"]["dtype"] = record.run.training.dtype  # the machine decided
    for key in differing(record.settings, wanted):
        raise StudyError(f"{job / 'run.json'}: was trained with another {one_line(key)} than the study says")
    return TrainedRun(arm, seed, metrics, read_tokens(job, metrics, settings.training.keep_tokens_every), record)


def _read_evaluation(settings: Evaluation, path: Path, arm: str, seeds: Sequence[int]) -> tuple[ArmScores, Manifest]:
    """The evaluated policies of these seeds; raises StudyError if evaluated with other settings."""
    found, made = read_evaluation_file(path), read_manifest(manifest_of(path))
    wanted = {"arm": arm, **settings.model_dump(mode="json")}
    for key in differing({"arm": found.arm, **(made.settings or {})}, wanted):
        raise StudyError(f"{path}: was evaluated with another {one_line(key)} than the study says")
    evaluation = found.arrays()
    by_seed = {score.seed: score for score in evaluation.scores}
    for seed in seeds:
        if seed not in by_seed:
            raise StudyError(f"{path}: holds no policy of seed {seed}")
    snapshots = tuple(score for score in evaluation.snapshots if score.seed in seeds)
    return replace(evaluation, scores=tuple(by_seed[seed] for seed in seeds), snapshots=snapshots), made


def _check_policies(path: Path, evaluation: ArmScores, made: Manifest, runs: Path) -> None:
    """Raises StudyError if an evaluation's policies are not those now in the runs' folders."""
    for score in (*evaluation.scores, *evaluation.snapshots):
        job = runs / f"seed{score.seed}"
        name = "policy" if score.step is None else f"snapshots/step-{score.step:08d}"
        if made.evaluated(score.seed, score.step) != digest_of(read_manifest(job / MANIFEST).digests(name)):
            raise StudyError(f"{path}: evaluated another policy than {job / name}; remove it to evaluate that one")

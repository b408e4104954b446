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
from tailrl.config.jobs import Evaluation, Run
from tailrl.config.load import validated
from tailrl.config.study import BASE_ARM, Study
from tailrl.config.training import differing, without_operational
from tailrl.runtime.errors import DataError, one_line
from tailrl.tracking.metrics import STEP

PROBLEMS, POLICY = "problems", "base policy"
"""What a job was made from, as its manifest's inputs and a run's fingerprint name it."""


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

    def settings(self, arm: str) -> Run:
        """The settings of an arm's runs, as they recorded them."""
        return self.runs[arm][0].record.run

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
            raise DataError(f"{path}: is not of the policy and the problems of {base_path}; remove either")
        _check_prompts(path, baselines[name], base_path, base)
    _check_inputs(folder, base_path, made)
    every = [run for arm in names for run in runs[arm]]
    for run in every:
        job = _job(folder, run.arm, run.seed)
        if run.record.fingerprint.get(POLICY) != made.evaluated(0):
            raise DataError(f"{job}: was not trained from the base policy that {base_path} evaluated; remove either")
        problems = folder / "data" / "train.jsonl"
        if run.record.fingerprint.get(PROBLEMS) != _digest(problems):
            raise DataError(f"{job}: was trained on other problems than {problems} has; remove either")
    evaluations = {}
    for arm in names:
        path = folder / "eval" / f"{arm}.json"
        evaluations[arm], own = _read_evaluation(study.evaluation, path, arm, seeds[arm])
        if evaluations[arm].problems != base.problems or own.inputs != made.inputs:
            raise DataError(f"{path}: its problems are not those that the base policy was evaluated on")
        _check_prompts(path, evaluations[arm], base_path, base)
        _check_policies(path, evaluations[arm], own, folder / "train" / arm)
    jobs = [folder / "data", folder / "base", *(_job(folder, run.arm, run.seed) for run in every)]
    manifests = [job / MANIFEST for job in jobs]
    manifests += [manifest_of(folder / "eval" / f"{arm}.json") for arm in (BASE_ARM, *baselines, *names)]
    for path in manifests:
        check_outputs(path)
    return Results(names, runs, evaluations, base, baselines, tell_of_sources(*manifests))


def read_job(job: Path) -> tuple[RunRecord, Metrics]:
    """The record and metrics of a finished run, in train/<arm>/seed<seed>.

    Raises:
        StudyError: a file cannot be used, belongs to another run, lacks steps, or contradicts itself or the manifest.
    """
    record, metrics = read_record(job, RunRecord), read_metrics(job)
    if (record.arm, f"seed{record.seed}") != (job.parent.name, job.name):
        raise DataError(
            f"{job / 'run.json'}: is of arm {one_line(record.arm)}, seed {record.seed}, not of this folder's"
        )
    made, steps, planned = read_manifest(job / MANIFEST), len(metrics[STEP]), record.run.training.steps
    _check_record(job, record, made)
    if steps != made.steps or not (steps == planned or (record.stopped and steps < planned)):
        raise DataError(f"{job / 'metrics.jsonl'}: holds {steps} steps, and its run has {planned}")
    return record, metrics


def _check_record(job: Path, record: RunRecord, made: Manifest) -> None:
    """Raises StudyError where a record contradicts its settings, its fingerprint or its manifest.

    An older fingerprint may lack an entry, which is then not compared.
    """
    known = record.fingerprint
    of_settings = {"study": record.study, "arm": record.arm}
    of_fingerprint: dict[str, str | None] = {
        "seed": str(record.seed),
        "settings": digest_of(without_operational(record.settings)),
        **{name: made.inputs.get(name) for name in (PROBLEMS, POLICY)},
    }
    for name, value in of_settings.items():
        if value != record.settings.get(name):
            raise DataError(f"{job / 'run.json'}: its {name} is {one_line(value)}, and its settings are of another one")
    for name, digest in of_fingerprint.items():
        if digest != known.get(name, digest):
            raise DataError(
                f"{job / 'run.json'}: its {name} and its fingerprint's differ; put the file back from a copy, or "
                f"remove {job} and run the study again"
            )


def _check_inputs(folder: Path, base_path: Path, made: Manifest) -> None:
    """Raises StudyError where the folder's problems and base policy are not those of the base policy's evaluation."""
    held_out = folder / "data" / "evaluation.jsonl"
    if made.inputs.get(PROBLEMS) != _digest(held_out):
        raise DataError(f"{base_path}: was evaluated on other problems than {held_out} has; remove either")
    if made.evaluated(0) != digest_of(read_manifest(folder / "base" / MANIFEST).digests()):
        raise DataError(f"{base_path}: evaluated another policy than {folder / 'base'}; remove either")


def _check_prompts(path: Path, evaluation: ArmScores, base_path: Path, base: ArmScores) -> None:
    """Raises StudyError where policies were asked other prompts than the base policy; older files do not say."""
    if evaluation.prompts and base.prompts and evaluation.prompts != base.prompts:
        raise DataError(
            f"{path}: its policies were given other prompt tokens than {base_path} says, from the same problems: the "
            f"chat template may hold the date, or the tokenizer changed; remove {path.parent} and evaluate all anew"
        )


def _digest(file: Path) -> str | None:
    """What a file's manifest says of it."""
    output = read_manifest(file.with_name(MANIFEST)).outputs.get(file.name)
    return output.sha256 if output else None


def _job(folder: Path, arm: str, seed: int) -> Path:
    return folder / "train" / arm / f"seed{seed}"


def _read_run(study: Study, folder: Path, arm: str, seed: int) -> TrainedRun:
    job, settings = _job(folder, arm, seed), study.run(arm)
    record, metrics = read_job(job)
    wanted = settings.model_dump(mode="json")
    if settings.training.dtype == "auto":
        wanted["training"]["dtype"] = record.run.training.dtype  # the machine decided
    for key in differing(record.run.model_dump(mode="json"), wanted):
        raise DataError(f"{job / 'run.json'}: was trained with another {one_line(key)} than the study says")
    return TrainedRun(arm, seed, metrics, read_tokens(job, metrics, settings.training.keep_tokens_every), record)


def _read_evaluation(settings: Evaluation, path: Path, arm: str, seeds: Sequence[int]) -> tuple[ArmScores, Manifest]:
    """The evaluated policies of these seeds; raises StudyError if evaluated with other settings."""
    found, made = read_evaluation_file(path), read_manifest(manifest_of(path))
    wanted = {"arm": arm, **settings.model_dump(mode="json")}
    if made.settings is None:
        raise DataError(f"{manifest_of(path)}: says no settings, so that {path} may be of other ones")
    recorded = validated(Evaluation, made.settings, str(manifest_of(path))).model_dump(mode="json")
    for key in differing({"arm": found.arm, **recorded}, wanted):
        raise DataError(f"{path}: was evaluated with another {one_line(key)} than the study says")
    evaluation = found.arrays()
    by_seed = {score.seed: score for score in evaluation.scores}
    for seed in seeds:
        if seed not in by_seed:
            raise DataError(f"{path}: holds no policy of seed {seed}")
    snapshots = tuple(score for score in evaluation.snapshots if score.seed in seeds)
    return replace(evaluation, scores=tuple(by_seed[seed] for seed in seeds), snapshots=snapshots), made


def _check_policies(path: Path, evaluation: ArmScores, made: Manifest, runs: Path) -> None:
    """Raises StudyError if an evaluation's policies are not those now in the runs' folders."""
    for score in (*evaluation.scores, *evaluation.snapshots):
        job = runs / f"seed{score.seed}"
        name = "policy" if score.step is None else f"snapshots/step-{score.step:08d}"
        if made.evaluated(score.seed, score.step) != digest_of(read_manifest(job / MANIFEST).digests(name)):
            raise DataError(f"{path}: evaluated another policy than {job / name}; remove it to evaluate that one")

"""Reads what training and evaluation left in a study's results folder. Files in, typed records out."""

import json
import math
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrl.config.study import BASE_ARM, Study
from tailrl.runtime.errors import StudyError, reason
from tailrl.tracking.metrics import STEP

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Tokens:
    """A sample of the T tokens that one run trained on.

    Attributes:
        step_T: int32, the training step.
        logp_train_T: float64, nats: unmasked log π_train of the sampled token.
        logp_infer_T: float64, nats: unmasked log π_infer of the same token.
    """

    step_T: NDArray[np.int32]
    logp_train_T: FloatArray
    logp_infer_T: FloatArray


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """One arm trained with one seed.

    Attributes:
        metrics: by key, (N,) float64 over the N recorded steps, NaN where a step lacks the key.
        tokens: the per-token sample.
        record: run.json: settings, versions, commit, hardware, seconds.
    """

    arm: str
    seed: int
    metrics: Mapping[str, FloatArray]
    tokens: Tokens
    record: Mapping[str, Any]

    def metric(self, key: str) -> FloatArray:
        """The metric at each recorded step, NaN throughout where this run never logged it."""
        return self.metrics.get(key, np.full(len(self.metrics[STEP]), math.nan))


@dataclass(frozen=True, slots=True)
class Score:
    """One policy on the held-out problems: correct_PK (P, K) float64, 0 or 1; its training seed (base: 0)."""

    seed: int
    correct_PK: FloatArray

    @property
    def by_problem(self) -> FloatArray:
        """avg@k of each problem, (P,)."""
        return np.asarray(self.correct_PK.mean(axis=1), dtype=np.float64)

    @property
    def avg_at_k(self) -> float:
        """Share of right samples."""
        return float(self.correct_PK.mean())

    @property
    def pass_at_k(self) -> float:
        """Share of problems with at least one right sample."""
        return float(self.correct_PK.max(axis=1).mean())


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The score of a policy on the way, after so many steps."""

    step: int
    score: Score


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An arm's policies on the same problems, in the same order; `lm_eval` is the harness' version."""

    arm: str
    problems: tuple[str, ...]
    scores: tuple[Score, ...]
    lm_eval: str
    snapshots: tuple[Snapshot, ...] = ()


@dataclass(frozen=True, slots=True)
class Results:
    """What a report is made from: `runs[arm]` and `evaluations[arm]` in the order of arms and seeds."""

    arms: tuple[str, ...]
    runs: Mapping[str, tuple[TrainedRun, ...]]
    evaluations: Mapping[str, Evaluation]
    base: Evaluation

    def all_runs(self) -> list[TrainedRun]:
        """Every run, arm by arm."""
        return [run for arm in self.arms for run in self.runs[arm]]


def read_results(study: Study, folder: Path, arms: Iterable[str]) -> Results:
    """Everything under `folder` (results/<study>) that a report on these arms needs.

    Raises:
        StudyError: a file is missing, unreadable or empty, or policies were not evaluated alike.
    """
    names = tuple(arms)
    runs = {arm: tuple(read_run(folder, arm, seed) for seed in study.seeds) for arm in names}
    base = read_evaluation(folder / "eval" / f"{BASE_ARM}.json")
    evaluations = {}
    for arm in names:
        path = folder / "eval" / f"{arm}.json"
        evaluation = read_evaluation(path)
        by_seed = {score.seed: score for score in evaluation.scores}
        for seed in study.seeds:
            if seed not in by_seed:
                raise StudyError(f"{path}: holds no policy of seed {seed}")
        if evaluation.problems != base.problems:
            raise StudyError(f"{path}: its problems are not those that the base policy was evaluated on")
        scores = tuple(by_seed[seed] for seed in study.seeds)
        snapshots = tuple(kept for kept in evaluation.snapshots if kept.score.seed in study.seeds)
        evaluations[arm] = Evaluation(arm, evaluation.problems, scores, evaluation.lm_eval, snapshots)
    return Results(names, runs, evaluations, base)


def read_run(folder: Path, arm: str, seed: int) -> TrainedRun:
    """The files of one training job; raises StudyError naming the file that cannot be used."""
    job = folder / "train" / arm / f"seed{seed}"
    record = _read_object(job / "run.json")
    if not isinstance(record.get("settings"), dict):
        raise StudyError(f"{job / 'run.json'}: has no block named settings")
    return TrainedRun(arm, seed, read_metrics(job / "metrics.jsonl"), read_tokens(job / "tokens.npz"), record)


def read_metrics(path: Path) -> dict[str, FloatArray]:
    """Every key's value per step, (N,) float64 with NaN where a line lacks the key or has null.

    Raises:
        StudyError: the file is missing or empty, or a line is not an object of numbers in rising steps.
    """
    lines: list[dict[str, float]] = []
    for number, text in enumerate(read_text(path).splitlines(), start=1):
        try:
            values = {key: math.nan if value is None else float(value) for key, value in json.loads(text).items()}
        except (AttributeError, TypeError, ValueError, RecursionError):
            raise StudyError(f"{path}, line {number}: not a JSON object of numbers") from None
        if not values.get(STEP, math.nan) > (lines[-1][STEP] if lines else -math.inf):
            raise StudyError(f"{path}, line {number}: {STEP} is missing or does not rise")
        lines.append(values)
    if not lines:
        raise StudyError(f"{path}: holds no training step")
    keys = dict.fromkeys(key for line in lines for key in line)
    return {key: np.array([line.get(key, math.nan) for line in lines]) for key in keys}


def read_tokens(path: Path) -> Tokens:
    """The per-token sample of a run; raises StudyError where it is missing, unreadable, empty or ragged."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            step, train, infer = (arrays[name] for name in ("step", "logp_train", "logp_infer"))
    except FileNotFoundError:
        raise StudyError(f"{path}: is missing") from None
    except KeyError as error:
        raise StudyError(f"{path}: {error.args[0]}") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        raise StudyError(f"{path}: cannot be read as an npz file of arrays") from None
    if not step.size or not step.shape == train.shape == infer.shape == (step.size,):
        raise StudyError(f"{path}: holds no tokens, or arrays of different lengths")
    return Tokens(step.astype(np.int32), train.astype(np.float64), infer.astype(np.float64))


def read_evaluation(path: Path) -> Evaluation:
    """The evaluation of one arm; raises StudyError where it is missing, unreadable, empty or ragged."""
    data = _read_object(path)
    try:
        ways = data.get("snapshots", [])
        problems = [tuple(str(item["id"]) for item in policy["per_problem"]) for policy in (*data["policies"], *ways)]
        scores = tuple(_score(policy) for policy in data["policies"])
        snapshots = tuple(Snapshot(int(policy["step"]), _score(policy)) for policy in ways)
        arm, lm_eval = str(data["arm"]), str(data.get("lm_eval_version", "not recorded"))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise StudyError(f"{path}: not an evaluation with per-problem samples: {error!r}") from None
    every = [*scores, *(kept.score for kept in snapshots)]
    if not scores or any(score.correct_PK.ndim != 2 or not score.correct_PK.size for score in every):
        raise StudyError(f"{path}: holds no policy, or a policy without problems")
    if len({(ids, score.correct_PK.shape) for ids, score in zip(problems, every, strict=True)}) > 1:
        raise StudyError(f"{path}: its policies differ in problems or samples per problem")
    return Evaluation(arm, problems[0], scores, lm_eval, snapshots)


def _score(policy: Mapping[str, Any]) -> Score:
    return Score(int(policy["seed"]), np.array([item["correct"] for item in policy["per_problem"]], dtype=np.float64))


def read_text(path: Path) -> str:
    """A file's text; raises StudyError where it is missing or cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise StudyError(f"{path}: is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise StudyError(f"{path}: cannot be read: {reason(error)}") from None


def _read_object(path: Path) -> dict[str, Any]:
    text = read_text(path)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise StudyError(f"{path}: not valid JSON") from None
    if not isinstance(data, dict):
        raise StudyError(f"{path}: holds {type(data).__name__}, not a JSON object")
    return data

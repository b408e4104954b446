"""eval/<arm>.json and <arm>.samples.jsonl: an arm's scores and responses. The only reader and writer of these files."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from tailrl.artifacts.files import Record, parse_record
from tailrl.artifacts.manifest import read_vouched
from tailrl.artifacts.metrics import FloatArray
from tailrl.artifacts.records import Count
from tailrl.config.jobs import Evaluation
from tailrl.runtime.errors import DataError, writing


class ProblemScores(Record):
    """One problem's samples, 1 if correct, in the order of the repeats; and the greedy response, where there is one."""

    id: str
    correct: list[Literal[0, 1]] = Field(min_length=1)
    greedy: Literal[0, 1] | None = None


class PolicyScores(Record):
    """One policy: its training seed (base: 0), the step of a snapshot, its means over problems, and the problems.

    Lengths have the end token; stopped responses are those with one. `prompts` is a digest of all prompts' tokens,
    which older files lack.
    """

    seed: Count
    step: Count | None = None
    avg_at_k: float = Field(ge=0, le=1)
    pass_at_k: float = Field(ge=0, le=1)
    response_length_mean: float = Field(ge=0)
    stopped_fraction: float = Field(ge=0, le=1)
    prompts: str | None = None
    per_problem: list[ProblemScores]

    def wrong(self, max_new_tokens: int) -> str | None:
        """The first number that contradicts the samples, in words; None where all fit."""
        correct_PK = np.array([problem.correct for problem in self.per_problem], dtype=np.float64)
        for name, value, of_samples in (
            ("avg_at_k", self.avg_at_k, correct_PK.mean()),
            ("pass_at_k", self.pass_at_k, correct_PK.max(axis=1).mean()),
        ):
            if not math.isclose(value, of_samples, abs_tol=1e-9):
                return f"its {name} is {value:g}, and its samples give {of_samples:g}"
        if self.response_length_mean > max_new_tokens:
            return f"its mean response has {self.response_length_mean:g} tokens, of {max_new_tokens} at most"
        # Both are counts over all responses, divided by their number.
        for name, mean in (
            ("response_length_mean", self.response_length_mean),
            ("stopped_fraction", self.stopped_fraction),
        ):
            total = mean * correct_PK.size
            if not math.isclose(total, round(total), rel_tol=1e-9, abs_tol=1e-6):
                return f"its {name} is {mean:g}, which {correct_PK.size} responses cannot give"
        return None


@dataclass(frozen=True, slots=True)
class Score:
    """One policy on the held-out problems: its training seed (base: 0), correct_PK, (P, K) float64, 0 or 1, the step
    after which a snapshot was kept, and greedy_P, (P,) likewise, None where no greedy response was asked for."""

    seed: int
    correct_PK: FloatArray
    step: int | None = None
    greedy_P: FloatArray | None = None

    @property
    def by_problem(self) -> FloatArray:
        """avg@k of each problem, (P,)."""
        return np.asarray(self.correct_PK.mean(axis=1), dtype=np.float64)

    @property
    def avg_at_k(self) -> float:
        """The share of correct samples."""
        return float(self.correct_PK.mean())

    @property
    def pass_at_k(self) -> float:
        """The share of problems with at least one correct sample."""
        return float(self.correct_PK.max(axis=1).mean())


@dataclass(frozen=True, slots=True)
class ArmScores:
    """An arm's policies on the same problems, in the same order.

    `lm_eval` is lm-eval's version, `prompts` the digest of the prompts' tokens, None in older files.
    """

    arm: str
    problems: tuple[str, ...]
    scores: tuple[Score, ...]
    lm_eval: str
    snapshots: tuple[Score, ...] = ()
    prompts: str | None = None


class Samples(Record):
    """A line of <arm>.samples.jsonl: a policy's responses to a problem, in the order of `ProblemScores.correct`, and
    its greedy response."""

    seed: Count
    step: Count | None = None
    id: str
    answer: str
    responses: list[str]
    greedy: str | None = None


class EvaluationFile(Record):
    """eval/<arm>.json; `header` gives its first fields."""

    arm: str
    task: str
    samples_per_problem: Count
    temperature: float
    max_new_tokens: Count
    sampler: dict[str, Any]
    seed: int
    policies: list[PolicyScores]
    snapshots: list[PolicyScores] = Field(default_factory=list)
    lm_eval_version: str

    def arrays(self) -> ArmScores:
        """The scores in arrays."""
        problems = tuple(item.id for item in self.policies[0].per_problem)
        scores, snapshots = (tuple(map(_score, policies)) for policies in (self.policies, self.snapshots))
        prompts = next((policy.prompts for policy in self.policies if policy.prompts), None)
        return ArmScores(self.arm, problems, scores, self.lm_eval_version, snapshots, prompts)


def header(arm: str, settings: Evaluation) -> dict[str, Any]:
    """The fields of an `EvaluationFile` that say how an arm was evaluated."""
    shared = settings.model_dump(mode="json", include={"temperature", "max_new_tokens", "sampler", "seed"})
    return {"arm": arm, "task": settings.task.name, "samples_per_problem": settings.samples, **shared}


def manifest_of(path: Path) -> Path:
    """The path of the manifest of an evaluation or of its samples, eval/<arm>.manifest.json."""
    ending = ".samples.jsonl" if path.name.endswith(".samples.jsonl") else ".json"
    return path.with_name(f"{path.name.removesuffix(ending)}.manifest.json")


def parts_of(path: Path) -> Path:
    """The folder of what is evaluated already while eval/<arm>.json is made, eval/<arm>.parts."""
    return path.with_suffix(".parts")


def write_evaluation(path: Path, found: EvaluationFile) -> None:
    """Write eval/<arm>.json; raises StudyError if the disk refuses."""
    _write(path, json.dumps(found.model_dump(exclude_defaults=True), indent=1, ensure_ascii=False) + "\n")


def write_samples(path: Path, samples: Iterable[Samples]) -> None:
    """Write every response, one line per policy and problem; raises StudyError if the disk refuses."""
    lines = (json.dumps(sample.model_dump(exclude_none=True), ensure_ascii=False) for sample in samples)
    _write(path, "".join(f"{line}\n" for line in lines))


def _write(path: Path, text: str) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def read_evaluation_file(path: Path) -> EvaluationFile:
    """An arm's evaluation as written; raises StudyError for a bad file or policies whose problems or samples differ."""
    found = parse_record(EvaluationFile, read_vouched(path, manifest_of(path)), path)
    every = [*found.policies, *found.snapshots]
    if not found.policies or not all(policy.per_problem for policy in every):
        raise DataError(f"{path}: holds no policy, or a policy without problems")
    if len({tuple((item.id, len(item.correct)) for item in policy.per_problem) for policy in every}) > 1:
        raise DataError(f"{path}: its policies differ in problems or samples per problem")
    first = every[0].per_problem
    if len({item.id for item in first}) < len(first):
        raise DataError(f"{path}: two problems have the same id")
    if any(len({item.greedy is None for item in policy.per_problem}) > 1 for policy in every):
        raise DataError(f"{path}: some problems of a policy have a greedy response, and some have none")
    if {len(item.correct) for item in first} != {found.samples_per_problem}:
        raise DataError(f"{path}: a problem does not have {found.samples_per_problem} samples")
    if len({(policy.seed, policy.step) for policy in every}) < len(every):
        raise DataError(f"{path}: holds a policy twice")
    if len({policy.prompts for policy in every if policy.prompts}) > 1:
        raise DataError(f"{path}: its policies were given different prompt tokens; remove it to evaluate them anew")
    for policy in every:
        if why := policy.wrong(found.max_new_tokens):
            raise DataError(f"{path}: seed {policy.seed}: {why}")
    return found


def _score(policy: PolicyScores) -> Score:
    greedy = [item.greedy for item in policy.per_problem]
    return Score(
        seed=policy.seed,
        correct_PK=np.array([item.correct for item in policy.per_problem], dtype=np.float64),
        step=policy.step,
        greedy_P=None if None in greedy else np.array(greedy, dtype=np.float64),
    )

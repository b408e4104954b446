"""Held-out scores of each arm and each policy, and differences between arms."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailrl.artifacts.evaluation import Score
from tailrl.artifacts.metrics import FloatArray
from tailrl.artifacts.results import Results
from tailrl.artifacts.tables import Row
from tailrl.config.study import BASE_ARM
from tailrl.stats.crossed import crossed_difference, crossed_gain, crossed_interval
from tailrl.stats.intervals import Interval, known_mean, mean_interval, problem_interval
from tailrl.stats.power import least_effect, seeds_needed
from tailrl.stats.tests import Difference, arm_difference, holm, paired_difference
from tailrl.tracking.metrics import K3_UNMASKED

Pair = tuple[str, str]
Differences = tuple[Difference, Difference, Difference]


@dataclass(frozen=True, slots=True)
class Gain:
    """An arm's held-out scores, as shares of 1, and its gain in avg@k over the untrained policy.

    Attributes:
        avg, passed: avg@k and pass@k, with intervals over seeds and problems (`crossed`).
        avg_seeds: avg@k with its interval over seeds alone, for these problems.
        gain: with its interval over seeds and problems; gain_p_holm: its p by Holm over the study's arms.
        single_min, single_max: smallest and largest gain of a single seed.
        single_low: the lowest end of a single seed's interval over problems.
    """

    arm: str
    avg: Interval
    avg_seeds: Interval
    passed: Interval
    gain: Difference
    gain_p_holm: float
    single_min: float
    single_max: float
    single_low: float


def gains_over_base(results: Results) -> list[Gain]:
    """Every arm's held-out scores and gain over the untrained policy."""
    base_P = results.base.scores[0].by_problem
    scores = {arm: results.evaluations[arm].scores for arm in results.arms}
    gains = {arm: crossed_gain(by_problem(own), base_P) for arm, own in scores.items()}
    adjusted = holm([gain.p for gain in gains.values()]).tolist()
    found = []
    for (arm, own), gain_p in zip(scores.items(), adjusted, strict=True):
        single = [paired_difference(score.by_problem, base_P) for score in own]
        found.append(
            Gain(
                arm,
                crossed_interval(by_problem(own)),
                mean_interval([score.avg_at_k for score in own]),
                crossed_interval([score.correct_PK.max(axis=1) for score in own]),
                gains[arm],
                gain_p,
                min(difference.mean for difference in single),
                max(difference.mean for difference in single),
                min(difference.low for difference in single),
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class PolicyScore:
    """One policy's held-out scores, shares of 1: avg@k, pass@k, and the gain in avg@k over the untrained policy.

    Intervals are over problems, with the gain paired.

    Attributes:
        greedy: of its most probable responses; NaN where the study asks for none.
    """

    arm: str
    seed: int
    avg: Interval
    passed: float
    gain: Difference
    greedy: float = math.nan


def policy_scores(results: Results) -> list[PolicyScore]:
    """Every evaluated policy, the untrained one first, then the same at the temperatures of its baselines."""
    base_P, found = results.base.scores[0].by_problem, []
    for evaluation in results.all_evaluations():
        for score in evaluation.scores:
            avg, gain = problem_interval(score.correct_PK), paired_difference(score.by_problem, base_P)
            greedy = math.nan if score.greedy_P is None else float(np.mean(score.greedy_P))
            found.append(PolicyScore(evaluation.arm, score.seed, avg, score.pass_at_k, gain, greedy))
    return found


@dataclass(frozen=True, slots=True)
class RunScore:
    """A run's held-out score beside its mismatch.

    Attributes:
        k3: mean unmasked k3 KL over the run's steps, nats a token; NaN if not recorded.
        avg: avg@k, a share of 1.
    """

    arm: str
    seed: int
    k3: float
    avg: float


def run_scores(results: Results) -> list[RunScore]:
    """Every run, arm by arm."""
    return [
        RunScore(arm, run.seed, known_mean(run.metric(K3_UNMASKED)), score.avg_at_k)
        for arm in results.arms
        for run, score in zip(results.runs[arm], results.evaluations[arm].scores, strict=True)
    ]


def problem_rows(results: Results) -> Iterator[Row]:
    """How many of its samples each evaluated policy got right, problem by problem; a snapshot has a step."""
    for evaluation in results.all_evaluations():
        for score in (*evaluation.scores, *evaluation.snapshots):
            step = "" if score.step is None else score.step
            whose = {"arm": evaluation.arm, "seed": score.seed, "step": step}
            for place, (problem, correct_K) in enumerate(zip(evaluation.problems, score.correct_PK, strict=True)):
                row = {**whose, "problem": problem, "correct": int(correct_K.sum()), "samples": correct_K.size}
                yield row if score.greedy_P is None else {**row, "greedy": int(score.greedy_P[place])}


@dataclass(frozen=True, slots=True)
class GreedyScore:
    """An arm's greedy score, a share of 1, and its gain over the untrained policy's.

    Attributes:
        greedy, gain: with intervals over seeds and problems (`crossed`); of the untrained policy over problems.
        gain_p_holm: the gain's p by Holm over the study's arms.
        kept: of the problems that the untrained policy solves greedily, the share that a trained one does, mean over
            seeds; nan where there is none.
        learnt: the same share of the other problems.
    """

    arm: str
    greedy: Interval
    gain: Difference
    gain_p_holm: float
    kept: float
    learnt: float


def greedy_scores(results: Results) -> list[GreedyScore]:
    """The untrained policy's greedy score and every arm's; none where some policy has no greedy responses."""
    greedy_by_arm = _greedy_by_arm(results)
    if not greedy_by_arm:
        return []
    (base_P,) = greedy_by_arm.pop(BASE_ARM)
    gains = {arm: crossed_gain(each, base_P) for arm, each in greedy_by_arm.items()}
    adjusted = holm([gain.p for gain in gains.values()]).tolist()
    none = paired_difference(base_P, base_P)
    rows = [GreedyScore(BASE_ARM, problem_interval(base_P[:, None]), none, math.nan, 1.0, 0.0)]
    for (arm, each), gain_p in zip(greedy_by_arm.items(), adjusted, strict=True):
        mean_P = np.mean(each, axis=0)
        rows.append(
            GreedyScore(
                arm=arm,
                greedy=crossed_interval(each),
                gain=gains[arm],
                gain_p_holm=gain_p,
                kept=_mean_where(mean_P, base_P == 1),
                learnt=_mean_where(mean_P, base_P == 0),
            )
        )
    return rows


@dataclass(frozen=True, slots=True)
class GreedyDifference:
    """The greedy score of arm `first` minus that of arm `second`, shares of 1, over seeds and problems.

    Attributes:
        why: why the report has the pair, as in `Comparison`.
        difference_p_holm: the difference's p by Holm over the reported pairs.
    """

    first: str
    second: str
    why: str
    difference: Difference
    difference_p_holm: float


def greedy_differences(results: Results, references: Sequence[tuple[str, str, str]]) -> list[GreedyDifference]:
    """The reported pairs, `arm_pairs.references`; none where some policy has no greedy responses."""
    greedy_by_arm = _greedy_by_arm(results)
    if not greedy_by_arm:
        return []
    found = [crossed_difference(greedy_by_arm[arm], greedy_by_arm[reference]) for arm, reference, _ in references]
    adjusted = holm([difference.p for difference in found]).tolist()
    return [
        GreedyDifference(arm, reference, why, difference, p)
        for (arm, reference, why), difference, p in zip(references, found, adjusted, strict=True)
    ]


def _greedy_by_arm(results: Results) -> dict[str, list[FloatArray]]:
    """Each arm's greedy scores by problem, an array a seed; empty where some policy has no greedy responses."""
    of_arms = {BASE_ARM: results.base.scores} | {arm: results.evaluations[arm].scores for arm in results.arms}
    greedy_by_arm = {
        arm: [score.greedy_P for score in scores if score.greedy_P is not None] for arm, scores in of_arms.items()
    }
    whole = all(len(greedy_by_arm[arm]) == len(scores) for arm, scores in of_arms.items())
    return greedy_by_arm if whole else {}


def _mean_where(values_P: FloatArray, chosen_P: NDArray[np.bool_]) -> float:
    return float(values_P[chosen_P].mean()) if chosen_P.any() else math.nan


@dataclass(frozen=True, slots=True)
class Comparison:
    """avg@k of arm `first` minus arm `second`, shares of 1.

    Attributes:
        why: why the report has the pair, such as "matched control"; empty for other pairs.
        both: the difference over seeds and problems; seeds, problems: over seeds alone (Welch), or problems (paired).
        both_p_holm, seeds_p_holm, problems_p_holm: p by Holm, over the reported pairs; for other pairs over all pairs.
        seeds_needed: seeds per arm that detect a true difference of this size over seeds with probability 0.8.
        least_seen: the smallest true difference that the study's seeds detect with that probability.
    """

    first: str
    second: str
    why: str
    both: Difference
    both_p_holm: float
    seeds: Difference
    seeds_p_holm: float
    problems: Difference
    problems_p_holm: float
    seeds_needed: float
    least_seen: float


def compare_arms(results: Results, references: Sequence[tuple[str, str, str]]) -> list[Comparison]:
    """The reported pairs, `arm_pairs.references` or `arm_pairs.ties`, then all others, later arm minus earlier arm."""
    asked = {(arm, reference): why for arm, reference, why in references}
    others = ((later, earlier) for earlier, later in itertools.combinations(results.arms, 2))
    pairs = [*asked, *(pair for pair in others if pair not in asked and pair[::-1] not in asked)]
    differences = {pair: _differences(results, *pair) for pair in pairs}
    adjusted = _adjusted(differences, pairs) | _adjusted(differences, list(asked))
    found = []
    for pair in pairs:
        seeds_S = [seed_scores(results, arm) for arm in pair]
        (both, seeds, problems), p = differences[pair], adjusted[pair]
        power = seeds_needed(*seeds_S), least_effect(*seeds_S)
        found.append(Comparison(*pair, asked.get(pair, ""), both, p[0], seeds, p[1], problems, p[2], *power))
    return found


def seed_scores(results: Results, arm: str) -> FloatArray:
    """Held-out avg@k of each run of an arm, (S,), as a share of 1."""
    return np.array([score.avg_at_k for score in results.evaluations[arm].scores])


def scores_of(results: Results, arm: str) -> FloatArray:
    """avg@k of each run of an arm on every problem, (S, P)."""
    return by_problem(results.evaluations[arm].scores)


def by_problem(scores: tuple[Score, ...]) -> FloatArray:
    """avg@k of every seed on every problem, (S, P)."""
    return np.stack([score.by_problem for score in scores])


def _differences(results: Results, first: str, second: str) -> Differences:
    """Over seeds and problems, over seeds alone, over problems alone."""
    one_SP, other_SP = (scores_of(results, arm) for arm in (first, second))
    return (
        crossed_difference(one_SP, other_SP),
        arm_difference(one_SP.mean(axis=1), other_SP.mean(axis=1)),
        paired_difference(one_SP.mean(axis=0), other_SP.mean(axis=0)),
    )


def _adjusted(found: Mapping[Pair, Differences], pairs: Sequence[Pair]) -> dict[Pair, list[float]]:
    """Each pair's p of the three differences, by Holm over these pairs."""
    columns = [holm([found[pair][column].p for pair in pairs]) for column in range(3)]
    return {pair: [float(p_M[place]) for p_M in columns] for place, pair in enumerate(pairs)}

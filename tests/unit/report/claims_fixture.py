"""Results made in memory: arms of chosen settings whose runs hold chosen numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tailrl.report.data import Evaluation, Results, Score, Tokens, TrainedRun
from tailrl.report.findings import CLAIMS
from tailrl.report.verdicts import Verdict, judge
from tailrl.settings import ArithmeticTask, Arm, ScratchPolicy, Training

STEPS, SEEDS, PROBLEMS = 50, 8, 10_000

NAIVE: dict[str, Any] = {}
DVP = {"vocabulary": {"rule": "min_p", "rho": "e-5"}}
PAPERS_DVP = {"vocabulary": {"rule": "min_p", "rho": "e-13"}}
DVP_MIS = {**DVP, "correction": {"sequence": "mis", "veto": 1e-4}}
EXACT = {"sampler": {"engine": "exact", "dtype": "float32"}}
NOISE = {"disturbance": {"noise": 0.5}}
MATCHED = {"disturbance": {"noise": 0.5, "side": "both"}}

Made = tuple[Mapping[str, Any], Mapping[str, Sequence[Any]]]
"""Settings beyond the defaults, and of each run in turn: reward, masked and unmasked k3, unmasked k1, tokens outside,
share vetoed, bias bound, seconds, kept mass, length and C(r) of either sign (a number or one a step), nats and delta of
its tokens, held-out score."""


def made(settings: Mapping[str, Any], **numbers: Sequence[Any]) -> Made:
    return settings, numbers


def around(centre: float, width: float, seeds: int = SEEDS) -> list[float]:
    """Evenly spaced numbers with this mean."""
    return [float(value) for value in centre + width * np.linspace(-1, 1, seeds)]


def falling(*steps: int | None) -> list[Any]:
    """Rewards of runs, each of 0.5 up to its step and 0 from there on."""
    return [[0.5 if step is None or n < step else 0.0 for n in range(STEPS)] for step in steps]


def settings_of(changes: Mapping[str, Any]) -> dict[str, Any]:
    """As run.json has them. Not validated: an engine or a block may be newer than this package's settings."""
    known = Arm().model_dump(mode="json") | {
        "training": Training(steps=STEPS).model_dump(mode="json"),
        "policy": ScratchPolicy().model_dump(mode="json"),
        "task": ArithmeticTask().model_dump(mode="json"),
    }
    for block, value in changes.items():
        known[block] = {**known[block], **value} if isinstance(known[block], dict) else value
    return known


def results_of(**arms: Made) -> Results:
    runs, evaluations = {}, {}
    for arm, (changes, numbers) in arms.items():
        seeds = range(max(map(len, numbers.values()), default=SEEDS))
        own = [{name: values[seed] for name, values in numbers.items()} for seed in seeds]
        settings = settings_of(changes)
        runs[arm] = tuple(_run(arm, seed, settings, one) for seed, one in zip(seeds, own, strict=True))
        scores = tuple(_score(seed, one.get("score", 0.5)) for seed, one in zip(seeds, own, strict=True))
        evaluations[arm] = Evaluation(arm, (), scores, "0")
    return Results(tuple(arms), runs, evaluations, Evaluation("base", (), (_score(0, 0.5),), "0"))


def _run(arm: str, seed: int, settings: Mapping[str, Any], numbers: Mapping[str, Any]) -> TrainedRun:
    names = {
        "reward": "reward/mean",
        "masked": "rollout_corr/k3_kl",
        "unmasked": "rollout_corr_unmasked/k3_kl",
        "k1": "rollout_corr_unmasked/kl",
        "outside": "dvp/sampled_outside_train_support_count",
        "vetoed": "rollout_corr/veto_seq_fraction",
        "bound": "dvp/bias_bound_paper",
        "lost": "dvp/lost_mass_per_response",
        "seconds": "time/step",
        "kept": "dvp/kept_mass_train_mean",
        "length": "response/length_mean",
        "positive": "rollout_corr/c_positive_advantage",
        "negative": "rollout_corr/c_negative_advantage",
    }
    metrics = {"train/step": np.arange(float(STEPS))}
    metrics |= {key: np.full(STEPS, numbers[name], dtype=np.float64) for name, key in names.items() if name in numbers}
    train_T = -np.array(numbers.get("nats", [0.01, 6.0]), dtype=np.float64)
    tokens = Tokens(
        np.zeros(train_T.size, dtype=np.int32), train_T, train_T - np.array(numbers.get("delta", [0.0, 0.0]))
    )
    return TrainedRun(arm, seed, metrics, tokens, {"settings": settings})


def _score(seed: int, share: float) -> Score:
    return Score(seed, (np.arange(PROBLEMS)[:, None] < round(share * PROBLEMS)).astype(np.float64))


def verdicts(claim: str, **arms: Made) -> list[Verdict]:
    """Those on the claims whose function has this name."""
    (statement,) = [known.statement for known in CLAIMS if known.find.__name__ == claim]
    return [verdict for verdict in judge(results_of(**arms)) if verdict.claim == statement]

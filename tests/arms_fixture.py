"""The choices that an arm is made of, every combination of them, and which combinations are refused and why."""

import itertools
from collections.abc import Iterator
from typing import Any

from tailrl.objective.advantages import ESTIMATORS
from tailrl.objective.corrections import SEQUENCE_WEIGHTS, TOKEN_WEIGHTS
from tailrl.settings import Correction

Choice = dict[str, Any]

MIN_P: Choice = {"rule": "min_p", "rho": 0.22}
VOCABULARIES: dict[str, Choice] = {
    "full": {"rule": "full"},
    "min_p": MIN_P,
    "entropy": {"rule": "entropy", "rho": 0.5},
    "top_k": {"rule": "top_k", "k": 200},
    "top_p": {"rule": "top_p", "p": 0.7},
    "paper_fill": {**MIN_P, "outside": "paper_fill"},
    "budget": {"rule": "min_p", "rho": 0.4, "adapt": "budget", "budget": 0.05},
    "difficulty": {"rule": "entropy", "rho": 0.6, "adapt": "difficulty", "rho_easy": 0.9},
    "sampler": {**MIN_P, "side": "sampler"},
    "trainer": {**MIN_P, "side": "trainer"},
    "fill_trainer": {**MIN_P, "side": "trainer", "outside": "paper_fill"},
}
"""Each rule, and each of the other keys with a value other than its default."""

DISTURBANCES: dict[str, Choice] = {
    "none": {},
    "noise": {"noise": 0.3},
    "floor": {"floor": 0.01},
    "bias": {"bias": 0.3},
    "stale": {"staleness": 1},
    "rounded": {"weights": "float8_e4m3"},
    "all": {"noise": 0.1, "floor": 0.01, "bias": 0.1, "staleness": 1, "weights": "float16"},
    "delayed": {"staleness": 1, "floor": 0.01, "side": "both"},
    "matched": {"noise": 0.3, "floor": 0.01, "bias": 0.3, "weights": "bfloat16", "side": "both"},
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "estimator": tuple(ESTIMATORS),
    "clip": (None, "recompute", "bypass", "decoupled"),
    "token": ("none", *TOKEN_WEIGHTS),
    "sequence": ("none", *SEQUENCE_WEIGHTS),
    "veto": (None, 1e-4),
    "vocabulary": tuple(VOCABULARIES),
    "disturbance": tuple(DISTURBANCES),
    "minibatches": (1, 2),
    "deliberate": (False, True),
}

NUMBERS: dict[str, Choice] = {
    "min_p": {"rho": 0.3},
    "entropy": {"rho": 0.6},
    "top_k": {"k": 200},
    "top_p": {"p": 0.7},
    "budget": {"budget": 0.05},
    "difficulty": {"rho_easy": 0.8},
}
"""What a rule or a way to adapt needs besides its name; at these a random policy loses some tokens."""


def every_combination(**factors: tuple[Any, ...]) -> Iterator[Choice]:
    """All of them, or those with the given values of some factors alone."""
    chosen = {**FACTORS, **factors}
    for values in itertools.product(*chosen.values()):
        yield dict(zip(chosen, values, strict=True))


def every_vocabulary() -> Iterator[Choice]:
    """Every rule × side × adapt × outside, with the numbers that they need."""
    rules, sides = ("full", "min_p", "entropy", "top_k", "top_p"), ("both", "sampler", "trainer")
    for rule, side, adapt, outside in itertools.product(
        rules, sides, ("none", "budget", "difficulty"), ("drop", "paper_fill")
    ):
        names = {"rule": rule, "side": side, "adapt": adapt, "outside": outside}
        yield {**names, **NUMBERS.get(rule, {}), **NUMBERS.get(adapt, {})}


def vocabulary_reasons(vocabulary: Choice) -> list[str]:
    """The beginnings of the sentences with which a vocabulary by itself may be refused; none where it is sound."""
    rule, side, adapt = (vocabulary[name] for name in ("rule", "side", "adapt"))
    found = []
    if adapt != "none" and rule not in ("min_p", "entropy"):
        found.append(f"adapt: {adapt} moves rho, which rule: {rule} does not have")
    if adapt == "budget" and side == "sampler":
        found.append("adapt: budget is measured in the trainer, which side: sampler leaves unpruned")
    if rule == "full" and (side != "both" or vocabulary["outside"] != "drop"):
        found.append("outside and side say nothing with rule: full (nothing is pruned)")
    return found


def vocabulary_of(choice: Choice) -> Choice:
    """The vocabulary of a combination, which names one of VOCABULARIES or holds one of its own."""
    named: Choice | str = choice["vocabulary"]
    return VOCABULARIES[named] if isinstance(named, str) else named


def reasons(choice: Choice) -> list[str]:
    """The same of a whole combination, whose vocabulary is sound."""
    vocabulary = vocabulary_of(choice)
    side = vocabulary.get("side", "both")
    weighted = choice["token"] != "none" or choice["sequence"] != "none"
    found = []
    if vocabulary.get("outside") == "paper_fill" and (weighted or choice["veto"] or choice["clip"]):
        found.append("vocabulary.outside: paper_fill has no effect beside a correction, a veto or a clipped ratio")
    ratio = Correction(token=choice["token"], sequence=choice["sequence"]).ratio
    if choice["clip"] in ("bypass", "decoupled") and ratio:
        found.append(f"clip.ratio: {choice['clip']} already divides by the sampler's probability")
    if side != "both" and not choice["deliberate"]:
        found.append(f"vocabulary.side: {side} samples from one distribution and trains another")
    if choice["minibatches"] > 1 and not (choice["clip"] or ratio or choice["deliberate"]):
        found.append("with 2 minibatches all but the first train on responses of an older policy")
    if choice["minibatches"] > 1 and choice["disturbance"] == "delayed":
        found.append("with disturbance.side: both, staleness takes one gradient a step")
    return found


def arm_of(choice: Choice) -> Choice:
    """The arm of a combination, as a study has it."""
    return {
        "estimator": choice["estimator"],
        "clip": choice["clip"] and {"ratio": choice["clip"]},
        "vocabulary": vocabulary_of(choice),
        "disturbance": DISTURBANCES[choice["disturbance"]],
        "correction": {name: choice[name] for name in ("token", "sequence", "veto")},
        "deliberate": choice["deliberate"],
    }

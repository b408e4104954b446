"""Where training leads under a mismatch, without sampling noise: `python -m exams.optimum --out FOLDER`.

VeXact (arXiv 2605.14220) says that a training-inference mismatch changes the effective optimization problem. In small
models this can be decided. The expected gradient of an arm is an exact sum over every response (`probes.gradients`), so
gradient ascent along it has no noise. If it ends elsewhere than ascent along ∇J, the problem was another one.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from tailrl.artifacts.tables import flat_rows, write_csv
from tailrl.config.arm import Arm
from tailrl.page_parts.number_text import p_value, points
from tailrl.probes.gradients.enumeration import (
    SequenceModel,
    disturbed,
    divergence,
    dose_at,
    random_model,
    return_gradient,
)
from tailrl.probes.gradients.moments import mean_and_variance
from tailrl.probes.gradients.quality import response_terms
from tailrl.runtime.seeding import derive_seed
from tailrl.runtime.templates import header, row
from tailrl.stats.tests import Difference, holm, paired_difference

DESIGN = Path(__file__).with_suffix(".yaml")
EXACT = "exact"
SCORES = ("greedy", "sampled")


@dataclass(frozen=True)
class End:
    """Where the ascent of one model ended.

    Attributes:
        greedy: mean reward of the most probable response to each prompt.
        sampled: expected reward at temperature 1.
        k3: the mismatch of the last policy, nats a token.
    """

    model: int
    cause: str
    nats: float
    arm: str
    greedy: float
    sampled: float
    k3: float


@dataclass(frozen=True)
class Contrast:
    """A score of an arm minus that of exact ascent, paired over models: a row of docs/results/tables."""

    study: str
    page: str
    cause: str
    nats: float
    arm: str
    score: str
    difference: Difference
    difference_p_holm: float


def ascend(
    model: SequenceModel, gradient: Callable[[SequenceModel], Tensor], steps: int, step_length: float
) -> SequenceModel:
    """The model after gradient ascent whose steps have a given length, which falls linearly to 0.

    A step's length does not depend on the gradient's: where the policy is nearly certain, gradients vanish.

    Args:
        model: the start.
        gradient: gives the direction at a model, float64 [S, V]. Where it is 0, the ascent ends.
        steps: the number of steps.
        step_length: the norm of the first step's change of the logits.
    """
    for step in range(steps):
        direction_SV = gradient(model)
        norm = direction_SV.norm()
        if norm == 0:
            break
        change_SV = step_length * (1 - step / steps) * direction_SV / norm
        model = replace(model, logits_SV=model.logits_SV + change_SV)
    return model


def expected_gradient(arm: Arm, group_size: int, sampler: Callable[[SequenceModel], Tensor]) -> Callable[..., Tensor]:
    """The mean of an arm's gradient over the sampler's responses, as a function of the model."""

    def gradient(model: SequenceModel) -> Tensor:
        return mean_and_variance(response_terms(model, sampler(model), arm), arm.estimator, group_size)[0]

    return gradient


def rewards(model: SequenceModel) -> tuple[float, float]:
    """The reward of greedy responses, and the expected one at temperature 1, both as means over prompts."""
    logp_KN = model.gather(model.logits_SV.log_softmax(-1)).sum(-1)
    sampled = (logp_KN.exp() * model.reward_KN).sum(-1).mean().item()
    # The most probable token of each state, as a greedy sampler takes it: not the most probable response.
    best_S = model.logits_SV.argmax(-1)
    greedy_KN = (best_S[model.state_KNT] == model.tokens_NT).all(-1)
    return (greedy_KN * model.reward_KN).sum(-1).mean().item(), sampled


def ends(design: dict[str, Any]) -> Iterator[End]:
    """Exact ascent of every model, and each arm's under every cause and k3."""
    arms = {name: Arm.model_validate(block) for name, block in design["arms"].items()}
    for index in range(design["models"]):
        seed = derive_seed("optimum", design["seed"], index)
        model = random_model(design["vocabulary_size"], design["length"], design["prompts"], seed)
        last = ascend(model, return_gradient, design["steps"], design["step_length"])
        greedy, sampled = rewards(last)
        yield End(index, "none", 0.0, EXACT, greedy, sampled, 0.0)
        for cause in design["causes"]:
            for nats in design["nats"]:
                dose = dose_at(model, cause, nats, seed)

                def sampler(current: SequenceModel, cause: str = cause, dose: float = dose, seed: int = seed) -> Tensor:
                    return disturbed(current, cause, dose, seed)

                for name, arm in arms.items():
                    gradient = expected_gradient(arm, design["group_size"], sampler)
                    last = ascend(model, gradient, design["steps"], design["step_length"])
                    greedy, sampled = rewards(last)
                    yield End(index, cause, nats, name, greedy, sampled, divergence(last, sampler(last)))


def contrasts(found: list[End]) -> list[Contrast]:
    """Each arm minus exact ascent of the same models; p by Holm over an arm's causes and k3, for each score."""
    exact = {end.model: end for end in found if end.arm == EXACT}
    places = list(dict.fromkeys((end.cause, end.nats) for end in found if end.arm != EXACT))
    made = []
    for arm in dict.fromkeys(end.arm for end in found if end.arm != EXACT):
        for score in SCORES:
            tested = []
            for place in places:
                own = {end.model: end for end in found if end.arm == arm and (end.cause, end.nats) == place}
                first = np.array([getattr(own[model], score) for model in exact])
                second = np.array([getattr(exact[model], score) for model in exact])
                tested.append(paired_difference(first, second))
            for (cause, nats), tested_here, p_holm in zip(places, tested, holm([one.p for one in tested]), strict=True):
                made.append(
                    Contrast(
                        study="optimum",
                        page="optimum",
                        cause=cause,
                        nats=nats,
                        arm=arm,
                        score=score,
                        difference=tested_here,
                        difference_p_holm=float(p_holm),
                    )
                )
    return made


PAGE = """# Where exact ascent of small models ends under a mismatch

An arm's score at the end minus that of ascent along the exact gradient, in points, paired over models. p by Holm over
an arm's causes and k3. [What it means](../../findings/optimum.md). `exams/optimum.yaml` is the design, committed before
the run.
[Every end](ends.csv). `make optimum`

"""


def publish(found: list[End], out: Path) -> None:
    """The ends, their differences as rows of the published tables, and a page with all of them."""
    made = contrasts(found)
    write_csv(out / "optimum/ends.csv", flat_rows(found))
    write_csv(out / "tables/optimum.csv", flat_rows(made))
    lines = [header("arm", "score", "cause", "k3 at the start", "difference", "p")]
    for one in made:
        difference, p = points(one.difference), p_value(one.difference_p_holm)
        lines.append(row(one.arm, one.score, one.cause, f"{one.nats:g}", difference, p))
    (out / "optimum/optimum.md").write_text(PAGE + "\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder of optimum/ and tables/optimum.csv")
    parser.add_argument("--design", type=Path, default=DESIGN)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for end in ends(yaml.safe_load(given.design.read_text(encoding="utf-8"))):
        found.append(end)
        print(f"model {end.model} {end.cause} {end.nats:g} {end.arm}: {end.greedy:.3f} {end.sampled:.3f}", flush=True)
    publish(found, given.out)


if __name__ == "__main__":
    main()

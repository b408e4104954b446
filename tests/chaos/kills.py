"""What is struck and when, drawn from a seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from victims import PASSING, STAGES

STARTS, RECORDS, TWO_JOBS = "Snakemake starts", "Snakemake records a job", "two jobs"
AIMS = (
    STARTS,
    RECORDS,
    "download",
    "problems",
    "base policy",
    "engine starts",
    "training",
    "checkpoint",
    "checkpoint",
    "results",
    TWO_JOBS,
    "evaluation",
    "tables",
)
"""A round: each kind of kill once, and the dearest part, the checkpoint, twice."""
TRAINING_AIMS = (RECORDS, "training", "checkpoint", "checkpoint", "results", TWO_JOBS)
"""A round for a study that ends with its training."""
MODES = {TWO_JOBS: (TWO_JOBS,)}
"""Who dies, where the aim says it. Otherwise it is drawn."""


@dataclass(frozen=True)
class Kill:
    """A kill as it is drawn: where, whom, and after which share of the time that the aim lasts."""

    aim: str
    mode: str
    share: float


def plan(kills: int, seed: int, aims: Sequence[str] = AIMS) -> list[Kill]:
    """What is struck, round by round in the order of a study; what is Snakemake's own lies anywhere between.

    The aims of whole rounds depend on the seed alone, who dies and when on the number of kills too. A last, smaller
    round is a draw from the aims.
    """
    draw, found = random.Random(seed), list[str]()
    while len(found) < kills:
        found += _ordered(draw, draw.sample(list(aims), min(len(aims), kills - len(found))), found[-1:])
    return [_drawn(draw, aim, following) for aim, following in zip(found, [*found[1:], ""], strict=True)]


def _ordered(draw: random.Random, chosen: Sequence[str], before: Sequence[str]) -> list[str]:
    """A round in the order of a study: else a study would have to be begun anew for each kill."""
    places = {stage: float(place) for place, stage in enumerate(STAGES)}
    places[TWO_JOBS] = draw.uniform(places["engine starts"], places["evaluation"])
    ordered = sorted((aim for aim in chosen if aim in places), key=lambda aim: places[aim])
    for aim in sorted(set(chosen) - set(places)):
        # A Snakemake that is to start must have ended before, and after two jobs it goes on.
        free = [at for at in range(len(ordered) + 1) if [*before, *ordered[:at]][-1:] != [TWO_JOBS] or aim == RECORDS]
        ordered.insert(draw.choice(free), aim)
    return ordered


def _drawn(draw: random.Random, aim: str, following: str) -> Kill:
    modes = {"everything"}
    # As above; and a Snakemake that starts has no jobs.
    if following != STARTS and aim not in (STARTS, RECORDS):
        modes.add("one job")
    if aim not in PASSING:
        modes.add("Snakemake")
    return Kill(aim, draw.choice(MODES.get(aim, tuple(sorted(modes)))), draw.random())

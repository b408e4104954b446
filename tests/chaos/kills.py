"""What is struck and when, drawn from a seed; what was struck, as a row and in a table."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from victims import PASSING, STAGES

STARTS, RECORDS = "Snakemake starts", "Snakemake records a job"
AIMS = (
    STARTS, RECORDS, "base policy", "engine starts", "training", *["checkpoint"] * 2, "results", "evaluation", "report"
)  # fmt: skip
"""Ten kills: two on Snakemake between jobs, four on training while it steps and writes."""


@dataclass(frozen=True)
class Kill:
    """A kill as it is drawn: where, whom, and after which share of the time that the aim lasts."""

    aim: str
    mode: str
    share: float


@dataclass(frozen=True)
class Struck:
    """A kill as it was carried out: a row of the table."""

    kill: int
    study: int
    aim: str
    killed: str
    at: str
    step: str
    half_written: bool
    seconds: float


def plan(kills: int, seed: int) -> list[Kill]:
    """What is struck, ten kills by ten in the order of a study; what is Snakemake's own lies anywhere between."""
    draw, aims = random.Random(seed), list[str]()
    while len(aims) < kills:
        chosen = draw.sample(AIMS, min(len(AIMS), kills - len(aims)))
        ordered = sorted((aim for aim in chosen if aim in STAGES), key=STAGES.index)
        for aim in sorted(set(chosen) - set(STAGES)):
            ordered.insert(draw.randint(0, len(ordered)), aim)
        aims += ordered
    planned = []
    for aim, following in zip(aims, [*aims[1:], ""], strict=True):
        modes = {"everything"}
        # A Snakemake that is to start must have ended before; one that starts has no jobs.
        if following != STARTS and aim not in (STARTS, RECORDS):
            modes.add("one job")
        if aim not in PASSING:
            modes.add("Snakemake")
        planned.append(Kill(aim, draw.choice(sorted(modes)), draw.random()))
    return planned


def table(struck: Sequence[Struck]) -> str:
    """How many kills struck what, while which part of the study was on."""
    counts = Counter((row.at, row.killed if row.killed in ("everything", "Snakemake") else "one job") for row in struck)
    columns = ("everything", "Snakemake", "one job")
    lines = ["| struck during | everything | Snakemake alone | one job |", "| --- | --: | --: | --: |"]
    order = [STARTS, RECORDS, "Snakemake between jobs", *STAGES]
    for at in sorted({row.at for row in struck}, key=lambda at: order.index(at) if at in order else len(order)):
        lines.append(f"| {at} | " + " | ".join(str(counts[at, column]) for column in columns) + " |")
    return "\n".join(lines)

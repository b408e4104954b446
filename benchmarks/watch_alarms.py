"""How often the alarms of `tailrl watch` are false on clean logs, and how often they find a planted fault.

    python benchmarks/watch_runs.py FOLDER
    python benchmarks/watch_alarms.py FOLDER --out docs/results/watch_alarms.csv

Clean runs whose name begins with `clean_settle` settled the limits and are counted apart. Of the other clean runs each
step is judged, and `--again` times a step is made anew from its own prompts, drawn with replacement with all their
responses, in the run's order. The metrics are judged alone too. A plant is found if one of its alarms is raised at its
first step or the next; before its first step any alarm is false.
"""

import argparse
import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import watch_runs
from scipy import stats
from table import show

from tailrl.diagnosis.parts import part_of
from tailrl.runtime.seeding import derive_seed
from tailrl.watch.alarms import Alarms, Step
from tailrl.watch.files import Folder, Item, Metrics, Tokens
from tailrl.watch.follow import Open

SEED = 46
SETS = ("settling", "judging", "drawn again", "metrics alone")
"""Sets of clean steps; the others are single runs."""

IN_TIME = 1
"""Steps after a plant's first one at which an alarm is still in time."""


@dataclass
class Counted:
    """Steps and alarms of a set of runs; `raised`: steps with an alarm, by its name or `any`."""

    steps: int = 0
    raised: Counter[str] = field(default_factory=Counter)

    def add(self, alarms: Iterable[Sequence[str]]) -> None:
        """Adds a run: the names of the alarms of each step."""
        for names in alarms:
            self.steps += 1
            self.raised.update({*names, *(["any"] if names else [])})


def items_of(run: Path) -> dict[float, list[Item]]:
    """What a run's log of tokens and its metrics say of each step."""
    found: dict[float, list[Item]] = {}
    for file in ("watched-tokens.jsonl", "watched-metrics.jsonl"):
        for item in Folder(run / file).look(whole=True):
            found.setdefault(item.step, []).append(item)
    return dict(sorted(found.items()))


def as_step(number: float, items: Iterable[Item]) -> Step:
    """The numbers of a step."""
    opened = Open()
    for item in items:
        opened.add(item, 0)
    return opened.as_step(number)


def drawn(items: Sequence[Item], random: np.random.Generator) -> Iterator[Item]:
    """The step with its prompts drawn with replacement, each with all its responses."""
    yield from (item for item in items if isinstance(item, Metrics))
    responses = [item for item in items if isinstance(item, Tokens)]
    prompts = np.concatenate([item.prompt_S for item in responses])
    every = np.unique(prompts)
    for number, prompt in enumerate(random.choice(every, len(every)).tolist()):
        for item in responses:
            if (item.prompt_S == prompt).any():
                part = part_of(item.log, (item.prompt_S == prompt)[item.log.sequence_T])
                again_S = np.full(len(part.start_S), prompt + number, np.int64)
                yield dataclasses.replace(item, log=part, prompt_S=again_S)


def alarms_of(steps: Iterable[Step], exact: bool) -> list[list[str]]:
    """The names of the alarms of each step."""
    alarms = Alarms(exact)
    return [[alarm.name for alarm in alarms.step(step)] for step in steps]


def clean_rows(folder: Path, again: int) -> Iterator[dict[str, Any]]:
    """A row for each clean run and alarm, and for all of them together."""
    counted: dict[str, Counted] = {}
    for case in watch_runs.cases():
        if case.fault or not (folder / case.name / "done").exists():
            continue
        items, exact = items_of(folder / case.name), case.arm.get("sampler", {}).get("engine") == "exact"
        settles = case.name.startswith("clean_settle")
        real = Counted()
        real.add(alarms_of((as_step(number, of) for number, of in items.items()), exact))
        counted[case.name] = real
        counted.setdefault("settling" if settles else "judging", Counted())
        of_set = counted["settling" if settles else "judging"]
        of_set.steps += real.steps
        of_set.raised += real.raised
        if not settles:
            alone = {number: [item for item in of if isinstance(item, Metrics)] for number, of in items.items()}
            steps = (as_step(number, of) for number, of in alone.items())
            counted.setdefault("metrics alone", Counted()).add(alarms_of(steps, exact))
        for time in range(0 if settles else again):
            random = np.random.default_rng(derive_seed("again", SEED, case.name, time))
            steps = (as_step(number, drawn(of, random)) for number, of in items.items())
            counted.setdefault("drawn again", Counted()).add(alarms_of(steps, exact))
    for name, one in counted.items():
        for alarm in ["any", *sorted(set(one.raised) - {"any"})]:
            low, high = interval(one.raised[alarm], one.steps)
            yield {
                "kind": "clean steps" if name in SETS else "clean run",
                "of": name,
                "alarm": alarm,
                "number": one.steps,
                "raised": one.raised[alarm],
                "share": round(one.raised[alarm] / one.steps, 5),
                "low": round(low, 5),
                "high": round(high, 5),
                "later": "",
            }


def plant_rows(folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each plant: in how many of its runs an alarm that is due was raised in time, and later."""
    plants: dict[str, list[tuple[watch_runs.Case, list[list[str]]]]] = {}
    before, prefixes = Counted(), set[tuple[int, int]]()
    for case in watch_runs.cases():
        if not case.fault or not (folder / case.name / "done").exists():
            continue
        items = items_of(folder / case.name)
        alarms = alarms_of((as_step(number, of) for number, of in items.items()), False)
        # A plant with settings of its own has a large mismatch from its start.
        if not case.training and (shared := (case.seed, case.at)) not in prefixes:
            before.add(alarms[: case.at])
            prefixes.add(shared)
        plants.setdefault(case.name.rpartition("_")[0], []).append((case, alarms))
    for name, runs in plants.items():
        delays = [_delay(case, alarms) for case, alarms in runs]
        in_time = sum(delay <= IN_TIME for delay in delays)
        low, high = interval(in_time, len(runs))
        yield {
            "kind": "plant",
            "of": name,
            "alarm": " or ".join(runs[0][0].alarms),
            "number": len(runs),
            "raised": in_time,
            "share": round(in_time / len(runs), 3),
            "low": round(low, 3),
            "high": round(high, 3),
            "later": " ".join(f"{delay:g}" for delay in sorted(delays) if delay > IN_TIME),
        }
    low, high = interval(before.raised["any"], before.steps)
    yield {"kind": "clean steps", "of": "before the plants", "alarm": "any", "number": before.steps,
           "raised": before.raised["any"], "share": round(before.raised["any"] / max(before.steps, 1), 5),
           "low": round(low, 5), "high": round(high, 5), "later": ""}  # fmt: skip


def _delay(case: watch_runs.Case, alarms: Sequence[Sequence[str]]) -> float:
    """Steps from the plant's first one to the first alarm that is due; infinite without one."""
    steps = [number for number, names in enumerate(alarms) if number >= case.at and set(names) & set(case.alarms)]
    return float(min(steps) - case.at) if steps else math.inf


def interval(count: int, of: int) -> tuple[float, float]:
    """Clopper and Pearson's interval of a share, at 95 %."""
    if not of:
        return 0.0, 1.0
    low = float(stats.beta.ppf(0.025, count, of - count + 1)) if count else 0.0
    high = float(stats.beta.ppf(0.975, count + 1, of - count)) if count < of else 1.0
    return low, high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--again", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = [
        *clean_rows(arguments.folder, arguments.again),
        *plant_rows(arguments.folder),
    ]
    show(rows, arguments.out)


if __name__ == "__main__":
    main()

"""What was struck and what followed: a row a kill, in a CSV file that outlives the script."""

import csv
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from kills import Kill

from tailrl.runtime.provenance import provenance

EQUAL = "equal"
"""What followed, where the finished study was compared and is as undisturbed."""


@dataclass(frozen=True)
class Struck:
    """A kill as it was carried out, and what followed.

    Attributes:
        kill: its number, from 1.
        study: which disturbed study it struck, counted as they finish.
        aim: what the plan wanted to strike.
        killed: `everything`, `Snakemake`, or the names of one or two jobs.
        at: the stage that was struck.
        step: steps in the run's metrics, where a run was struck.
        half_written: whether it left a checkpoint, results or a download half-written.
        seconds: since the first kill's script began, without the time that it was stopped.
        interrupted: runs that it interrupted when they had a state.
        followed: EQUAL, or the sentence that the script ended with. Empty: the study has not finished yet.
        commit: of the code; a plus marks changes that are not committed.
        engine: of the study.
        seed: of the plan.
        hardware: cores and processor.
    """

    kill: int
    study: int
    aim: str
    killed: str
    at: str
    step: str
    half_written: bool
    seconds: float
    interrupted: int
    followed: str
    commit: str
    engine: str
    seed: int
    hardware: str


class Rows:
    """The rows of one plan, with its engine and seed. Rows of others in the file stay as they are."""

    def __init__(self, file: Path | None, planned: Sequence[Kill], engine: str, seed: int) -> None:
        """Go on with the rows of a file; ends the script where they are of another plan.

        Rows whose study was not compared are dropped: their kills are taken again.
        """
        self.file = file
        hardware = provenance()["hardware"]
        self.engine, self.seed = engine, seed
        self.commit = commit()
        self.hardware = f"{hardware['cores']} x {hardware['cpu']}"
        found = read(file) if file is not None and file.exists() else []
        own = [row for row in found if (row.engine, row.seed) == (engine, seed)]
        self.others = [row for row in found if row not in own]
        self.rows = [row for row in own if row.followed]
        for number, (row, kill) in enumerate(zip(self.rows, planned, strict=False), start=1):
            if (row.kill, row.aim) != (number, kill.aim):
                sys.exit(f"{file}: kill {row.kill} is not that of the plan with seed {seed}; name another file")
        if own:
            print(
                f"{file}: goes on after kill {len(self.rows)}; {len(own) - len(self.rows)} are taken again", flush=True
            )
        self._write_all()

    @property
    def finished(self) -> int:
        """Studies that were compared."""
        return max((row.study for row in self.rows if row.followed), default=0)

    @property
    def seconds(self) -> float:
        """When the last kill was."""
        return self.rows[-1].seconds if self.rows else 0.0

    def add(self, **values: Any) -> None:
        """One more kill: a line at the end of the file, which is brought to the disk."""
        number, study = len(self.rows) + 1, self.finished + 1
        common: dict[str, Any] = {
            "commit": self.commit,
            "engine": self.engine,
            "seed": self.seed,
            "hardware": self.hardware,
        }
        row = Struck(kill=number, study=study, followed="", **values, **common)
        self.rows.append(row)
        print(row, flush=True)
        if self.file is not None:
            with self.file.open("a", newline="", encoding="utf-8") as file:
                csv.writer(file).writerow(asdict(row).values())
                file.flush()
                os.fsync(file.fileno())

    def settle(self, followed: str) -> None:
        """What followed the kills of the study that has ended."""
        self.rows = [row if row.followed else replace(row, followed=followed) for row in self.rows]
        self._write_all()

    def _write_all(self) -> None:
        if self.file is None:
            return
        aside = self.file.with_name(f"{self.file.name}.writing")
        with aside.open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(field.name for field in fields(Struck))
            rows.writerows(asdict(row).values() for row in [*self.others, *self.rows])
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self.file)


def commit() -> str:
    """The commit of the code, with a plus for changes that are not committed; docs/, where rows may lie, is no code."""

    def git(*words: str) -> str:
        run = subprocess.run(["git", *words], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
        return run.stdout.strip()

    found = git("rev-parse", "--short=10", "HEAD") or "unknown"
    return f"{found}{'+' if git('status', '--porcelain', '--', ':/', ':(top,exclude)docs') else ''}"


def read(file: Path) -> list[Struck]:
    """The rows of a file, all but a last one that was cut; ends the script where they are no kills."""
    names = [field.name for field in fields(Struck)]
    with file.open(newline="", encoding="utf-8") as opened:
        lines = list(csv.DictReader(opened))
    if lines and list(lines[0]) != names:
        sys.exit(f"{file}: its columns are not those of kills: {', '.join(names)}")
    convert: dict[str, Callable[[str], Any]] = dict.fromkeys(("kill", "study", "interrupted", "seed"), int)
    convert |= {"seconds": float, "half_written": lambda text: text == "True"}
    return [
        Struck(**dict[str, Any]({name: convert.get(name, str)(line[name]) for name in names}))
        for line in lines
        if None not in line.values()
    ]

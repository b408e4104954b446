"""What a study took: seconds by kind of job, the share that is training itself, and the whole.

    python benchmarks/study_time.py results/default --run "AMD EPYC" --out docs/results/study_time.csv

`working_seconds` of training jobs are generation, forward, backward and optimizer; the rest is start-ups, checkpoints,
rewards and metrics. The study has run whole and once, on an idle machine. The whole is from the first problem to the
report, as the files' times say. Rows of other runs in the file stay.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from table import show

from tailrl.artifacts.tables import read_csv
from tailrl.tracking.metrics import TIME, in_group

WORK = [in_group(TIME, phase) for phase in ("rollout", "forward", "backward", "optimizer")]
JOBS = {"warm start": "policy.jsonl", "training": "train/*/*.jsonl", "evaluation": "evaluate/*.jsonl"}


def lines(folder: Path, pattern: str) -> Iterator[dict[str, float]]:
    """The objects of all files of a pattern, in order."""
    for file in sorted(folder.glob(pattern)):
        for line in file.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def time_of(folder: Path) -> list[dict[str, object]]:
    """A row for each kind of job, and one for the whole."""
    jobs = {name: [job["s"] for job in lines(folder / "benchmarks", pattern)] for name, pattern in JOBS.items()}
    working = sum(step[key] or 0.0 for step in lines(folder / "train", "*/*/metrics.jsonl") for key in WORK)
    rows: list[dict[str, object]] = [
        {
            "part": name,
            "jobs": len(seconds),
            "seconds": round(sum(seconds), 1),
            "working_seconds": round(working, 1) if name == "training" else "",
        }
        for name, seconds in jobs.items()
    ]
    first, last = ((folder / file).stat().st_mtime for file in ("data/train.jsonl", "summary.html"))
    whole = {"part": "whole", "jobs": sum(map(len, jobs.values())), "seconds": round(last - first, 1)}
    return [*rows, whole | {"working_seconds": ""}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="results/NAME of a study that has run whole, and once")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--run", required=True, help="what the run is called in the file: its machine")
    arguments = parser.parse_args()
    others = read_csv(arguments.out) if arguments.out and arguments.out.is_file() else []
    rows = [{"run": arguments.run, **row} for row in time_of(arguments.folder)]
    show([*(row for row in others if row["run"] != arguments.run), *rows], arguments.out)


if __name__ == "__main__":
    main()

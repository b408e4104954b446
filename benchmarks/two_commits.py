"""Benchmarks of two checkouts in turn, each script first before and then now, and their ratios in one file.

    git worktree add ../before 1fe94891
    make -C ../before bench-quick && make bench-quick      # both environments, with the peers
    python benchmarks/two_commits.py ../before . --folder results/two_commits --out docs/results/two_commits.csv

Wants an idle machine for half an hour. A ratio is one to another case of the same run, so a machine that slows down
moves both sides of it. Files that lie in `--folder` are not measured again.
"""

import argparse
import csv
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from table import write_csv


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A script of both checkouts, and what of its table is compared."""

    script: str
    arguments: Mapping[str, Sequence[str]]  # of each side
    threads: int
    case: str  # the column that names a case
    ratio: str  # the column of the ratio; with `_min` and `_max` those of its range over the rounds


SIDES = ("before", "now")
ALIKE: Mapping[str, Sequence[str]] = dict.fromkeys(SIDES, ())
SMALL = {"before": ("--policies", "default study"), "now": ("--policies", "4 layers of 128")}  # it was renamed
TOKENS = dict.fromkeys(SIDES, ("--size", "2048", "49152"))
BENCHMARKS = (
    Benchmark("update", ALIKE, 1, "case", "ratio_to_trl"),
    Benchmark("step", ALIKE, 1, "case", "ratio_to_trl"),
    Benchmark("rollout", SMALL, 2, "engine", "exact_over_this"),
    Benchmark("logprobs", TOKENS, 2, "case", "ratio"),
)


def measure(checkout: Path, benchmark: Benchmark, side: str, out: Path) -> None:
    """Run a script of one side's checkout in that checkout's environment; raises CalledProcessError where it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(benchmark.threads), "PYTHONPATH": "workflow/scripts"}
    command = [".venv/bin/python", f"benchmarks/{benchmark.script}.py", "--repeats", "5", "--out", str(out.resolve())]
    subprocess.run([*command, *benchmark.arguments[side]], cwd=checkout, env=environment, check=True)


def rows(file: Path, benchmark: Benchmark) -> dict[str, dict[str, str]]:
    """The lines that a script wrote, by case."""
    with file.open(newline="", encoding="utf-8") as lines:
        return {line[benchmark.case]: line for line in csv.DictReader(lines)}


def compared(folder: Path, commits: dict[str, str]) -> Iterator[dict[str, str]]:
    """A line a case that both sides have: the median ratio of each and its range over the rounds."""
    for benchmark in BENCHMARKS:
        found = {side: rows(folder / side / f"{benchmark.script}.csv", benchmark) for side in SIDES}
        for case in sorted(found["before"].keys() & found["now"].keys()):
            line = {"benchmark": benchmark.script, "case": case}
            for side in SIDES:
                line |= {f"{side}{end}": found[side][case][f"{benchmark.ratio}{end}"] for end in ("", "_min", "_max")}
            yield line | {f"commit_{side}": commits[side] for side in SIDES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("before", type=Path, help="a checkout with its environment")
    parser.add_argument("now", type=Path, help="another one")
    parser.add_argument("--folder", type=Path, required=True, help="of what each script wrote")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    checkouts = {"before": options.before, "now": options.now}
    commits = {
        side: subprocess.run(
            ["git", "rev-parse", "--short=8", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True
        ).stdout.strip()
        for side, checkout in checkouts.items()
    }
    for benchmark in BENCHMARKS:
        for side, checkout in checkouts.items():
            out = options.folder / side / f"{benchmark.script}.csv"
            out.parent.mkdir(parents=True, exist_ok=True)
            if not out.exists():
                measure(checkout, benchmark, side, out)
    write_csv(list(compared(options.folder, commits)), options.out)


if __name__ == "__main__":
    main()

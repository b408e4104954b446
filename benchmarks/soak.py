"""Whether a long run keeps its size: memory, open files and seconds a step of one training job.

    OMP_NUM_THREADS=1 python benchmarks/soak.py --steps 2000 --out docs/results/soak.csv

The smallest study with the exact engine, trained by the command line in a process of its own, which is looked at from
outside each time that a step is logged. It learns next to nothing, so that responses keep their length and steps can be
compared. Exits 1 where, from the second tenth of the steps (the first is warm-up) to the last, the resident set grows
by more than 2 %, a step takes more than 5 % longer, or there are more open files.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path

from table import show

from tailrl.artifacts.metrics import read_steps
from tailrl.tracking.metrics import STEP_SECONDS, TOKENS_PER_SECOND

ROOT = Path(__file__).parents[1]
MOST_GROWTH, MOST_SLOWDOWN = 0.02, 0.05
PARTS = 10
LEARNING_RATE = 1e-8


@dataclass(frozen=True)
class Look:
    """A process as it was when a step had just been logged: resident MiB, open files, CPU seconds until then."""

    mib: float
    files: int
    cpu_seconds: float


def prepare(steps: int, folder: Path) -> list[str]:
    """The problems and the base policy in `folder`; returns the command that trains."""
    from tailrl.config.load import parse_study, read_yaml
    from tailrl.tasks.prepare import write_all_problems
    from tailrl.training.base_policy import write_base_policy

    given = read_yaml(ROOT / "studies" / "tiny.yaml")
    given["training"] |= {"steps": steps, "learning_rate": LEARNING_RATE}
    given["arms"] = {"dvp_mis": given["arms"]["dvp_mis"] | {"sampler": {"engine": "exact", "dtype": "float32"}}}
    study = parse_study({key: value for key, value in given.items() if key != "ablations"})
    write_all_problems(study.problems(), folder / "data")
    write_base_policy(study.policy, folder / "data" / "warm_start.jsonl", folder / "base")
    settings = study.run("dvp_mis").model_dump_json()
    paths = {"policy": folder / "base", "problems": folder / "data/train.jsonl", "out": folder, "wandb": folder}
    script = "from tailrl.cli import main; main()"
    command = [sys.executable, "-c", script, "job", "train", "--settings", settings, "--seed", "0"]
    return [*command, *(f"--{name}={path}" for name, path in paths.items())]


def watch(process: subprocess.Popen[bytes], metrics: Path) -> list[Look]:
    """The process once for each step that it had logged when it was looked at."""
    seen: list[Look] = []
    while not metrics.exists():
        if process.poll() is not None:
            return seen  # its log says why
        time.sleep(0.2)
    with metrics.open("rb") as file:
        while process.poll() is None:
            logged = file.read().count(b"\n")
            if logged:
                look = look_at(process.pid)
                if not look.mib:
                    break  # it has just ended
                seen += [look] * logged
            time.sleep(0.2)
    return seen


def look_at(process: int) -> Look:
    """What the kernel says of a process; of one that has just ended, 0 MiB."""
    folder = Path("/proc") / str(process)
    pages = int((folder / "statm").read_text().split()[1])
    # After the name, which may hold spaces, in brackets: user and system time are fields 14 and 15.
    ticks = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
    files = len(list((folder / "fd").iterdir())) if pages else 0
    return Look(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, files, sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"))


def tenths(seen: Sequence[Look], steps: Sequence[Mapping[str, float]]) -> list[dict[str, object]]:
    """A row for each tenth of the steps: medians of what was seen, CPU and tokens of its steps."""
    rows: list[dict[str, object]] = []
    bounds = [part * (len(seen) - 1) // PARTS for part in range(PARTS + 1)]
    for first, end in pairwise(bounds):
        looks, chosen = seen[first : end + 1], steps[first + 1 : end + 1]
        cpu = (looks[-1].cpu_seconds - looks[0].cpu_seconds) / len(chosen)
        tokens = [step[TOKENS_PER_SECOND] * step[STEP_SECONDS] for step in chosen]
        rows.append(
            {
                "steps": f"{first + 1} to {end}",
                "resident_mib": round(statistics.median(look.mib for look in looks), 1),
                "open_files": round(statistics.median(look.files for look in looks)),
                "cpu_ms_a_step": round(1e3 * cpu, 1),
                "ms_a_step": round(1e3 * statistics.median(step[STEP_SECONDS] for step in chosen), 1),
                "tokens_a_step": round(statistics.mean(tokens), 1),
            }
        )
    return rows


def growth(rows: Sequence[Mapping[str, object]]) -> dict[str, float]:
    """What changed from the second tenth to the last: resident set and CPU time a step as fractions, open files.

    The time is the slope of Theil and Sen, the median over all pairs of tenths: a neighbour that takes the machine's
    caches for a tenth or two does not move it, and what grows with the steps does.
    """
    warm = rows[1:]
    size, files, cpu = ([float(row[name]) for row in warm] for name in ("resident_mib", "open_files", "cpu_ms_a_step"))  # type: ignore[arg-type]
    slope = statistics.median((cpu[b] - cpu[a]) / (b - a) for a, b in combinations(range(len(cpu)), 2))
    return {
        "resident set": size[-1] / size[0] - 1,
        "CPU time a step": slope * (len(cpu) - 1) / statistics.median(cpu),
        "open files": files[-1] - files[0],
    }


def faults(grown: Mapping[str, float]) -> list[str]:
    """What of it a job that keeps its size would not show."""
    limits = {"resident set": MOST_GROWTH, "CPU time a step": MOST_SLOWDOWN, "open files": 0}
    return [name for name, limit in limits.items() if grown[name] > limit]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        command = prepare(arguments.steps, folder)
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(command, stderr=log)
            seen = watch(process, folder / "metrics.jsonl")
        if process.wait():
            sys.exit((folder / "log").read_text()[-2000:])
        steps = [{key: value for key, value in step.items() if value is not None} for step in read_steps(folder)]
    rows = tenths(seen, steps)
    show(rows, arguments.out)
    grown = growth(rows)
    print(
        f"\nfrom the second tenth to the last: resident set {100 * grown['resident set']:+.2f} %, CPU time a step "
        f"{100 * grown['CPU time a step']:+.2f} %, open files {grown['open files']:+.0f}"
    )
    if found := faults(grown):
        sys.exit(f"soak: the job grows: {', '.join(found)}")


if __name__ == "__main__":
    main()

"""Whether a long run keeps its size: memory, open files and seconds a step of one training job.

    OMP_NUM_THREADS=1 python benchmarks/soak.py --steps 2000 --out docs/results/soak.csv

The smallest study with the exact engine, trained by the command line in a process of its own, which is looked at from
outside each time that a step is logged. Exits 1 where the resident set grows by more than 2 % from the second tenth of
the steps (the first is warm-up) to the last, or the open files grow at all.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from table import show

ROOT = Path(__file__).parents[1]
MOST_GROWTH = 0.02
PARTS = 10


def prepare(steps: int, folder: Path) -> list[str]:
    """The problems and the base policy in `folder`; returns the command that trains."""
    from tailrl.base_policy import write_base_policy
    from tailrl.problems import write_all_problems
    from tailrl.study import parse_study, read_yaml

    given = read_yaml(ROOT / "studies" / "tiny.yaml")
    given["training"]["steps"] = steps
    given["arms"] = {"dvp_mis": given["arms"]["dvp_mis"] | {"sampler": {"engine": "exact", "dtype": "float32"}}}
    study = parse_study({key: value for key, value in given.items() if key != "ablations"})
    write_all_problems(study.problems(), folder / "data")
    write_base_policy(study.policy, folder / "data" / "warm_start.jsonl", folder / "base")
    settings = study.run("dvp_mis").model_dump_json()
    paths = {"policy": folder / "base", "problems": folder / "data/train.jsonl", "out": folder, "wandb": folder}
    script = "from tailrl.cli import main; main()"
    command = [sys.executable, "-c", script, "train", "--settings", settings, "--seed", "0"]
    return [*command, *(f"--{name}={path}" for name, path in paths.items())]


def watch(process: subprocess.Popen, metrics: Path) -> list[tuple[float, int]]:
    """Resident MiB and open files of a process, once for each step that it had logged when it was looked at."""
    seen: list[tuple[float, int]] = []
    while process.poll() is None:
        logged = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        if logged > len(seen):
            pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
            size = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
            if not size:
                break  # it has just ended
            files = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
            seen += [(size, files)] * (logged - len(seen))
        time.sleep(0.2)
    return seen


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
        if process.returncode:
            sys.exit((folder / "log").read_text()[-2000:])
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows: list[dict[str, object]] = []
    for part in range(PARTS):
        first, end = part * len(seen) // PARTS, (part + 1) * len(seen) // PARTS
        sizes, files = zip(*seen[first:end], strict=True)
        seconds = [step["time/step"] for step in steps[first:end]]
        tokens = [step["throughput/tokens_per_second"] * step["time/step"] for step in steps[first:end]]
        rows.append(
            {
                "steps": f"{first} to {end - 1}",
                "resident_mib": round(statistics.median(sizes), 1),
                "open_files": max(files),
                "ms_a_step": round(1e3 * statistics.median(seconds), 1),
                "tokens_a_step": round(statistics.mean(tokens), 1),
            }
        )
    show(rows, arguments.out)
    growth = rows[-1]["resident_mib"] / rows[1]["resident_mib"] - 1  # type: ignore[operator]
    print(f"\nresident set: {100 * growth:+.2f} % from the second tenth to the last")
    if growth > MOST_GROWTH or rows[-1]["open_files"] > rows[1]["open_files"]:  # type: ignore[operator]
        sys.exit("soak: the job grows")


if __name__ == "__main__":
    main()

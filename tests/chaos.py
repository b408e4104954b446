"""Kills a small study at random moments until it is finished, and compares it with one that nobody disturbed.

    python tests/chaos.py              # 100 kills, with vLLM: what `make chaos` runs
    python tests/chaos.py --kills 10 --engine exact

SIGKILL strikes one of three: everything at once (Snakemake and its jobs: a power cut), Snakemake alone (its jobs go on
by themselves), or one job (the kernel out of memory). After each of the first two the study is started again by the
one command that the README names. A study that finishes before the kills are used up is compared and begun anew.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from study_fixture import Workflow, copy_workflow

EXACT = {"engine": "exact", "dtype": "float32"}
CHANGES: dict[str, Any] = {
    "name": "chaos",
    "seeds": [0],
    "policy.warm_start.stages": [{"name": "arithmetic", "problems": 800, "terms": [2, 3], "seed": 1}],
    "training.steps": 12,
    "training.checkpoint_every": 2,
    "ablations": {},
}
COMMAND = "tailrl unlock && exec snakemake --cores 2 --configfile {study}"
"""What `make reproduce` does; exec, so that the process that is killed alone is Snakemake."""
TABLES = ("evaluation", "differences", "claims", "survival", "policies", "training", "mismatch", "delta", "kept")
MODES = ("everything", "everything", "Snakemake", "job")


class Chaos:
    """A study in a folder of its own, and how often it was killed doing what."""

    def __init__(self, folder: Path, engine: str, seed: int) -> None:
        folder.mkdir()
        self.workflow: Workflow = copy_workflow(folder)
        changes = CHANGES | {"arms.dvp_mis.sampler": EXACT, "arms.dvp_mis.disturbance": {"staleness": 1}}
        if engine == "exact":
            changes |= {"arms.naive": {"sampler": EXACT}, "evaluation.sampler": EXACT}
        self.study = self.workflow.write_study(changes)
        self.random = random.Random(seed)
        self.groups: list[int] = []
        self.kills: Counter[str] = Counter()
        self.stages: Counter[str] = Counter()

    @property
    def results(self) -> Path:
        return self.workflow.folder / "results" / "chaos"

    def start(self) -> "subprocess.Popen[bytes]":
        """The one command; its output goes to a file that the next start writes over."""
        with (self.workflow.folder / "output").open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", COMMAND.format(study=self.study)],
                cwd=self.workflow.folder,
                env=self.workflow.environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.groups.append(process.pid)
        return process

    def finish(self) -> None:
        """Let the study come to its end; fails with its output where it does not."""
        self.expect_end(self.start())

    def expect_end(self, process: "subprocess.Popen[bytes]") -> None:
        if process.wait(timeout=1800):
            sys.exit((self.workflow.folder / "output").read_text(errors="replace")[-10_000:])

    def jobs(self) -> dict[int, str]:
        """The processes of the study's jobs, by id, with their sub-command."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                command = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
                here = (process / "cwd").resolve(strict=True) == self.workflow.folder.resolve()
            except OSError:
                continue
            if here and len(command) > 2 and Path(command[1]).name == "tailrl":
                found[int(process.name)] = command[2]
        return found

    def kill(self, process: "subprocess.Popen[bytes]") -> None:
        """One SIGKILL, and a note of what it struck."""
        mode, jobs = self.random.choice(MODES), self.jobs()
        if mode == "job" and not jobs:
            mode = "everything"
        self.kills[mode] += 1
        self.stages.update(set(jobs.values()) or {"Snakemake"})
        if mode == "job":
            _kill(self.random.choice(sorted(jobs)))
        elif mode == "Snakemake":
            _kill(process.pid)
            process.wait()
        else:
            self.kill_all()
            process.wait()

    def kill_all(self) -> None:
        """Every process of every start, also those that outlived their Snakemake."""
        for group in self.groups:
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.groups.clear()

    def disturb(self, kills: int, longest: float, expected: dict[str, Any]) -> int:
        """Kill so many times, each within `longest` seconds of the one before; the number of studies that finished."""
        finished, process = 0, self.start()
        struck = False
        while self.kills.total() < kills:
            try:
                code = process.wait(timeout=self.random.uniform(0.5, longest))
            except subprocess.TimeoutExpired:
                self.kill(process)
                struck = True
            else:
                # A study may fail because a job of it was killed, and for no other reason.
                if code and not struck:
                    sys.exit((self.workflow.folder / "output").read_text(errors="replace")[-10_000:])
                if not code:
                    compare(self.final(), expected)
                    finished += 1
                    print(f"{self.kills.total()} kills, study {finished} is as undisturbed", flush=True)
                    self.kill_all()
                    shutil.rmtree(self.results)
            if process.poll() is not None:
                process, struck = self.start(), False
        if process.wait(timeout=1800):
            self.finish()
        compare(self.final(), expected)
        return finished + 1

    def final(self) -> dict[str, Any]:
        """Everything of the results that no clock has a part in."""
        found: dict[str, Any] = {"base": (self.results / "base/model.safetensors").read_bytes()}
        for run in sorted((self.results / "train").glob("*/*")):
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            name = str(run.relative_to(self.results))
            found[f"{name} metrics"] = [
                {k: v for k, v in line.items() if not k.startswith(("time/", "throughput/"))} for line in lines
            ]
            found[f"{name} weights"] = (run / "policy/model.safetensors").read_bytes()
            with np.load(run / "tokens.npz") as tokens:
                found[f"{name} tokens"] = {key: tokens[key].tobytes() for key in tokens.files}
            assert not (run / "checkpoints").exists(), f"{run}: the checkpoints are left"
        for file in sorted((self.results / "eval").iterdir()):
            found[file.name] = file.read_bytes()
        for table in TABLES:
            found[f"{table}.csv"] = (self.results / "tables" / f"{table}.csv").read_bytes()
        return found


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Fails with the names of what is not the same to the bit."""
    differing = [name for name in {**found, **expected} if found.get(name) != expected.get(name)]
    if differing:
        sys.exit(f"not as undisturbed: {', '.join(differing)}")


def run(folder: Path, kills: int, engine: str, seed: int) -> str:
    """The whole of it; returns what was done in a sentence, and exits where a study did not end as it should."""
    undisturbed = Chaos(folder / "undisturbed", engine, seed)
    begun = time.monotonic()
    undisturbed.finish()
    seconds = time.monotonic() - begun
    disturbed = Chaos(folder / "disturbed", engine, seed)
    try:
        finished = disturbed.disturb(kills, max(10.0, seconds / 2), undisturbed.final())
    finally:
        disturbed.kill_all()
    struck = ", ".join(f"{count} of {what}" for what, count in disturbed.kills.items())
    doing = ", ".join(f"{stage} {count}" for stage, count in disturbed.stages.most_common())
    return (
        f"{kills} kills ({struck}; while running: {doing}; seed {seed}): {finished} studies finished, each the same as "
        f"the undisturbed one ({seconds:.0f} s) in metrics, weights, tokens, evaluation and tables"
    )


def _kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--engine", choices=("vllm", "exact"), default="vllm", help="exact: one that starts faster")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the targets")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        print(run(Path(folder), arguments.kills, arguments.engine, arguments.seed))


if __name__ == "__main__":
    main()

"""Kills a small study at random moments until it is finished, and compares it with one that nobody disturbed.

    python tests/chaos/chaos.py --out chaos.csv              # 100 kills, with vLLM: what `make chaos` runs
    python tests/chaos/chaos.py --kills 10 --engine exact

Every ten kills meet every part of a study: each has an aim (`AIMS`). The script looks at the study's processes and
files until the aim is on, lets a random part of the time go by that it lasts, and strikes with SIGKILL: everything
at once (Snakemake, its jobs, W&B's processes: a power cut), Snakemake alone (its jobs go on by themselves), or one job
(the kernel out of memory). A checkpoint and the results of a run are met while they are being written. After a
Snakemake has ended the study is started again by the one command that the README names. A study that finishes before
the kills are used up is compared and begun anew. Its runs must have learned (`learning.py`): a wrongly restored weight
shows only where weights move. The seed fixes aims, victims and the shares of time. It cannot fix how fast the machine
is.
"""

import argparse
import csv
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from statistics import mean
from typing import Any

from kills import RECORDS, STARTS, Kill, Struck, plan, table
from learning import LEARNS, demand_learning
from outcome import compare, final, resumed
from study_fixture import Workflow, copy_workflow
from victims import MARK, PASSING, Job, half_written, jobs, kill, kill_all, writer

ARMS = ("dvp_mis", "naive")
EXACT = {"engine": "exact", "dtype": "float32"}
CHANGES: dict[str, Any] = LEARNS | {
    "name": "chaos",
    "seeds": [0],
    "training.steps": 24,
    "training.checkpoint_every": 2,
    "ablations": {},
}
COMMAND = "tailrl unlock && exec snakemake --cores 2 --configfile {study}"
"""What `make reproduce` does; exec, so that the process that is killed alone is Snakemake."""
RECORDING = 0.5
"""Seconds after a job's end within which Snakemake is struck: it looks at the outputs and notes them."""
SECOND_START = ("engine starts", "training", "checkpoint", "evaluation")
"""Stages of processes that their rule starts once more."""
WRITING = 0.01
"""Seconds after a checkpoint's file, or the folder of the results, appeared within which its writer is struck."""
PATIENCE = 1800
"""Seconds that an aim or the end of a study is waited for."""


class Chaos:
    """A study in a folder of its own, and what has befallen it."""

    def __init__(self, folder: Path, engine: str) -> None:
        folder.mkdir()
        self.folder = folder
        self.workflow: Workflow = copy_workflow(folder)
        changes = CHANGES | {"arms.dvp_mis.sampler": EXACT, "arms.dvp_mis.disturbance": {"staleness": 1}}
        if engine == "exact":
            changes |= {"arms.naive": {"sampler": EXACT}, "evaluation.sampler": EXACT}
        self.study = self.workflow.write_study(changes)
        self.struck: list[Struck] = []
        self.writing: Path | None = None
        self.finished = 0
        self.to_resume: set[Path] = set()
        self.resumed = 0
        self.records: dict[Path, bytes] = {}
        self.kept = 0
        self.second: set[str] = set()

    @property
    def results(self) -> Path:
        return self.folder / "results" / "chaos"

    def start(self) -> "subprocess.Popen[bytes]":
        """The one command; its output goes to a file that the next start writes over."""
        self.second.clear()
        with (self.folder / "output").open("wb") as output:
            return subprocess.Popen(
                ["bash", "-c", COMMAND.format(study=self.study)],
                cwd=self.folder,
                env=self.workflow.environment() | {MARK: str(self.folder)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def fail(self) -> None:
        """Ends the script with the study's last words."""
        sys.exit((self.folder / "output").read_text(errors="replace")[-10_000:])

    # --- undisturbed ---------------------------------------------------------------------------------

    def finish(self) -> dict[str, float]:
        """Let the study come to its end, where its runs must have learned; the mean seconds that each stage lasts."""
        begun, process = time.monotonic(), self.start()
        seen: dict[tuple[int, str], list[float]] = {}
        while process.poll() is None:
            now = time.monotonic() - begun
            for job in jobs(self.folder):
                seen.setdefault((job.process, job.stage), [now, now])[1] = now
            time.sleep(0.25)
        if process.returncode:
            self.fail()
        shares = demand_learning(self.results, self.runs())
        print("steps with a gradient:", {run: f"{share:.0%}" for run, share in shares.items()}, flush=True)
        lasted = defaultdict(list)
        for (_, stage), (first, last) in seen.items():
            lasted[stage].append(last - first)
        return {stage: mean(spans) for stage, spans in lasted.items()} | {STARTS: min(s[0] for s in seen.values())}

    # --- disturbed -----------------------------------------------------------------------------------

    def disturb(self, planned: Sequence[Kill], spans: Mapping[str, float], expected: Mapping[str, Any]) -> None:
        """Carry the kills out, and compare every study that finishes, the last one among them."""
        process, begun = self.start(), time.monotonic()
        harmed: set[str] = set()
        for kill_ in planned:
            while not self.reach(kill_, spans, process):
                # A study may fail because a job of it was killed that nothing starts again, and for no other reason.
                if process.returncode and not harmed:
                    self.fail()
                if not process.returncode:
                    self.compare(expected)
                    shutil.rmtree(self.results)
                process, harmed = self.start(), set()
            harmed |= self.strike(kill_, process, begun)
            if process.poll() is not None:
                process, harmed = self.start(), set()
        if process.wait(timeout=PATIENCE) and harmed:
            process = self.start()
            process.wait(timeout=PATIENCE)
        if process.returncode:
            self.fail()
        self.compare(expected)
        if not self.resumed and any(row.at == "checkpoint" for row in self.struck):
            sys.exit("training was killed beside its checkpoints, and no run has gone on from one")

    def reach(self, kill_: Kill, spans: Mapping[str, float], process: "subprocess.Popen[bytes]") -> bool:
        """Wait for the aim and a share of its time; False where the study has ended before."""
        pause, passed = kill_.share * spans.get(kill_.aim, RECORDING), kill_.aim == STARTS
        # A run has many checkpoints and ends once.
        skipped, within = divmod((len(ARMS) if kill_.aim == "results" else 4) * kill_.share, 1)
        before: set[int] = set()
        # What an earlier kill has left half-written is not being written.
        written = self.half_written(kill_.aim)
        end = time.monotonic() + PATIENCE
        while not passed and process.poll() is None and time.monotonic() < end:
            if kill_.aim in PASSING:
                now_written = self.half_written(kill_.aim)
                for run in sorted(now_written - written):
                    self.writing, skipped = run, skipped - 1
                written, passed, pause = now_written, skipped < 0, within * WRITING
                time.sleep(0.001)
            else:
                now = jobs(self.folder)
                processes = {job.process for job in now}
                recorded = bool(before - processes)
                passed = recorded if kill_.aim == RECORDS else any(job.stage == kill_.aim for job in now)
                before = processes
                time.sleep(0 if passed else 0.1)
        if time.monotonic() >= end:
            self.fail()
        time.sleep(pause if passed else 0)
        return process.poll() is None

    def runs(self) -> list[Path]:
        return [self.results / "train" / arm / "seed0" for arm in ARMS]

    def half_written(self, stage: str) -> set[Path]:
        return {run for run in self.runs() if stage in PASSING and half_written(run, stage)}

    def strike(self, kill_: Kill, process: "subprocess.Popen[bytes]", begun: float) -> set[str]:
        """One SIGKILL, or one for everything; a row for the table.

        Returns:
            What may now make the running Snakemake fail: the name of a job that was killed alone. Of one with an engine
            the rule itself starts the process again, once.
        """
        writing_one = writer(self.writing) if kill_.aim in PASSING and self.writing else None
        if writing_one is not None and self.writing:
            kill(writing_one)  # at once: to look at all processes takes longer than to write
            name = f"train {self.writing.parent.name} {self.writing.name}"
            victim: Job | None = Job(writing_one, kill_.aim, name, self.writing)
        else:
            now = jobs(self.folder)
            victim = next((job for job in now if job.stage == kill_.aim), now[0] if now else None)
        mode = kill_.mode if victim or kill_.mode != "one job" else "everything"
        if mode == "everything":
            kill_all(self.folder)
            process.wait()
        elif mode == "Snakemake":
            kill(process.pid)
            process.wait()
        elif victim is not None:
            kill(victim.process)
        run = victim.run if victim else None
        self.note_states(victim, mode)
        metrics = run / "metrics.jsonl" if run else None
        writing = mode != "Snakemake" and victim is not None and victim.stage in PASSING
        own = kill_.aim in (STARTS, RECORDS) and (victim is None or kill_.aim == RECORDS)
        self.struck.append(
            Struck(
                len(self.struck) + 1,
                self.finished + 1,
                kill_.aim,
                victim.name if victim and mode == "one job" else mode,
                kill_.aim if own else victim.stage if victim else "Snakemake between jobs",
                str(metrics.read_text().count("\n")) if metrics and metrics.exists() else "",
                # Not what an earlier kill has left.
                writing and run in self.half_written(kill_.aim),
                round(time.monotonic() - begun, 1),
            )
        )
        print(self.struck[-1], flush=True)
        if mode != "one job" or victim is None:
            return set()
        again = victim.stage in SECOND_START and victim.name not in self.second
        self.second.add(victim.name)
        return set() if again else {victim.name}

    def note_states(self, victim: Job | None, mode: str) -> None:
        """Which runs must go on from a state: those whose process was killed when they had one and no results yet. And
        which have results, which must be the ones that the study ends with: to train again would give the same bits."""
        killed = self.runs() if mode == "everything" else []
        if mode == "one job" and victim and victim.run and writer(victim.run) == victim.process:
            killed = [victim.run]
        for run in self.runs():
            for record in run.glob("checkpoints/finished-*/run.json"):
                self.records.setdefault(run, record.read_bytes())
        for run in killed:
            if any(run.glob("checkpoints/step-*")) and not any(run.glob("checkpoints/finished-*")):
                self.to_resume.add(run)

    # --- the end -------------------------------------------------------------------------------------

    def compare(self, expected: Mapping[str, Any]) -> None:
        """Count a study that has finished; ends the script where it has not learned or is not as undisturbed."""
        kill_all(self.folder)
        demand_learning(self.results, self.runs())
        compare(final(self.results), expected)
        for run in sorted(self.to_resume):
            if not resumed(run):
                sys.exit(f"{run.relative_to(self.results)}: trained from the first step, though it had a state")
        for run, record in self.records.items():
            if (run / "run.json").read_bytes() != record:
                sys.exit(f"{run.relative_to(self.results)}: trained again, though it was finished")
        self.resumed += len(self.to_resume)
        self.kept += len(self.records)
        self.to_resume.clear()
        self.records.clear()
        self.finished += 1
        print(f"{len(self.struck)} kills: study {self.finished} is as undisturbed", flush=True)


def run(folder: Path, kills: int, engine: str, seed: int, out: Path | None = None) -> list[Struck]:
    """The whole of it; returns the kills, and exits where a study did not end as it should."""
    undisturbed, disturbed = (Chaos(folder / name, engine) for name in ("undisturbed", "disturbed"))
    try:
        spans = undisturbed.finish()
        print("seconds undisturbed: " + ", ".join(f"{stage} {span:.1f}" for stage, span in spans.items()), flush=True)
        disturbed.disturb(plan(kills, seed), spans, final(undisturbed.results))
    finally:
        kill_all(disturbed.folder)
        kill_all(undisturbed.folder)
        if out is not None:
            with out.open("w", newline="", encoding="utf-8") as file:
                rows = csv.writer(file)
                rows.writerow(field.name for field in fields(Struck))
                rows.writerows(map(astuple, disturbed.struck))
    left = sum(row.half_written for row in disturbed.struck)
    print(f"\n{table(disturbed.struck)}\n")
    print(
        f"{kills} kills (seed {seed}, {left} left something half-written): {disturbed.finished} studies finished; each "
        "has learned and is the same as the undisturbed one in every file that no clock has a part in; "
        f"{disturbed.resumed} runs went on from a state, all that had one; {disturbed.kept} were finished when struck, "
        "and none was trained again"
    )
    return disturbed.struck


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--engine", choices=("vllm", "exact"), default="vllm", help="exact: one that starts faster")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims")
    parser.add_argument("--out", type=Path, help="a CSV file of the kills")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        run(Path(folder), arguments.kills, arguments.engine, arguments.seed, arguments.out)


if __name__ == "__main__":
    main()

"""A study that is struck again and again, started again after each kill, and compared whenever it finishes."""

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kills import RECORDS, STARTS, TWO_JOBS, Kill
from learning import demand_learning
from outcome import compare, final, resumed
from rows import EQUAL, Rows
from small_study import ARMS, SmallStudy
from victims import PASSING, Job, cpu_seconds, downloading, half_written, jobs, kill, kill_all, snakemake, writer

RECORDING = 0.5
"""Seconds after a job's end within which Snakemake is struck: it looks at the outputs and notes them."""
SECOND_START = ("engine starts", "training", "checkpoint", "results", "evaluation")
"""Stages of processes that their rule starts once more."""
WRITING, SENDING = 0.01, 1.4
"""Seconds after the file of a checkpoint, or the folder of the results, or that of a download appeared within which its
writer is struck."""
IN_VAIN = 3
"""Studies that may finish before an aim is met: one may have been past it, and more are bad luck."""
PATIENCE = 1800
"""Seconds that an aim or the end of a study is waited for."""


class Disturbed:
    """A study, and what has befallen it."""

    def __init__(self, study: SmallStudy, rows: Rows, spans: Mapping[str, float], expected: Mapping[str, Any]) -> None:
        """A study that has not begun.

        Args:
            study: in a new folder.
            rows: of the kills, to which this adds.
            spans: what `SmallStudy.finish` returned, of the undisturbed study.
            expected: the results of the undisturbed study (`outcome.final`).
        """
        self.study = study
        self.rows = rows
        self.spans = spans
        self.expected = expected
        self.begun = time.monotonic() - rows.seconds
        # What a kill's aim is about: the run that begins to write, and parts of downloads that were there before.
        self.writing: Path | None = None
        self.partial: set[Path] = set()
        # Runs that must go on from a state, and the newest step that they had one of.
        self.to_resume: dict[Path, int] = {}
        self.records: dict[Path, bytes] = {}
        self.resumed = self.kept = 0
        self.second: set[str] = set()

    def disturb(self, planned: Sequence[Kill]) -> None:
        """Carry the kills out, and compare every study that finishes, the last one among them.

        What ends the script goes into the rows of its study.
        """
        try:
            self._disturb(planned)
        except SystemExit as ended:
            self.rows.settle(str(ended.code).partition("\n")[0])
            raise
        finally:
            kill_all(self.study.folder)

    def _disturb(self, planned: Sequence[Kill]) -> None:
        process = self._start()
        harmed: set[str] = set()
        for kill_ in planned:
            in_vain = 0
            while not self.reach(kill_, process):
                # A study may fail because a job of it was killed that nothing starts again, and for no other reason.
                if process.returncode and not harmed:
                    self.study.fail()
                if not process.returncode:
                    self.compare()
                    self.study.begin_anew()
                    in_vain += 1
                if in_vain > IN_VAIN:
                    sys.exit(f"kill {len(self.rows.rows) + 1}: {in_vain} studies finished, and none met {kill_.aim!r}")
                process, harmed = self._start(), set()
            harmed |= self.strike(kill_, process)
            if process.poll() is not None:
                process, harmed = self._start(), set()
        if process.wait(timeout=PATIENCE) and harmed:
            process = self._start()
            process.wait(timeout=PATIENCE)
        if process.returncode:
            self.study.fail()
        self.compare()

    def _start(self) -> "subprocess.Popen[bytes]":
        self.second.clear()
        return self.study.start()

    # --- when ----------------------------------------------------------------------------------------

    def reach(self, kill_: Kill, process: "subprocess.Popen[bytes]") -> bool:
        """Wait for the aim and a share of its time; False where the study has ended before."""
        end = time.monotonic() + PATIENCE
        self.partial = downloading(self.study.folder)
        if kill_.aim == STARTS:
            pause: float | None = kill_.share * self.spans[STARTS]
        elif kill_.aim in PASSING:
            pause = self._reach_file(kill_, process, end)
        else:
            pause = self._reach_job(kill_, process, end)
        if time.monotonic() >= end:
            self.study.fail()
        time.sleep(pause or 0)
        return process.poll() is None and pause is not None

    def _reach_file(self, kill_: Kill, process: "subprocess.Popen[bytes]", end: float) -> float | None:
        """Wait until a run begins to write; returns how long to wait further, None where the study has ended."""
        # A run has many checkpoints and ends once.
        skipped, within = divmod((len(ARMS) if kill_.aim == "results" else 4) * kill_.share, 1)
        # What an earlier kill has left half-written is not being written.
        written = self.half_written(kill_.aim)
        while process.poll() is None and time.monotonic() < end:
            now_written = self.half_written(kill_.aim)
            for run in sorted(now_written - written):
                self.writing, skipped = run, skipped - 1
            written = now_written
            if skipped < 0:
                return within * WRITING
            time.sleep(0.001)
        return None

    def _reach_job(self, kill_: Kill, process: "subprocess.Popen[bytes]", end: float) -> float | None:
        """Wait until a job has done a share of what is aimed at, or has ended; returns as `_reach_file` does."""
        before: set[int] = set()
        # CPU time of each process when it was first seen at what is aimed at.
        seen: dict[int, float] = {}
        while process.poll() is None and time.monotonic() < end:
            now = jobs(self.study.folder)
            processes = {job.process for job in now}
            if kill_.aim == "download" and downloading(self.study.folder) - self.partial:
                return kill_.share * SENDING
            if kill_.aim == RECORDS and before - processes:
                return kill_.share * RECORDING
            if kill_.aim == TWO_JOBS:
                aimed = now[:1] if len(processes & before) > 1 else []  # twice: a killed job may still be about to end
            else:
                stages = (kill_.aim, *PASSING) if kill_.aim == "training" else (kill_.aim,)
                aimed = [job for job in now if job.stage in stages and kill_.aim != "download"]
            for job in aimed:
                cpu = cpu_seconds(job.process) or 0.0
                span = self.spans.get(job.stage if kill_.aim == TWO_JOBS else kill_.aim, RECORDING)
                if cpu - seen.setdefault(job.process, cpu) >= kill_.share * span:
                    return 0.0
            if seen and not aimed and kill_.aim != TWO_JOBS:
                return 0.0  # it was quicker than undisturbed
            before = processes
            time.sleep(0.05)
        return None

    def half_written(self, stage: str) -> set[Path]:
        return {run for run in self.study.runs() if stage in PASSING and half_written(run, stage)}

    # --- whom ----------------------------------------------------------------------------------------

    def strike(self, kill_: Kill, process: "subprocess.Popen[bytes]") -> set[str]:
        """One SIGKILL, or one for each of several; a row for the table.

        Returns:
            What may now make the running Snakemake fail: the names of jobs that were killed and not Snakemake. Of one
            with an engine the rule itself starts the process again, once.
        """
        writing_one = writer(self.writing) if kill_.aim in PASSING and self.writing else None
        if writing_one is not None and self.writing:
            kill(writing_one)  # at once: to look at all processes takes longer than to write
            name = f"train {self.writing.parent.name} {self.writing.name}"
            victims = [Job(writing_one, kill_.aim, name, self.writing)]
        else:
            now = jobs(self.study.folder)
            aimed = [job for job in now if job.stage == kill_.aim]
            victims = now[:2] if kill_.mode == TWO_JOBS else (aimed or now)[:1]
        mode = kill_.mode if victims or kill_.mode == "Snakemake" else "everything"
        if mode == "everything":
            kill_all(self.study.folder)
            process.wait()
        elif mode == "Snakemake":
            kill(snakemake(self.study.folder) or process.pid)
            process.wait()
        else:
            for victim in victims:
                kill(victim.process)
        interrupted = self.note_states(victims, mode)
        self._note_row(kill_, mode, victims, interrupted)
        if mode not in ("one job", TWO_JOBS):
            return set()
        harmed = {job.name for job in victims if job.stage not in SECOND_START or job.name in self.second}
        self.second |= {job.name for job in victims}
        return harmed

    def _note_row(self, kill_: Kill, mode: str, victims: Sequence[Job], interrupted: int) -> None:
        first = victims[0] if victims else None
        at = first.stage if first else "Snakemake between jobs"
        if kill_.aim in (STARTS, RECORDS) and (first is None or kill_.aim == RECORDS):
            at = kill_.aim
        # Not what an earlier kill has left, nor what goes on.
        left = mode != "Snakemake" and at in PASSING and first is not None and first.run in self.half_written(at)
        if at == "download" and mode != "Snakemake":
            left = bool(downloading(self.study.folder) - self.partial)
        self.rows.add(
            aim=kill_.aim,
            killed=" + ".join(job.name for job in victims) if mode in ("one job", TWO_JOBS) else mode,
            at=at,
            step=steps(first.run) if first and first.run else "",
            half_written=left,
            seconds=round(time.monotonic() - self.begun, 1),
            interrupted=interrupted,
        )

    def note_states(self, victims: Sequence[Job], mode: str) -> int:
        """Which runs must go on from a state: those whose process was killed when they had one and no results yet. And
        which have results, which must be the ones that the study ends with: to train again would give the same bits.

        Returns:
            How many runs must go on.
        """
        killed = self.study.runs() if mode == "everything" else []
        if mode in ("one job", TWO_JOBS):
            killed = [job.run for job in victims if job.run and writer(job.run) == job.process]
        for run in self.study.runs():
            for record in run.glob("checkpoints/finished-*/run.json"):
                self.records.setdefault(run, record.read_bytes())
        count = 0
        for run in killed:
            states = [int(file.name.split("-")[1]) for file in run.glob("checkpoints/step-*")]
            if states and not any(run.glob("checkpoints/finished-*")):
                self.to_resume[run] = max(states)
                count += 1
        return count

    # --- the end -------------------------------------------------------------------------------------

    def compare(self) -> None:
        """Count a study that has finished; ends the script where it has not learned or is not as undisturbed."""
        results, folder = self.study.results, self.study.folder
        kill_all(folder)
        demand_learning(results, self.study.runs())
        compare(final(results), self.expected)
        for run, step in sorted(self.to_resume.items()):
            name, steps = run.relative_to(results), resumed(run)
            if not steps:
                sys.exit(f"{name}: trained from the first step, though it had a state")
            if max(steps) < step:
                sys.exit(f"{name}: went on from step {max(steps)}, though it had a state of step {step}")
        for run, record in self.records.items():
            if (run / "run.json").read_bytes() != record:
                sys.exit(f"{run.relative_to(results)}: trained again, though it was finished")
        self.resumed += len(self.to_resume)
        self.kept += len(self.records)
        self.to_resume.clear()
        self.records.clear()
        study = self.rows.finished + 1
        self.rows.settle(EQUAL)
        print(f"{len(self.rows.rows)} kills: study {study} is as undisturbed", flush=True)


def steps(run: Path) -> str:
    """Steps in the run's metrics; empty where there are none, as where Snakemake has removed a killed job's outputs."""
    try:
        return str((run / "metrics.jsonl").read_text(encoding="utf-8").count("\n"))
    except FileNotFoundError:
        return ""

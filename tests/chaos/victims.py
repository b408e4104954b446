"""The processes of a study that runs in a folder: what each is doing, and SIGKILL for them."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path

MARK = "TAILRL_CHAOS"
"""In the environment of every process of the study: children that leave the group and the folder keep it."""
STAGES = (
    "download",
    "problems",
    "base policy",
    "engine starts",
    "training",
    "checkpoint",
    "results",
    "evaluation",
    "tables",
)
"""What jobs do, in the order of a study. Training is four: its engine starts, it steps, it writes a checkpoint, and at
last its results. The tables, figures and summary are one job."""
PASSING = {"checkpoint": "writing-parts", "results": "writing-results"}
"""What is too short to be met by looking at processes, and under which passing name it writes."""
_COMMANDS = {"policy": "base policy", "evaluate": "evaluation", "summarise": "tables"}


@dataclass(frozen=True)
class Job:
    """A job's process.

    Attributes:
        process: its id.
        stage: what it is doing, one of STAGES, or its sub-command.
        name: the sub-command and what it writes.
        run: the folder of the run, where it trains.
    """

    process: int
    stage: str
    name: str
    run: Path | None = None


def marked(folder: Path) -> dict[int, list[str]]:
    """Every process of the study, with the words of its command."""
    mark, found = f"{MARK}={folder}".encode(), {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found[int(process.name)] = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it has ended, or is another user's
    return found


def jobs(folder: Path) -> list[Job]:
    """The study's jobs, the oldest process first."""
    found = []
    for process, command in sorted(marked(folder).items()):
        names = [Path(word).name for word in command[:3]]
        if names[1:] == ["tailrl", "download"]:
            found.append(Job(process, "download", "download"))
        elif names[1:] == ["tailrl", "job"] and "--out" in command:
            out = folder / command[command.index("--out") + 1]
            if command[3] == "train":
                found.append(Job(process, _training(process, out), f"train {out.parent.name} {out.name}", out))
            else:
                found.append(Job(process, _COMMANDS.get(command[3], command[3]), f"{command[3]} {out.stem}"))
    return found


def cpu_seconds(process: int) -> float | None:
    """CPU time that a process has used; None where it has ended. A busy machine stretches it less than a clock."""
    try:
        # The command's name, in brackets, may hold spaces.
        numbers = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")


def snakemake(folder: Path) -> int | None:
    """The process of the study's Snakemake."""
    names = {process: [Path(word).name for word in command[:2]] for process, command in marked(folder).items()}
    return min((process for process, words in names.items() if "snakemake" in words), default=None)


def downloading(folder: Path) -> set[Path]:
    """Files in the hub's cache for parts of a download: under way, or left by a process that was killed."""
    return set((folder / "hub").rglob("*.incomplete"))


def half_written(run: Path, stage: str) -> bool:
    """Whether what a passing stage writes is on its way to the disk, or was when its writer was killed."""
    return (run / "checkpoints" / PASSING[stage]).exists()


def writer(run: Path) -> int | None:
    """The process that writes the run's checkpoints; None before it has begun and after it has ended."""
    try:
        return int((run / "checkpoints" / "lock").read_text().partition(" ")[0])
    except (OSError, ValueError):
        return None


def _training(process: int, run: Path) -> str:
    """The stage of a training job; one that waits for another process to end counts among those that start."""
    lock, metrics = run / "checkpoints" / "lock", run / "metrics.jsonl"
    try:
        # The file of metrics is opened anew when the first step begins, and the lock is taken before.
        stepping = writer(run) == process and metrics.stat().st_mtime > lock.stat().st_mtime
    except OSError:
        stepping = False
    if not stepping:
        return "engine starts"
    return next((stage for stage in PASSING if half_written(run, stage)), "training")


def kill(process: int) -> None:
    """SIGKILL, where it still runs."""
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return


def kill_all(folder: Path) -> None:
    """Every process of the study, until none is left: one may have started another meanwhile."""
    while processes := marked(folder):
        for process in processes:
            kill(process)

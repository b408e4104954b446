"""The lock of a killed Snakemake goes; that of a running one stays."""

import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tailrl.runtime import snakemake_lock
from tailrl.runtime.errors import StudyError
from tailrl.runtime.snakemake_lock import is_snakemake, remove_stale_lock, running_snakemakes


@pytest.fixture
def locked(tmp_path: Path) -> Path:
    """As Snakemake leaves it: the files that it would write and read."""
    locks = tmp_path / ".snakemake" / "locks"
    locks.mkdir(parents=True)
    for name in ("0.input.lock", "0.output.lock"):
        (locks / name).write_text("results/tiny/report.html\n")
    return tmp_path


def left(folder: Path) -> int:
    return len(list((folder / ".snakemake" / "locks").iterdir()))


def pretend(folder: Path, *arguments: str, name: str = "snakemake") -> "subprocess.Popen[str]":
    """A process whose command line is Snakemake's, or of that name, and that says when it runs."""
    script = folder / "bin" / name
    script.parent.mkdir(exist_ok=True)
    script.write_text("import time\nprint('runs', flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen([sys.executable, str(script), *arguments], cwd=folder, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "runs\n"
    return process


def test_a_stale_lock_is_removed(locked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert remove_stale_lock(locked)
    assert left(locked) == 0
    assert capsys.readouterr().err == f"tailrl: {locked}: the lock of a Snakemake that was killed is removed\n"
    assert not remove_stale_lock(locked), "there is none any more"
    assert not remove_stale_lock(locked / "bin"), "nothing ever ran there"


def test_the_lock_of_a_running_snakemake_stays_until_it_is_killed(locked: Path) -> None:
    process = pretend(locked, "--cores", "all")
    try:
        assert running_snakemakes(locked) == {process.pid: True}
        with pytest.raises(StudyError, match=f": a Snakemake is running here already, as process {process.pid}$"):
            remove_stale_lock(locked)
        assert left(locked) == 2
    finally:
        process.kill()
    # Nobody has asked for its exit code yet: a zombie runs no more.
    while running_snakemakes(locked):
        pass
    assert remove_stale_lock(locked)
    process.communicate()


OTHERS = {
    "a Snakemake elsewhere": ("elsewhere", "snakemake", ("--cores", "all")),
    "training, which keeps others out by itself": (".", "tailrl", ("job", "train", "--out", "results")),
    "a command that writes no results": (".", "tailrl", ("mirror", "results")),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_processes_are_not_in_the_way(locked: Path, other: str) -> None:
    where, name, arguments = OTHERS[other]
    (locked / where).mkdir(exist_ok=True)
    process = pretend(locked / where, *arguments, name=name)
    try:
        assert remove_stale_lock(locked)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("tailrl", ("job", "evaluate", "--out", "results/eval/naive.json"), "tailrl job evaluate"),
        ("snakemake", ("--report", "report.html", "--nolock"), "report.html"),
    ],
)
def test_a_job_that_outlived_its_snakemake_is_waited_for(
    locked: Path, monkeypatch: pytest.MonkeyPatch, name: str, arguments: tuple[str, ...], words: str
) -> None:
    said: list[str] = []
    monkeypatch.setattr(snakemake_lock, "say", said.append)
    process = pretend(locked, *arguments, name=name)
    thread = threading.Thread(target=remove_stale_lock, args=(locked,))
    try:
        thread.start()
        while not said:
            assert thread.is_alive()
            time.sleep(0.01)
        sentence = f"{locked}: {words}, process {process.pid}, outlived its Snakemake; waiting for its end"
        assert said == [sentence]
        assert left(locked) == 2
    finally:
        process.kill()
        process.communicate()
    thread.join()
    assert left(locked) == 0


PYTHON = "/usr/bin/python3.11"
COMMANDS = {
    (PYTHON, "/venv/bin/snakemake", "--cores", "all"): True,
    ("/venv/bin/snakemake", "--cores", "all"): True,
    (PYTHON, "-m", "snakemake", "--cores", "all"): True,
    (PYTHON, "-X", "dev", "-m", "snakemake"): True,
    (PYTHON, "-Xdev", "-W", "error", "-Im", "snakemake"): True,
    (PYTHON, "-u", "-O", "-msnakemake"): True,
    (PYTHON, "-m", "snakemake.cli"): True,
    (PYTHON, "-m", "pytest", "snakemake"): False,
    (PYTHON, "-c", "import snakemake", "snakemake"): False,
    (PYTHON, "-X", "snakemake", "other.py"): False,
    (PYTHON, "read.py", "snakemake"): False,
    ("less", "snakemake"): False,
    (PYTHON,): False,
    ("",): False,
    (): False,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_snakemake_is_known_by_its_command(command: tuple[str, ...]) -> None:
    assert is_snakemake(list(command)) == COMMANDS[command]


def test_another_users_snakemake_may_be_here(locked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system shows its command and not its folder."""
    process = pretend(locked.parent, "--cores", "all")

    def cwd(asked: psutil.Process) -> str:
        if asked.pid == process.pid:
            raise psutil.AccessDenied(asked.pid)
        return "/"

    monkeypatch.setattr(psutil.Process, "cwd", cwd)
    words = f": another user's Snakemake is running, as process {process.pid}, here or elsewhere; "
    try:
        with pytest.raises(StudyError, match=words):
            remove_stale_lock(locked)
        assert left(locked) == 2
    finally:
        process.kill()
        process.communicate()
    assert remove_stale_lock(locked)


def test_a_snakemake_that_ends_while_it_is_looked_at_is_no_other_users(
    locked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its command was read before it ended, its folder after."""
    process = pretend(locked, "--cores", "all")
    command = psutil.Process(process.pid).cmdline()

    def cwd(asked: psutil.Process) -> str:
        if asked.pid != process.pid:
            return "/"
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays a zombie
        raise psutil.ZombieProcess(asked.pid)

    monkeypatch.setattr(psutil.Process, "cwd", cwd)
    monkeypatch.setattr(psutil.Process, "cmdline", lambda asked: command if asked.pid == process.pid else [])
    try:
        assert running_snakemakes(locked) == {}
    finally:
        process.kill()
        process.communicate()


def test_another_machine_cannot_be_looked_at(locked: Path) -> None:
    host = locked / ".snakemake" / "host"
    host.write_text("node17\n")
    with pytest.raises(StudyError, match=r": locked by a Snakemake on node17; .* say snakemake --unlock$"):
        remove_stale_lock(locked)
    assert left(locked) == 2
    host.write_text(platform.node())
    assert remove_stale_lock(locked)


def test_the_jobs_of_a_cluster_cannot_be_looked_at(locked: Path) -> None:
    (locked / ".snakemake" / "host").write_text(f"{platform.node()}\nslurm")
    with pytest.raises(StudyError, match=r"gave its jobs to slurm, .* none of them is left, say snakemake --unlock$"):
        remove_stale_lock(locked)
    assert left(locked) == 2

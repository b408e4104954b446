"""The workflow beside another Snakemake, without a home, with wrong clocks, and out of memory."""

import fcntl
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hostile_fixture import RUN, Hostile, make_hostile

pytestmark = pytest.mark.long

NOTHING = "Nothing to be done"
HOUR = 3600
SITE = """
import os, time
true, calls = time.time, 0

def jumping():
    global calls
    calls += 1
    return true() + float(os.environ["JUMP"]) * (calls % 2)

time.time = jumping
"""
"""Found by each Python as `sitecustomize`: the clock is off by some hours at every other look."""


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Hostile:
    return make_hostile(tmp_path_factory.mktemp("hostile"))


def both(one: Callable[[], tuple[int, str]], other: Callable[[], tuple[int, str]]) -> list[tuple[int, str]]:
    """What two calls return that run at once, the one that ended with 0 first."""
    ended: list[tuple[int, str]] = []
    threads = [threading.Thread(target=lambda call=call: ended.append(call())) for call in (one, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(ended)


def test_a_second_snakemake_on_the_same_study_is_refused(study: Hostile, tmp_path: Path) -> None:
    tried = study.copy(tmp_path / "study", "summarise")
    locks = tried.workflow.folder / ".snakemake/locks"

    def after_the_first() -> tuple[int, str]:
        # Two that start at once may both find no lock; then the study's own refuses one.
        end = time.monotonic() + 300
        while not any(locks.glob("*")) and time.monotonic() < end:
            time.sleep(0.01)
        return tried.snakemake()

    first, second = both(tried.snakemake, after_the_first)
    assert first[0] == 0, first[1]
    assert second[0] == 1 and "Directory cannot be locked" in second[1] and "Traceback" not in second[1], second[1]
    assert tried.outputs("summarise") == study.outputs("summarise")
    assert NOTHING in tried.snakemake()[1]


def test_a_second_snakemake_is_refused_when_the_locks_are_gone(study: Hostile, tmp_path: Path) -> None:
    """A Snakemake on another study removes all locks of the folder when it ends."""
    tried = study.copy(tmp_path / "study", "summarise")
    note = tried.results / "study_file"
    with note.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        code, output = tried.snakemake()
    assert code == 1 and "Traceback" not in output, output
    assert "results/hostile: another Snakemake runs this study; wait for its end, or stop it" in output
    assert "Finished jobid" not in output
    code, output = tried.snakemake()
    assert code == 0, output


def test_two_snakemakes_on_two_studies_do_not_meet(study: Hostile, tmp_path: Path) -> None:
    tried = study.copy(tmp_path / "study", "summarise")
    other = Hostile(tried.workflow, "other.yaml")
    text = (tried.workflow.folder / tried.file).read_text()
    (tried.workflow.folder / "other.yaml").write_text(text.replace("name: hostile", "name: other"))
    for code, output in both(tried.snakemake, other.snakemake):
        assert code == 0, output[-3000:]
    assert tried.outputs("summarise") == study.outputs("summarise")
    weights = tried.workflow.folder / "results" / "other" / RUN / "policy" / "model.safetensors"
    assert weights.read_bytes() == (study.results / RUN / "policy" / "model.safetensors").read_bytes()
    assert NOTHING in tried.snakemake()[1] and NOTHING in other.snakemake()[1]


def test_make_finds_a_cache_where_there_is_no_home(study: Hostile) -> None:
    """Plain Snakemake ends with a traceback there, before it reads our first line; its last line names the folder."""
    show = [*("make", "-s", "-f", "Makefile", "-f", "-"), "show"]
    rule = "show:\n\t@echo $$XDG_CACHE_HOME\n"
    shutil.copy(Path(__file__).parents[2] / "Makefile", study.workflow.folder)
    ended = subprocess.run(
        show,
        input=rule,
        cwd=study.workflow.folder,
        env=study.workflow.environment() | {"HOME": "/proc/nowhere"},
        capture_output=True,
        text=True,
        check=True,
    )
    cache = ended.stdout.strip()
    assert cache == str(study.workflow.folder / ".snakemake" / "cache")
    code, output = study.snakemake("--dry-run", HOME="/proc/nowhere", XDG_CACHE_HOME=cache)
    assert code == 0 and NOTHING in output, output
    code, output = study.snakemake("--dry-run", HOME="/proc/nowhere")
    assert code == 1 and "No such file or directory: '/proc/nowhere'" in output


# --- clocks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hours", [3, -3])
@pytest.mark.parametrize("job", ["train", "evaluate"])
def test_a_clock_that_jumps_changes_no_result(study: Hostile, tmp_path: Path, job: str, hours: int) -> None:
    tried = study.copy(tmp_path / "study", job)
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    path = f"{site}{os.pathsep}{tried.workflow.folder / 'workflow'}"
    ended = tried.run(job, JUMP=str(hours * HOUR), PYTHONPATH=path)
    assert ended.returncode == 0, ended.stderr
    assert tried.outputs(job) == study.outputs(job)


def set_times(folder: Path, when: Callable[[float], float]) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            modified = when(path.stat().st_mtime)
            os.utime(path, (modified, modified))


TIMES: dict[str, tuple[str, Callable[[float], float]]] = {
    "results of the future": ("results", lambda was: was + 1e7),
    "sources of 1970": ("workflow", lambda _: 0),
    "times of two seconds": (".", lambda was: was // 2 * 2),
}


@pytest.mark.parametrize("name", TIMES)
def test_times_of_files_make_nothing_stale(study: Hostile, tmp_path: Path, name: str) -> None:
    tried = study.copy(tmp_path / "study")
    folder, when = TIMES[name]
    set_times(tried.workflow.folder / folder, when)
    code, output = tried.snakemake("--dry-run")
    assert code == 0 and NOTHING in output, output[-3000:]


LATER: dict[str, tuple[str, Callable[[float], float]]] = {
    "results of 1970": ("results", lambda _: 0),
    "sources of the future": ("workflow", lambda _: time.time() + 1e7),
}


@pytest.mark.parametrize("name", LATER)
def test_older_results_are_made_again_or_kept_as_they_are(study: Hostile, tmp_path: Path, name: str) -> None:
    """Snakemake compares times, and contents of small files. Whatever it runs again ends with the same bits."""
    tried = study.copy(tmp_path / "study")
    folder, when = LATER[name]
    set_times(tried.workflow.folder / folder, when)
    code, output = tried.snakemake()
    assert code == 0, output[-3000:]
    for job in ("problems", "policy", "train", "evaluate"):
        assert tried.outputs(job) == study.outputs(job), job


# --- memory -------------------------------------------------------------------------------------------

CGROUP = Path("/sys/fs/cgroup/memory")
"""The controller of version 1: there the limit of one group needs no other set-up."""


@pytest.mark.skipif(not os.access(CGROUP, os.W_OK), reason="no group of processes may be made here")
def test_the_kernel_kills_a_job_that_takes_too_much(study: Hostile, tmp_path: Path) -> None:
    """Its group may take 200 MB. The real killer: the process ends with 137, and the run goes on when it has memory."""
    tried = study.copy(tmp_path / "study", "train")
    group = CGROUP / f"tailrl-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text("200M")
        enter = ["bash", "-c", f'echo $$ > {group}/cgroup.procs; "$@"; exit $?', "bash"]
        ended = tried.run("train", enter)
        assert ended.returncode == 137, (ended.returncode, ended.stderr)
        assert "oom_kill 0" not in (group / "memory.oom_control").read_text()
    finally:
        group.rmdir()
    ended = tried.run("train")
    assert ended.returncode == 0 and tried.outputs("train") == study.outputs("train")

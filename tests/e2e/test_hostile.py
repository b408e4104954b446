"""Jobs under limits, without folders and on full disks: one sentence or the right result, and then the right result."""

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hostile_fixture import POWERLESS, RUN, Hostile, can_mount, make_hostile, namespace, quoted

pytestmark = pytest.mark.long

NOWHERE = "/proc/nowhere"
CHECKPOINTS = f"results/hostile/{RUN}/checkpoints"


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Hostile:
    return make_hostile(tmp_path_factory.mktemp("hostile"))


@dataclass(frozen=True)
class Condition:
    """A job, what it meets, and its one sentence; without a sentence it ends as ever."""

    job: str
    limits: tuple[str, ...] = ()
    environment: dict[str, str | None] = field(default_factory=dict)
    sentence: str | None = None


def files(size: int) -> tuple[str, ...]:
    return ("prlimit", "--core=0", f"--fsize={size}")


TOO_LARGE = re.escape("File too large (ulimit -f)")
CONDITIONS = {
    "ulimit -f, problems": Condition(
        "problems", files(1000), sentence=f"results/hostile/data: a file could not be written: {TOO_LARGE}"
    ),
    "ulimit -f, base policy": Condition(
        "policy", files(40_000), sentence="results/hostile/base: the policy could not be written: .*File too large.*"
    ),
    "ulimit -f, a step's tokens": Condition(
        "train", files(2000), sentence=rf"{CHECKPOINTS}: the tokens of step 0 could not be kept \({TOO_LARGE}\): .*"
    ),
    "ulimit -f, a checkpoint": Condition(
        "train", files(80_000), sentence=rf"{CHECKPOINTS}: the checkpoint of step 1 could not be saved \({TOO_LARGE}.*"
    ),
    "ulimit -f, evaluation": Condition(
        "evaluate", files(500), sentence=rf"results/hostile/eval/naive.parts/\S+: could not be written: {TOO_LARGE}"
    ),
    "ulimit -f, report": Condition(
        "summarise", files(4000), sentence=f"results/hostile: a file could not be written: {TOO_LARGE}"
    ),
    "ulimit -v": Condition(
        "train", ("prlimit", "--as=1000000000"), sentence="ulimit -v allows 1000 MB of address space, .* 2000 MB: .*"
    ),
    "ulimit -n, training": Condition("train", ("prlimit", "--nofile=8")),
    "ulimit -n, evaluation": Condition("evaluate", ("prlimit", "--nofile=8")),
    "ulimit -n, summarise": Condition("summarise", ("prlimit", "--nofile=8")),
    "no HOME, training": Condition("train", environment={"HOME": None}),
    "HOME cannot be written, training": Condition("train", environment={"HOME": NOWHERE}),
    "HOME cannot be written, summarise": Condition("summarise", environment={"HOME": NOWHERE}),
    "TMPDIR is missing, training": Condition("train", environment={"TMPDIR": NOWHERE}),
    "TMPDIR is missing, evaluation": Condition("evaluate", environment={"TMPDIR": NOWHERE}),
}


def said(stderr: str) -> list[str]:
    """Our sentences on stderr, where no traceback may be, but those that show the first prompt."""
    assert "Traceback" not in stderr, stderr
    lines = [line.removeprefix("tailrl: ") for line in stderr.splitlines() if line.startswith("tailrl: ")]
    return [line for line in lines if not re.search(r": (the first prompt is '|its \d+ tokens are \[?\d)", line)]


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_job_that_meets_a_limit(study: Hostile, tmp_path: Path, name: str) -> None:
    """After its sentence nothing lies there that is taken for whole: the job, run again, leaves the same bits."""
    condition = CONDITIONS[name]
    tried, expected = study.copy(tmp_path / "study", condition.job), study.outputs(condition.job)
    ended = tried.run(condition.job, condition.limits, **condition.environment)
    if condition.sentence is not None:
        assert ended.returncode == 1, ended.stderr
        (sentence,) = said(ended.stderr)
        assert re.fullmatch(condition.sentence, sentence), sentence
        assert tried.outputs(condition.job) != expected
        ended = tried.run(condition.job)
    assert ended.returncode == 0, ended.stderr
    assert tried.outputs(condition.job) == expected and expected


# --- a disk that fills: a tmpfs of its own size, in a mount namespace -----------------------------------

DISKS = {
    "at the second checkpoint": (
        1,
        2300,
        rf"{CHECKPOINTS}: the checkpoint of step 2 could not be saved .*; step-00000001-.* is kept",
    ),
    "at the results": (
        3,
        1900,
        rf"{CHECKPOINTS}/finished-\w+: the results could not be written .*; the checkpoints are kept",
    ),
}


@pytest.mark.skipif(not can_mount(), reason="this machine lets nobody mount")
@pytest.mark.parametrize("when", DISKS)
def test_a_disk_that_fills_in_training(study: Hostile, tmp_path: Path, when: str) -> None:
    """With more space the run goes on from the checkpoint that was kept, to the same bits."""
    every, size, sentence = DISKS[when]
    tried = study.copy(tmp_path / "study", "train")
    text = (tried.workflow.folder / tried.file).read_text()
    (tried.workflow.folder / tried.file).write_text(text.replace("checkpoint_every: 1", f"checkpoint_every: {every}"))
    run, outside = tried.results / RUN, tmp_path / "outside"
    run.mkdir(parents=True)
    script = f"""mount -t tmpfs -o size={size}k none {quoted([run])}
    "$@" 2> first && exit 9; mount -o remount,size=100m {quoted([run])}
    "$@" 2> second; cp -r {quoted([run, outside])}"""
    ended = tried.run("train", namespace(script))
    first, second = ((tried.workflow.folder / name).read_text() for name in ("first", "second"))
    assert ended.returncode == 0, (ended.stderr, first, second)
    assert re.fullmatch(sentence, said(first)[-1]), first
    assert "the run goes on from step" in said(second)[0]
    run.rmdir()
    outside.rename(run)
    assert tried.outputs("train") == study.outputs("train")


@pytest.mark.skipif(not can_mount(), reason="this machine lets nobody mount")
@pytest.mark.skipif(sys.prefix.startswith("/tmp/"), reason="this environment lies in /tmp, which the test hides")
@pytest.mark.parametrize("job", ["train", "evaluate", "summarise"])
def test_no_folder_for_temporary_files(study: Hostile, tmp_path: Path, job: str) -> None:
    """/tmp, /var/tmp and /dev/shm can be read alone."""
    tried = study.copy(tmp_path / "study", job)
    script = f"""mount --bind {quoted([tried.workflow.folder])} /mnt; cd /mnt
    for folder in /tmp /var/tmp /dev/shm; do mount -t tmpfs -o ro none $folder; done
    PYTHONPATH=/mnt/workflow TMPDIR= "$@" """
    ended = tried.run(job, namespace(script))
    assert ended.returncode == 0, ended.stderr
    assert tried.outputs(job) == study.outputs(job)


# --- rights -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["results", "results/hostile", "results/hostile/eval", ".snakemake"])
def test_a_folder_that_cannot_be_written_stops_before_any_job(study: Hostile, tmp_path: Path, place: str) -> None:
    tried = study.copy(tmp_path / "study", "summarise")
    folder = tried.workflow.folder / place
    inside = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    for path in inside:
        path.chmod(0o555)
    code, output = tried.snakemake(under=POWERLESS)
    for path in inside:
        path.chmod(0o755)
    where = "results/hostile" if place == "results" else place
    assert code == 1 and f"\n{where}: results cannot be written there\n" in output, output
    assert "Traceback" not in output and "Finished jobid" not in output


@pytest.mark.parametrize("name", [f"{RUN}/metrics.jsonl", f"{RUN}/manifest.json", "eval/naive.json"])
def test_a_result_that_cannot_be_read(study: Hostile, tmp_path: Path, name: str) -> None:
    tried = study.copy(tmp_path / "study", "summarise")
    (tried.results / name).chmod(0)
    ended = tried.run("summarise", POWERLESS)
    assert ended.returncode == 1
    assert said(ended.stderr) == [f"results/hostile/{name}: cannot be read: Permission denied"]

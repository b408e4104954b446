"""Which GPUs a job may use, and that no two jobs take the same one. No GPU is needed: they are numbers."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tailrl.runtime import devices
from tailrl.runtime.errors import StudyError

JOB = "import sys, tailrl.runtime.devices as d; print(*d.take(int(sys.argv[1])), flush=True); sys.stdin.read()"


class Jobs:
    """Processes that take GPUs and hold them."""

    def __init__(self, folder: Path, visible: str) -> None:
        self.environment = os.environ | {"TMPDIR": str(folder), "CUDA_VISIBLE_DEVICES": visible}
        self.environment.pop("SLURM_JOB_ID", None)
        self.started: list[subprocess.Popen[str]] = []

    def start(self, count: int, **variables: str) -> "subprocess.Popen[str]":
        job = subprocess.Popen(
            [sys.executable, "-c", JOB, str(count)],
            env=self.environment | variables,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.started.append(job)
        return job


def first_line(job: "subprocess.Popen[str]", stream: str = "stdout") -> str:
    return str(getattr(job, stream).readline().rstrip())


def test_jobs_take_gpus_of_their_own_and_a_killed_one_frees_its(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path, "2,GPU-ab,7")
    try:
        first, second = jobs.start(1), jobs.start(2)
        taken = {device for job in (first, second) for device in first_line(job).split()}
        assert taken == {"2", "GPU-ab", "7"}
        third = jobs.start(2)
        assert first_line(third, "stderr") == ("tailrl: waiting for 2 of the GPUs 2, GPU-ab, 7, which other jobs use")
        elsewhere = jobs.start(3, SLURM_JOB_ID="99")
        assert first_line(elsewhere) == "2 GPU-ab 7", "another allocation's are other GPUs"
        first.send_signal(signal.SIGKILL)
        first.wait()
        fourth = jobs.start(1)
        alone = first_line(fourth)
        assert alone in taken, "the third waits for two, and holds none meanwhile"
        second.send_signal(signal.SIGKILL)
        assert set(first_line(third).split()) == taken - {alone}
    finally:
        for job in jobs.started:
            job.kill()
            job.communicate()


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("0,1", ["0", "1"]),
        (" 3 , GPU-1a", ["3", "GPU-1a"]),
        ("", []),
        ("-1", []),
        ("0,-1,1", ["0"]),
        ("NoDevFiles", []),
    ],
)
def test_the_variable_says_what_is_visible(named: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert devices.visible() == expected


@pytest.mark.parametrize(
    ("torch", "expected"), [("2.13.0", ["0", "1"]), ("2.13.0+cu130", ["0", "1"]), ("2.13.0+cpu", [])]
)
def test_without_the_variable_all_are(
    torch: str, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But with a torch for CPUs jobs are limited by cores alone."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "NODES", tmp_path)
    monkeypatch.setattr(devices, "version", lambda _: torch)
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert devices.visible() == expected


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(StudyError, match=r"^8 GPUs are needed, one a rank, and 2 are visible here"):
        devices.take(8)


def test_without_a_gpu_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices, "NODES", tmp_path)
    assert devices.take(2) == []
    assert "CUDA_VISIBLE_DEVICES" not in os.environ

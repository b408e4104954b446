"""The ranks of a job are started together, end together, and leave one code and one sentence behind."""

import ipaddress
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from cases_fixture import rest_long
from step_fixture import run_of

from tailrl.runtime.launch import run_beside
from tailrl.tasks.problem import Problem, write_problems

# Launches each of the scripts that it is given as two ranks, and says what became of it.
LAUNCH = """
import json, sys
from tailrl.runtime.errors import StudyError
from tailrl.runtime.launch import launch

for name, script in json.loads(sys.argv[1]).items():
    try:
        launch(2, [sys.executable, "-c", script])
        outcome = "ended"
    except (StudyError, SystemExit) as error:
        outcome = f"{type(error).__name__} {error}"
    print(name, outcome, sep=": ", file=sys.stderr)
"""
AFTER = "import os, sys, time\nrank = os.environ['RANK']\n"
WAIT = "rank == '{}' and time.sleep(600)\n"
TELL = "from tailrl.runtime.launch import tell_launcher\n"
TELL += "tell_launcher('a.yaml: rank ' + rank + ' found a typo')\nsys.exit(1)\n"
TOLD = """
def told():
    from pathlib import Path
    while not (Path(os.environ['TORCHELASTIC_ERROR_FILE']).parents[1] / '1' / 'error.json').exists():
        time.sleep(0.01)
"""
KILLED = """
from pathlib import Path
import psutil
victim = Path(os.environ['TORCHELASTIC_ERROR_FILE']).parents[1] / 'victim'
if rank == '1':
    victim.with_suffix('.part').write_text(str(os.getpid()))
    victim.with_suffix('.part').rename(victim)
    os.kill(os.getpid(), 9)
while not victim.exists():
    time.sleep(0.01)
try:
    while psutil.Process(int(victim.read_text())).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
except psutil.NoSuchProcess:
    pass
sys.exit(1)
"""
SCRIPTS = {
    "all is well": "sys.stdout.write(f\"{rank} {os.environ['LOCAL_RANK']} {os.environ['WORLD_SIZE']}\\n\")\n",
    "one ends": WAIT.format(0) + "sys.exit(70)\n",
    # The one that waits for it gets an error from gloo, and ends with 1.
    "one is killed": KILLED,
    "one is asked to end": WAIT.format(0) + "os.kill(os.getpid(), 15)\ntime.sleep(600)\n",
    "one has found a typo": WAIT.format(0) + TELL,
    "one has found a typo, another one fails for it": TOLD + "rank == '1' or told() or sys.exit(1)\n" + TELL,
    "both have found a typo": "rank = '0'\n" + TELL,
}
OUTCOMES = {
    "all is well": ["all is well: ended"],
    "one ends": ["tailrl: rank 1 of 2 ended with 70", "one ends: SystemExit 70"],
    "one is killed": ["tailrl: rank 1 of 2 ended with -9", "one is killed: SystemExit 137"],
    "one is asked to end": ["tailrl: rank 1 of 2 ended with -15", "one is asked to end: SystemExit 143"],
    "one has found a typo": ["one has found a typo: StudyError a.yaml: rank 1 found a typo"],
    "one has found a typo, another one fails for it": [
        "one has found a typo, another one fails for it: StudyError a.yaml: rank 1 found a typo"
    ],
    "both have found a typo": ["both have found a typo: StudyError a.yaml: rank 0 found a typo"],
}
FEW = ("all is well", "one ends", "one has found a typo")


@pytest.mark.parametrize("names", [FEW, pytest.param(tuple(SCRIPTS), marks=pytest.mark.slow)], ids=["few", "all"])
def test_ranks_end_as_one_job(names: tuple[str, ...]) -> None:
    """A rank that waits for a failed one is ended too; a killed process differs from one that reported why."""
    scripts = json.dumps({name: AFTER + SCRIPTS[name] for name in names})
    command = [sys.executable, "-c", LAUNCH, scripts]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert ended.stderr.splitlines() == [line for name in names for line in OUTCOMES[name]]
    assert sorted(ended.stdout.splitlines()) == ["0 0 2", "1 1 2"]


def test_a_job_that_is_asked_to_stop_ends_by_the_signal(tmp_path: Path) -> None:
    """As one process does: a shell that waits for it then stops too, and does not start it again."""
    script = f"import pathlib, time\npathlib.Path({str(tmp_path / 'runs')!r}).touch()\ntime.sleep(600)\n"
    command = [sys.executable, "-c", LAUNCH, json.dumps({"waits": script})]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    while not (tmp_path / "runs").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=300) == -signal.SIGINT


def test_ranks_end_with_a_killed_launcher(tmp_path: Path) -> None:
    """Else they would train on beside the ranks of the next try."""
    script = "import os, pathlib, sys, time\n"
    script += f"(pathlib.Path({str(tmp_path)!r}) / str(os.getpid())).touch()\ntime.sleep(600)\n"
    process = subprocess.Popen([sys.executable, "-c", LAUNCH, json.dumps({"waits": script})], start_new_session=True)
    while len(ranks := [int(file.name) for file in tmp_path.iterdir()]) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    for rank in ranks:
        with suppress(psutil.NoSuchProcess):
            while psutil.Process(rank).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)


def tailrl(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from tailrl.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def train_options(folder: Path, policy: Path, problems: list[Problem], ranks: int, **sampler: Any) -> list[str]:
    """The command line of a run of two steps; its results are in `folder / "out"`."""
    write_problems(problems[:4], folder / "problems.jsonl")
    run = run_of({"sampler": sampler}, steps=2, temperature=1.0)
    options: dict[str, Any] = {
        "--settings": run.model_dump_json(),
        "--seed": 3,
        "--policy": policy,
        "--problems": folder / "problems.jsonl",
        "--out": folder / "out",
        "--wandb": folder,
        "--ranks": ranks,
    }
    return ["job", "train", *(str(part) for option in options.items() for part in option)]


@pytest.mark.slow  # `test_ranks_runs.py` trains on two ranks, and the tests above launch two
def test_the_command_trains_with_two_ranks(tmp_path: Path, policy_folder: Path, problems: list[Problem]) -> None:
    """From the command line to the results; each rank is a process that knows nothing of this one."""
    ended = tailrl(*train_options(tmp_path, policy_folder, problems, 2, engine="transformers"))
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("test seed 3  step 2/2") == 1
    record = json.loads((tmp_path / "out" / "run.json").read_text(encoding="utf-8"))
    assert record["ranks"] == 2 and "ranks" not in record["settings"]["training"]
    lines = (tmp_path / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["train/step"] for line in lines] == [0, 1]
    assert json.loads(lines[-1])["train/grad_norm"] is not None
    assert {"README.md", "model.safetensors"} <= {file.name for file in (tmp_path / "out" / "policy").iterdir()}
    assert not list((tmp_path / "out" / "checkpoints").glob("step-*"))


# --- who can reach the ranks ---------------------------------------------------------------------------

MEET = """
import sys, time
from pathlib import Path
from tailrl.runtime import distributed
distributed.join()
distributed.mesh()
assert distributed.gathered(distributed.number()) == [0, 1]
folder = Path(sys.argv[1])
(folder / f"met{distributed.number()}").touch()
while not (folder / "seen").exists():
    time.sleep(0.01)
"""
NOBODY = 65534  # a user that can write where everyone can


def listening(process: psutil.Process) -> set[str]:
    """The addresses at which a process and its descendants take connections or datagrams from a network."""
    found: set[str] = set()
    for one in (process, *process.children(recursive=True)):
        try:
            sockets = one.net_connections("inet")
        except psutil.NoSuchProcess:
            continue
        found |= {socket.laddr.ip for socket in sockets if socket.laddr and not socket.raddr}
    return found


def beyond_loopback(addresses: set[str]) -> set[str]:
    return {address for address in addresses if not ipaddress.ip_address(address).is_loopback}


@pytest.fixture
def shared() -> Iterator[Path]:
    """A temporary directory in which every user may write, as /tmp."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o1777)
        yield Path(name)


@pytest.mark.slow
def test_ranks_meet_where_no_stranger_reaches(shared: Path) -> None:
    """No port beyond loopback, of the launcher neither; the store and the key are files in a folder for this user."""
    command = [sys.executable, "-c", MEET, str(shared)]
    script = f"from tailrl.runtime.launch import launch\nlaunch(2, {command!r})\n"
    environment = os.environ | {"TMPDIR": str(shared), "GLOO_SOCKET_IFNAME": "eth0", "MASTER_ADDR": "192.0.2.1"}
    process = subprocess.Popen([sys.executable, "-c", script], env=environment, start_new_session=True)
    try:
        while not all((shared / f"met{rank}").exists() for rank in range(2)):
            assert process.poll() is None
            time.sleep(0.01)
        addresses = listening(psutil.Process(process.pid))
        assert addresses, "gloo listens somewhere"
        assert beyond_loopback(addresses) == set()
        (folder,) = shared.glob("tailrl-ranks-*")
        assert {"key", "store"} <= {file.name for file in folder.iterdir()}
        assert (stat.S_IMODE(folder.stat().st_mode), folder.stat().st_uid) == (0o700, os.getuid())
        if os.getuid() == 0:
            as_stranger: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": [], "cwd": "/"}
            for name in ("store", "key"):
                script = f"echo x >> {folder / name}"
                write = subprocess.run(["sh", "-c", script], check=False, stderr=subprocess.PIPE, **as_stranger)
                assert b"denied" in write.stderr
            subprocess.run(["touch", str(shared / "by-a-stranger")], check=True, **as_stranger)
    finally:
        (shared / "seen").touch()
        code = process.wait(timeout=60)
    assert code == 0 and not folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "sampler"),
    [
        (2, {"engine": "transformers"}),
        pytest.param(1, {"engine": "vllm"}, marks=pytest.mark.vllm),
        pytest.param(2, {"engine": "vllm", "dtype": "float32", "tensor_parallel": 2}, marks=pytest.mark.vllm),
    ],
    ids=["two ranks", "an engine", "an engine of two ranks"],
)
def test_nothing_listens_beyond_loopback_while_a_run_trains(
    ranks: int, sampler: dict[str, Any], tmp_path: Path, policy_folder: Path, problems: list[Problem]
) -> None:
    """Of the launcher, the ranks and all that these start, from the first to the last moment."""
    options = train_options(tmp_path, policy_folder, problems, ranks, **sampler)
    command = [sys.executable, "-c", "from tailrl.cli import main; main()", *options]
    with subprocess.Popen(command, start_new_session=True) as process:
        addresses: set[str] = set()
        while process.poll() is None:
            addresses |= listening(psutil.Process(process.pid))
            time.sleep(0.05)
    assert process.returncode == 0
    assert addresses and beyond_loopback(addresses) == set()


def test_a_stray_error_file_swallows_no_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is left over in a shell that a rank of another program started."""
    (tmp_path / "error.json").write_text("of another program", encoding="utf-8")
    for name, value in {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"), "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    ended = tailrl("check", "nowhere.yaml")
    assert (ended.returncode, ended.stderr) == (
        1,
        "tailrl: nowhere.yaml: cannot be read as YAML: No such file or directory\n",
    )
    assert (tmp_path / "error.json").read_text(encoding="utf-8") == "of another program"


@pytest.mark.parametrize("count", rest_long(("0",), ("0", "-1", "two", "1.5")))
def test_a_number_of_ranks_is_a_number(count: str) -> None:
    ended = tailrl("job", "train", f"--ranks={count}")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert (
        f"'--ranks': not a whole number from 1 to 1000000: '{count}'" in ended.stderr
        and "\n" not in ended.stderr.strip()
    )


BESIDE = """
import os, sys
from pathlib import Path
from tailrl.runtime.launch import run_beside

script = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
run_beside([sys.executable, "-c", script], dict(os.environ), Path(sys.argv[1]), lambda: None)
"""


def test_a_program_of_another_environment(tmp_path: Path) -> None:
    output, looks = tmp_path / "output.txt", []
    output.write_text("before\n")
    words = [sys.executable, "-c", "import os, sys; print(os.environ['MARK']); sys.exit(3)"]
    code = run_beside(words, {**os.environ, "MARK": "here"}, output, lambda: looks.append(output.read_text()))
    assert code == 3 and looks[-1] == "before\nhere\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_program_of_another_environment_ends_with_its_job(tmp_path: Path, number: int) -> None:
    output = tmp_path / "output.txt"
    with subprocess.Popen([sys.executable, "-c", BESIDE, str(output)]) as job:
        while not (output.is_file() and output.read_text().strip()):
            assert job.poll() is None
            time.sleep(0.02)
        program = psutil.Process(int(output.read_text()))
        job.send_signal(number)
        assert job.wait() == -number
        gone, _ = psutil.wait_procs([program], timeout=60)
        assert gone

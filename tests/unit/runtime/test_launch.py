"""The ranks of a job are started together, end together, and leave one code and one sentence behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from slow_cases import slow_but
from step_fixture import run_of

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
    "one has found a typo": WAIT.format(0) + TELL,
    "one has found a typo, another one fails for it": TOLD + "rank == '1' or told() or sys.exit(1)\n" + TELL,
    "both have found a typo": "rank = '0'\n" + TELL,
}
OUTCOMES = {
    "all is well": ["all is well: ended"],
    "one ends": ["tailrl: rank 1 of 2 ended with 70", "one ends: SystemExit 70"],
    "one is killed": ["tailrl: rank 1 of 2 ended with -9", "one is killed: SystemExit 137"],
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


def tailrl(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from tailrl.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow  # `test_ranks_runs.py` trains on two ranks, and the tests above launch two
def test_the_command_trains_with_two_ranks(tmp_path: Path, policy_folder: Path, problems: list[Problem]) -> None:
    """From the command line to the results; each rank is a process that knows nothing of this one."""
    write_problems(problems[:4], tmp_path / "problems.jsonl")
    run = run_of({"sampler": {"engine": "transformers"}}, steps=2, temperature=1.0)
    options: dict[str, Any] = {
        "--settings": run.model_dump_json(),
        "--seed": 3,
        "--policy": policy_folder,
        "--problems": tmp_path / "problems.jsonl",
        "--out": tmp_path / "out",
        "--wandb": tmp_path,
        "--ranks": 2,
    }
    ended = tailrl("job", "train", *(str(part) for option in options.items() for part in option))
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("test seed 3  step 2/2") == 1
    record = json.loads((tmp_path / "out" / "run.json").read_text(encoding="utf-8"))
    assert record["ranks"] == 2 and "ranks" not in record["settings"]["training"]
    lines = (tmp_path / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["train/step"] for line in lines] == [0, 1]
    assert json.loads(lines[-1])["train/grad_norm"] is not None
    assert {"README.md", "model.safetensors"} <= {file.name for file in (tmp_path / "out" / "policy").iterdir()}
    assert not list((tmp_path / "out" / "checkpoints").glob("step-*"))


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


@pytest.mark.parametrize("count", slow_but(("0",), ("0", "-1", "two", "1.5")))
def test_a_number_of_ranks_is_a_number(count: str) -> None:
    ended = tailrl("job", "train", f"--ranks={count}")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert f"'--ranks': not a whole number from 1 on: '{count}'" in ended.stderr and "\n" not in ended.stderr.strip()

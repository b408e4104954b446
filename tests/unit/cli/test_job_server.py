"""Jobs that are forks of a server: they are like processes of their own, and do not outlive their clients."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from outcome import content
from step_fixture import run_of

from tailrl.cli import job_client
from tailrl.cli.job_client import TAKEN
from tailrl.cli.job_server import MODULES, _is_wanted
from tailrl.config.jobs import Evaluation
from tailrl.tasks.problem import Problem, write_problems

PACKAGE = Path(job_client.__file__).parents[1]
COPIED = (
    *("__init__", "cli/__init__", "cli/job_client", "cli/job_server", "cli/job_title"),
    *("runtime/__init__", "runtime/imports"),
)
JOB = """
import atexit, fcntl, json, os, resource, sys, threading, time
import transformers.models.llama.modeling_llama as library
def run():
    does = json.loads(sys.argv[3])
    file = open("held", "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB if does.get("alone") else fcntl.LOCK_SH)
    except BlockingIOError:
        sys.exit(7)
    print(json.dumps({
        "process": os.getpid(), "server": library.PROCESS, "argv": sys.argv, "path": sys.path, "folder": os.getcwd(),
        "environment": dict(os.environ), "limit": resource.getrlimit(resource.RLIMIT_NOFILE), "read": sys.stdin.read(),
    }), flush=True)
    time.sleep(does.get("sleeps", 0))
    if "raises" in does:
        raise ValueError(does["raises"])
    if "signal" in does:
        os.kill(os.getpid(), does["signal"])
    if "code" in does:
        sys.exit(does["code"])
    atexit.register(print, "at exit")
    threading.Timer(0.1, print, ["thread"]).start()
"""
LIBRARY = "transformers/models/llama/modeling_llama.py"
PATIENCE = 60.0
"""Seconds for what takes milliseconds on an idle machine."""
LONG = 600


class Study:
    """A folder with this package, but for its commands: a job says what it is, and does as it is told."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        """The code is in a folder `code`; a process that sleeps is its Snakemake."""
        self.folder, self.stack = folder, stack
        for name in COPIED:
            self.write(f"tailrl/{name}.py", (PACKAGE / f"{name}.py").read_text(encoding="utf-8"))
        self.write("tailrl/cli/command_line.py", JOB)
        for module in MODULES["torch"]:
            *packages, _ = parts = module.split(".")
            for place, _ in enumerate(packages, start=1):
                self.write(f"{'/'.join(parts[:place])}/__init__.py", "")
            self.write(f"{'/'.join(parts)}.py", "import os\nPROCESS = os.getpid()")
        self.snakemake = subprocess.Popen(["sleep", str(LONG)])
        stack.callback(self.end_snakemake)
        # Not in `folder`: a socket's path holds 107 bytes.
        self.private = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        offer = f"{self.snakemake.pid} torch {self.private}"
        self.environment = {"PYTHONPATH": str(folder / "code"), job_client.OFFER: offer}

    def write(self, name: str, text: str) -> None:
        (self.folder / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / "code" / name).write_text(text, encoding="utf-8")

    def end_snakemake(self) -> None:
        self.snakemake.kill()
        self.snakemake.wait()

    def start(
        self,
        *words: str,
        job: str = "train",
        shell: str = "",
        variables: dict[str, str] | None = None,
        patience: str = "",
        **does: Any,
    ) -> "Client":
        # A test in the background of a shell ignores the signal.
        script = f"{patience}import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        script += "import sys; sys.argv[0] = 'tailrl'; from tailrl.cli import main; main()"
        client = subprocess.Popen(
            [
                "bash",
                "-c",
                f'{shell} exec "$@"',
                "bash",
                sys.executable,
                "-c",
                script,
                "job",
                job,
                json.dumps(does),
                *words,
            ],
            cwd=self.folder,
            env=os.environ | self.environment | (variables or {}),
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.stack.callback(client.communicate)
        self.stack.callback(client.kill)
        return Client(client)


class Client:
    """A client, and what its job said of itself."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def said(self) -> dict[str, Any]:
        """Waits for the job's first line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.end()
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> tuple[int, str]:
        """The exit code, and what was said on stderr."""
        _, errors = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, errors


@pytest.fixture
def study(tmp_path: Path) -> Iterator[Study]:
    with ExitStack() as stack:
        yield Study(tmp_path, stack)


def soon(holds: Callable[[], bool]) -> bool:
    """Waits until something holds; False where it does not become so."""
    deadline = time.monotonic() + PATIENCE
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


def gone(process: int) -> bool:
    """Whether a process ends soon."""

    def ended() -> bool:
        try:
            return psutil.Process(process).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return soon(ended)


def forwarding(client: Client) -> bool:
    """Whether a client soon waits for its job, and so forwards signals: only then has it this title."""
    return soon(lambda: "tailrl-client" in command(client.process.pid))


def command(process: int) -> list[str]:
    return [word for word in Path(f"/proc/{process}/cmdline").read_text(encoding="utf-8").split("\0") if word]


def test_a_fork_is_as_a_process_of_its_own(study: Study) -> None:
    served, plain = (
        study.start("--out", "a", shell=f"{before} cd code;").said() for before in ("", "ulimit -v 100000000;")
    )
    assert plain["server"] == plain["process"] != served["process"] != served["server"]
    for changes in ("process", "server"):
        del served[changes], plain[changes]
    assert served == plain


def test_clients_at_once_share_a_server(study: Study) -> None:
    clients = [study.start("--out", str(number), sleeps=1) for number in range(4)]
    said = [client.said() for client in clients]
    assert [client.end() for client in clients] == [(0, "")] * 4
    assert len({one["server"] for one in said}) == 1
    assert len({one["process"] for one in said} | {said[0]["server"]}) == 5


@pytest.mark.parametrize(
    ("does", "code", "words"),
    [({"code": 3}, 3, ""), ({"signal": 11}, -11, ""), ({"raises": "words"}, 1, "ValueError: words\n")],
)
def test_the_client_ends_as_its_job(study: Study, does: dict[str, Any], code: int, words: str) -> None:
    client = study.start(**does)
    said = client.said()
    assert said["server"] != said["process"]
    ended, errors = client.end()
    assert (ended, errors[-len(words) :] if words else errors) == (code, words)


def test_a_job_ends_as_python_does(study: Study) -> None:
    client = study.start()
    client.said()
    assert client.process.communicate(timeout=PATIENCE) == ("thread\nat exit\n", "")
    assert client.process.returncode == 0


@pytest.mark.parametrize(("number", "words"), [(signal.SIGINT, "KeyboardInterrupt\n"), (signal.SIGTERM, "")])
def test_signals_reach_the_job(study: Study, number: int, words: str) -> None:
    client = study.start(sleeps=LONG)
    job = client.said()["process"]
    assert forwarding(client)
    client.process.send_signal(number)
    code, errors = client.end()
    assert (code, errors.endswith(words)) == (-number, True)
    assert gone(job)


def test_a_stopped_client_stops_its_job(study: Study) -> None:
    client = study.start(sleeps=LONG)
    job = psutil.Process(client.said()["process"])
    assert forwarding(client)
    for number, stopped in ((signal.SIGTSTP, True), (signal.SIGCONT, False)):
        client.process.send_signal(number)
        assert soon(lambda stopped=stopped: (job.status() == psutil.STATUS_STOPPED) == stopped)  # type: ignore[misc]


def test_a_killed_client_takes_its_job_along(study: Study) -> None:
    """At once: the same command, started again, finds nothing of it."""
    client = study.start(sleeps=LONG, alone=True)
    first = client.said()
    client.process.kill()
    client.process.wait()
    again = study.start(sleeps=LONG, alone=True).said()
    assert gone(first["process"])
    assert again["server"] == first["server"] != again["process"]


def test_a_killed_job_or_guardian_kills_the_client(study: Study) -> None:
    for of_the_job in (lambda job: job, lambda job: psutil.Process(job).ppid()):
        client = study.start(sleeps=LONG)
        job = client.said()["process"]
        assert forwarding(client)
        os.kill(of_the_job(job), signal.SIGKILL)
        assert client.end() == (-signal.SIGKILL, "")
        assert gone(job)


@pytest.mark.slow  # `test_a_server_ends_with_its_snakemake_and_jobs_go_on`
def test_a_killed_server_ends_no_job_and_is_replaced(study: Study) -> None:
    client = study.start(sleeps=2, code=4)
    first = client.said()
    os.kill(first["server"], signal.SIGKILL)
    assert gone(first["server"])
    second = study.start().said()
    assert second["server"] not in (first["server"], second["process"])
    assert client.end() == (4, "")


@pytest.mark.slow
def test_a_server_ends_with_its_snakemake_and_jobs_go_on(study: Study) -> None:
    client = study.start(sleeps=2, code=4)
    first = client.said()
    study.end_snakemake()
    assert gone(first["server"])
    later = study.start().said()
    assert later["server"] == later["process"]
    assert client.end() == (4, "")


@pytest.mark.slow
def test_a_server_is_for_clients_that_are_alike(study: Study) -> None:
    """In environment, limits, priority and files of the package: a fork never runs code that was edited."""
    first = study.start().said()
    others = [
        study.start(variables={"VLLM_X": "1"}).said(),
        study.start(shell="ulimit -Sn 100;").said(),
        study.start(shell="renice -n 15 $$ > /dev/null;").said(),
    ]
    # Of another length: Python takes a file of the same length and second for the one that it compiled.
    study.write("tailrl/cli/command_line.py", JOB.replace('"folder"', '"was edited"'))
    edited = study.start().said()
    every = [first, *others, edited]
    assert len({one["server"] for one in every}) == 5
    assert {one["server"] for one in every}.isdisjoint(one["process"] for one in every)
    assert others[0]["environment"]["VLLM_X"] == "1"
    assert others[1]["limit"][0] == 100
    assert "was edited" in edited


@pytest.mark.parametrize(
    ("library", "shell", "words"),
    [
        ("PROCESS = os.getpid()", "ulimit -v 100000000;", ()),
        ("PROCESS = os.getpid()", "exec 2>&-;", ()),
        (
            "import threading as t\nPROCESS = os.getpid()\nt.Thread(target=t.Event().wait, daemon=True).start()",
            "",
            (),
        ),
        ("import sys\nPROCESS = os.getpid()\nif 'job_server' in sys.argv[0]: raise OSError", "", ()),
    ],
    ids=["limited memory", "a closed file", "a thread", "no import"],
)
def test_where_a_fork_would_not_do_the_job_runs_in_its_own_process(
    study: Study, library: str, shell: str, words: tuple[str, ...]
) -> None:
    study.write(LIBRARY, f"import os\n{library}")
    client = study.start(*words, shell=shell, code=5)
    said = client.said()
    assert said["server"] == said["process"] == client.process.pid
    assert client.end() == (5, "")


def test_a_server_imports_while_the_job_before_the_others_runs(study: Study) -> None:
    """That job itself runs in its own process, and a second one of its kind finds the server there."""
    for _ in range(2):
        said = study.start(job="policy").said()
        assert said["server"] == said["process"]
    already = psutil.pids()
    assert study.start().said()["server"] in already


def test_no_stranger_reaches_a_server(study: Study) -> None:
    """Each server's only address is a socket in the folder that Snakemake made for this user."""
    study.start().said()
    (address,) = (file for file in study.private.iterdir() if file.is_socket())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(str(address))
    if os.getuid() == 0:
        script = "import socket, sys; socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(sys.argv[1])"
        nobody: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": [], "cwd": "/"}
        command = ["/usr/bin/env", "-i", "python3", "-c", script, str(address)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, **nobody)
        assert "PermissionError" in ended.stderr
    study.end_snakemake()
    assert soon(lambda: not study.private.exists())
    study.private.mkdir()  # for the fixture's end


def test_silent_clients_delay_no_other(study: Study) -> None:
    """Clients that connect and say nothing, or half of a request, and go on waiting."""
    study.start().said()
    (address,) = (file for file in study.private.iterdir() if file.is_socket())
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(30)]
    for number, client in enumerate(silent):
        study.stack.enter_context(client)
        client.connect(str(address))
        if number % 2:
            client.send(b'{"argv": ["tailrl"')
    client = study.start(code=3)
    said = client.said()
    assert said["server"] != said["process"]
    assert client.end() == (3, "")


@pytest.mark.slow
def test_a_client_gives_up_and_its_job_runs_once(study: Study) -> None:
    """A server that is stopped answers nobody. When it goes on, it forks no job for a client that gave up."""
    first = study.start().said()
    os.kill(first["server"], signal.SIGSTOP)
    patience = "import tailrl.cli.job_client as client; client.PATIENCE = 0.5; "
    client = study.start(patience=patience, code=5, alone=True, sleeps=2)
    said = client.said()
    assert said["server"] == said["process"] == client.process.pid
    os.kill(first["server"], signal.SIGCONT)
    assert study.start().said()["server"] == first["server"], "it has seen the request of the client that gave up"
    assert client.process.communicate(timeout=PATIENCE) == ("", "")
    assert client.process.returncode == 5


@pytest.mark.parametrize("answer", [TAKEN, b"", None], ids=["waits", "has gone", "went long ago"])
def test_a_job_starts_by_its_clients_answer(answer: bytes | None) -> None:
    """A client that gave up runs the job itself: two would write the same files."""
    guardian, client = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with guardian, client, ThreadPoolExecutor() as thread:
        if answer is None:
            client.close()
        wanted = thread.submit(_is_wanted, guardian)
        if answer is not None:
            assert client.recv(1) == TAKEN
            client.send(answer) if answer else client.close()
        assert wanted.result(PATIENCE) == (answer == TAKEN)


@pytest.mark.slow  # the tiny study's jobs fork; where one could not, it would have its own process
def test_the_libraries_start_no_thread() -> None:
    """Else no job would fork."""
    script = "import os; from tailrl.cli.job_server import import_all; import_all(['torch']); "
    script += "print(len(os.listdir('/proc/self/task')))"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout.split()[-1] == "1"


def test_the_job_alone_has_the_name_of_its_command(study: Study) -> None:
    """Whoever looks at the machine's processes sees which job each is."""
    client = study.start("--out", "somewhere", sleeps=LONG)
    said = client.said()
    assert os.getsid(said["process"]) == said["process"], "a signal to its group reaches no other job"
    words = ["tailrl", "job", "train", json.dumps({"sleeps": LONG}), "--out", "somewhere"]
    for process, title in (
        (said["process"], words),
        (said["server"], ["tailrl-server"]),
        (psutil.Process(said["process"]).ppid(), ["tailrl-guardian"]),
        (client.process.pid, ["tailrl-client"]),
    ):
        assert soon(lambda process=process, title=title: command(process)[1:] == title), title  # type: ignore[misc]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["exact", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.long])])
def test_results_have_the_same_bits_alone_and_forked(
    engine: str, tmp_path: Path, policy_folder: Path, problems: list[Problem]
) -> None:
    sampler = {"engine": engine, "dtype": "float32"}
    arm = {"vocabulary": {"rule": "min_p", "rho": 0.01}, "sampler": sampler}
    run = run_of(arm, steps=3).model_dump_json()
    held_out = Evaluation.model_validate({"samples": 2, "max_new_tokens": 8, "sampler": sampler}).model_dump_json()
    write_problems(problems[:5], tmp_path / "problems.jsonl")
    given = ("--problems", str(tmp_path / "problems.jsonl"))

    def call(out: Path, *words: str, offer: dict[str, str]) -> int:
        command = [sys.executable, "-c", "from tailrl.cli import main; main()", "job", *words, *given]
        environment = os.environ | {"WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"} | offer
        with (out / "log").open("w") as log:
            client = subprocess.Popen(command, env=environment, stderr=log)
        assert client.wait() == 0, (out / "log").read_text()
        return client.pid

    def bits(name: str, offer: dict[str, str]) -> tuple[bool, list[object]]:
        """Whether training was a fork, and what it and the evaluation leave."""
        out = tmp_path / name
        out.mkdir()
        folders = ("--policy", str(policy_folder), "--out", str(out), "--wandb", str(out))
        client = call(out, "train", "--settings", run, "--seed", "3", *folders, offer=offer)
        lock = (out / "checkpoints" / "lock").read_text()
        files = ("--policy", f"0={out / 'policy'}", "--out", str(out / "a.json"), "--samples", str(out / "a.jsonl"))
        call(out, "evaluate", "--arm", "a", "--settings", held_out, *files, offer=offer)
        compared = ("metrics.jsonl", "tokens.npz", "policy/model.safetensors", "a.json", "a.jsonl")
        return int(lock.split()[0]) != client, [content(out / one) for one in compared]

    with subprocess.Popen(["sleep", str(LONG)]) as snakemake, tempfile.TemporaryDirectory() as private:
        offer = {job_client.OFFER: f"{snakemake.pid} torch,vllm {private}"}
        found = [bits(name, offer if name != "alone" else {}) for name in ("first", "second", "alone")]
        snakemake.kill()
    assert [forked for forked, _ in found] == [True, True, False]
    assert found[0][1] == found[2][1] == found[1][1]

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tailrl.runtime.errors import StudyError
from tailrl.tasks import verifier
from tailrl.tasks.verifier import MAX_LENGTH, MathVerifier, reply_of


@pytest.fixture(scope="module")
def shared() -> Iterator[MathVerifier]:
    with closing(MathVerifier()) as running:
        yield running


@pytest.mark.parametrize(
    ("answer", "gold", "same"),
    [
        (r"\frac12", r"\frac{1}{2}", True),
        ("0.5", r"\frac{1}{2}", True),
        ("1/3", r"\frac{1}{2}", False),
        (r"\sqrt{8}", r"2\sqrt2", True),
        ("x^2+2x+1", "(x+1)^2", True),
        (r"\{2,1\}", r"\{1,2\}", True),
        ("(2,1)", "(1,2)", False),
        ("$3\\pi$", r"3\pi", True),
        (r"\text{Monday}", r"\text{Friday}", False),
    ],
)
def test_answers_are_compared_as_mathematics(shared: MathVerifier, answer: str, gold: str, same: bool) -> None:
    assert shared.equal(answer, gold) is same
    assert (shared.timeouts, shared.crashes, shared.unparsed) == (0, 0, 0)


@pytest.mark.parametrize("answer", ["", " ", "}{", "1" * (MAX_LENGTH + 1)])
def test_what_cannot_be_read_is_counted(shared: MathVerifier, answer: str) -> None:
    before = shared.unparsed
    assert not shared.equal(answer, "x")
    assert shared.unparsed == before + 1
    shared.unparsed = 0


@pytest.mark.parametrize("answer", ["a\nb", '"', "\x00", "\ud800", "𝔸" * MAX_LENGTH, "\\", "\ud800" * MAX_LENGTH])
def test_no_text_breaks_the_pipe(shared: MathVerifier, answer: str) -> None:
    assert not shared.equal(answer, r"\frac12")
    assert shared.equal(r"\frac12", "0.5")
    assert shared.crashes == 0


def test_a_slow_answer_is_cut_off_and_the_next_one_is_answered() -> None:
    with closing(MathVerifier(timeout=60.0)) as limited:
        assert limited.equal(r"\frac12", "0.5")
        limited._timeout = 1.0
        start = time.monotonic()
        assert not limited.equal("9^{9^{9^{9}}}", r"\frac12")
        assert time.monotonic() - start < 10
        assert (limited.timeouts, limited.crashes) == (1, 0)
        limited._timeout = 60.0
        assert limited.equal(r"\frac12", "0.5")


@pytest.mark.slow  # `test_what_the_worker_cannot_do` has the limit
def test_memory_is_limited() -> None:
    big = r"2^{2^{40}}"
    with closing(MathVerifier(timeout=30, memory_bytes=300 << 20)) as limited:
        assert limited.equal(r"\frac12", "0.5")
        pid = worker_pid(limited)
        limits = Path(f"/proc/{pid}/limits").read_text(encoding="ascii")
        address_space = next(line for line in limits.splitlines() if line.startswith("Max address space"))
        assert address_space.split()[3:5] == [str(300 << 20)] * 2
        start = time.monotonic()
        assert not limited.equal(big, r"\frac12")
        assert time.monotonic() - start < 40


WORKER = Path(verifier.__file__).with_name("math_verify_worker.py")


@pytest.mark.parametrize(
    ("attempt", "error"),
    [
        ("bytearray(1 << 29)", "MemoryError"),
        ("[0] * (1 << 27)", "MemoryError"),
        ("os.fork()", "BlockingIOError"),
        ("threading.Thread(target=print).start()", "RuntimeError"),
        ("subprocess.run(['true'])", "BlockingIOError"),
        ("file.write(b'x')", "OSError"),
    ],
)
def test_what_the_worker_cannot_do(attempt: str, error: str) -> None:
    """Its own limits, in a process of their own; root, whom no number of processes binds, becomes nobody first."""
    script = (
        "import os, resource, runpy, subprocess, tempfile, threading;"
        f"worker = runpy.run_path({str(WORKER)!r}, run_name='worker');"
        "file = tempfile.TemporaryFile(buffering=0); os.getuid() or os.setuid(65534);"
        "worker['limit'](resource.RLIMIT_AS, 300 << 20); worker['limit_to_comparing']();"
        f"\ntry: {attempt}"
        "\nexcept Exception as error: print(type(error).__name__)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.stdout.strip() == error, ended.stderr


def worker_pid(running: MathVerifier) -> int:
    assert running._worker is not None
    return running._worker.pid


def test_a_worker_that_dies_in_a_pair_is_counted_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(worker: "subprocess.Popen[bytes]", timeout: float) -> str:
        worker.kill()
        return reply_of(worker, timeout)

    with closing(MathVerifier(timeout=20)) as crashing:
        assert crashing.equal(r"\frac12", "0.5")
        pid = worker_pid(crashing)
        os.kill(pid, signal.SIGSTOP)
        with monkeypatch.context() as patched:
            patched.setattr(verifier, "reply_of", dead)
            assert not crashing.equal(r"\frac12", "0.5")
        assert (crashing.timeouts, crashing.crashes) == (0, 1)
        assert crashing.equal(r"\frac12", "0.5")
        assert worker_pid(crashing) != pid


def test_a_worker_that_dies_between_pairs_costs_no_answer() -> None:
    with closing(MathVerifier()) as idle:
        assert idle.equal(r"\frac12", "0.5")
        os.kill(worker_pid(idle), signal.SIGKILL)
        assert idle._worker is not None
        idle._worker.wait()
        assert idle.equal(r"\frac12", "0.5")
        assert idle.crashes == 0


def test_an_interrupt_leaves_no_reply_for_the_next_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(MathVerifier()) as interrupted:
        assert interrupted.equal(r"\frac12", "0.5")

        def interrupt(*_: object) -> str:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(verifier, "reply_of", interrupt)
            with pytest.raises(KeyboardInterrupt):
                interrupted.equal(r"\frac12", "0.5")
        assert not interrupted.equal(r"\frac13", "0.5")
        assert interrupted.equal(r"\frac12", "0.5")


def test_closing_ends_the_worker() -> None:
    with closing(MathVerifier()) as ending:
        ending.equal("x", "y")
        pid = worker_pid(ending)
    assert not Path(f"/proc/{pid}").exists()
    ending.close()


@pytest.mark.slow  # `test_closing_ends_the_worker`
def test_a_worker_ends_with_its_caller() -> None:
    script = (
        "from tailrl.tasks.verifier import MathVerifier; import os, signal; v = MathVerifier(timeout=1.0);"
        "v.equal('x', 'y'); print(v._worker.pid, flush=True);"
        'v._worker.stdin.write(b\'["1/2", "9^{9^{9^{9}}}"]\\n\'); os.kill(os.getpid(), signal.SIGKILL)'
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while running(int(killed.stdout)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not running(int(killed.stdout))


def running(pid: int) -> bool:
    """Whether the process exists and is not a zombie that nobody has waited for."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return "State:\tZ" not in status


def test_the_worker_sees_no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    with closing(MathVerifier()) as started:
        started.equal("x", "y")
        environment = Path(f"/proc/{worker_pid(started)}/environ").read_bytes()
    assert b"OMP_NUM_THREADS=1" in environment
    assert b"secret" not in environment


def test_a_worker_that_cannot_start_is_one_sentence() -> None:
    with (
        closing(MathVerifier(memory_bytes=48 << 20)) as starved,
        pytest.raises(StudyError, match=r"worker process cannot start"),
    ):
        starved.equal("x", "y")

"""What a job needs of the system, and what it says where the system refuses."""

import errno
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tailrl.runtime import limits
from tailrl.runtime.errors import StudyError, reason
from tailrl.runtime.limits import in_limited_memory, limited_memory, out_of_memory


def test_too_little_address_space_is_said_before_any_library_is_loaded() -> None:
    """OpenBLAS would ask for memory in an endless loop."""
    command = [sys.executable, "-P", "-c", "from tailrl.cli import main; main()", "job", "summarise"]
    options = ["--study", "x", "--results", "x", "--out", "x"]
    ended = subprocess.run(
        ["prlimit", "--as=1000000000", *command, *options], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr == (
        "tailrl: ulimit -v allows 1000 MB of address space, and a job's libraries alone need 2000 MB: raise it, for "
        "instance by ulimit -v unlimited\n"
    )


def test_a_lack_of_memory_is_known_by_its_kinds() -> None:
    with pytest.raises(RuntimeError) as torchs:
        torch.empty(1 << 60)
    for error in (torchs.value, MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")):
        assert str(out_of_memory(error)).startswith("no memory is left (")
    linker = ImportError("/x/_xxhash.so: failed to map segment from shared object")
    try:
        raise RuntimeError("Failed to import transformers") from linker
    except RuntimeError as error:
        assert "Failed to import" not in str(out_of_memory(linker)) and out_of_memory(error) is not None
    assert out_of_memory(ValueError("out of range")) is None


def test_a_gpu_without_memory_names_the_settings_that_help() -> None:
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB"
    )
    said = str(out_of_memory(error))
    assert said.startswith("no memory is left (CUDA out of memory") and "training.token_budget" in said
    assert "ulimit" not in said


def test_the_command_line_says_so_in_one_sentence() -> None:
    script = (
        "from tailrl.cli import command_line, main\ndef fail(*_): raise MemoryError\ncommand_line._run = fail; main()"
    )
    ended = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "tailrl: no memory is left (MemoryError)\n")


def test_a_limit_holds_within_its_block_alone() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with limited_memory(1e9, "x"):
        assert len(bytearray(100_000_000)) == 100_000_000
    with pytest.raises(StudyError, match=r"^x: takes more than 0\.2 GB of memory to read$"), limited_memory(2e8, "x"):
        bytearray(1_000_000_000)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert len(bytearray(1_000_000_000)) == 1_000_000_000


@pytest.mark.slow
def test_a_limit_holds_while_a_value_is_made_alone() -> None:
    """Not while its user works with it; but what the user keeps counts for the next value."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    values = in_limited_memory((bytearray(size) for size in [10, 600_000_000, 600_000_000]), 1e9, "x")
    kept = [next(values)]
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert len(bytearray(2_000_000_000)) == 2_000_000_000
    kept.append(next(values))
    with pytest.raises(StudyError, match=r"^x: takes more than 1 GB of memory to read$"):
        kept.append(next(values))
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    with pytest.raises(ZeroDivisionError):
        list(in_limited_memory((1 // number for number in [1, 0]), 1e9, "x"))
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    abandoned = in_limited_memory(iter("ab"), 1e9, "x")
    assert next(abandoned) == "a" and resource.getrlimit(resource.RLIMIT_DATA) == before


# Reads a file as each reader of what a user names does, and prints what they say.
READ = """
import os, socket, sys
from pathlib import Path
from tailrl.artifacts.files import read_text
from tailrl.config.jobs import Problems
from tailrl.config.load import parse_settings, read_study
from tailrl.diagnosis.readers import READERS, read_log
from tailrl.runtime.atomic_files import checksum
from tailrl.runtime.errors import StudyError
from tailrl.tasks.problem import read_problems
from tailrl.tasks.sources import read_rows

extending, plain = Path("extending.yaml"), Path("endless")
calls = {name: lambda name=name: list(read_log([Path(name)])) for name in map("log{}".format, READERS)}
for name in ("data.jsonl", "data.parquet"):
    calls[name] = lambda name=name: list(read_rows(name, "", ""))
calls |= {
    "study.yaml": lambda: read_study("study.yaml"),
    "base.yaml": lambda: read_study("extending.yaml"),
    "problems.jsonl": lambda: read_problems(Path("problems.jsonl")),
    "prompts.txt": lambda: read_text(Path("prompts.txt")),
    "settings.json": lambda: parse_settings(Problems, "settings.json"),
    "results": lambda: checksum(Path("results")),
}
extending.write_text("extends: base.yaml")
for kind, words in {"pipe": "it is a named pipe", "socket": "it is a socket", "device": "it is a device"}.items():
    for name, read in calls.items():
        if kind == "pipe":
            os.mkfifo(name)
        elif kind == "device":
            os.symlink("/dev/zero", name)
        else:
            socket.socket(socket.AF_UNIX).bind(name)
        try:
            read()
            print(kind, name, "was read")
        except StudyError as error:
            if f"{words}, not a regular file" not in str(error) or name not in str(error):
                print(kind, name, error)
        Path(name).unlink()
print("end")
"""


def test_what_is_no_regular_file_is_refused_by_every_reader(tmp_path: Path) -> None:
    """A pipe without a writer, and a device without an end, are waited for by nobody."""
    command = [sys.executable, "-c", READ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True, cwd=tmp_path)
    assert ended.stdout == "end\n"


@pytest.mark.parametrize(("number", "name"), [(errno.EFBIG, "ulimit -f"), (errno.EMFILE, "ulimit -n")])
def test_a_sentence_names_the_limit(number: int, name: str, tmp_path: Path) -> None:
    assert reason(OSError(number, "Refused", str(tmp_path))) == f"Refused ({name})"


def test_ranks_with_gpus_need_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's default is 64 MB, with which NCCL fails once training has begun."""
    monkeypatch.setattr(limits, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=64e6))
    with pytest.raises(StudyError, match=r"^\S+ has 64 MB free, and NCCL needs 128 MB for 2 ranks: start"):
        limits.enough_shared_memory(2)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1e9))
    limits.enough_shared_memory(8)

"""Checkpoints: a run's state in one safetensors file each, written whole or not at all, its checksum in its name.

They lie in a folder that no rule declares, since Snakemake deletes the outputs of a failed or killed job. One process
at a time holds the folder. Only a run of the same settings, seed, base policy, problems, source files and library
versions resumes from a checkpoint (`fingerprint`), since nothing else would give the same bits. Another run's
checkpoints stay until a run is finished, so that a setting may be changed back.
"""

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tailrl.artifacts.manifest import policy_digest, vouched_checksum
from tailrl.config.jobs import Run
from tailrl.config.source_files import at_start, job_files
from tailrl.config.training import without_operational
from tailrl.runtime import distributed
from tailrl.runtime.atomic_files import LOCK, DamagedError, checksum, write_whole
from tailrl.runtime.errors import StudyError, reason, say
from tailrl.runtime.provenance import provenance
from tailrl.training.state import RunState

FILE_NAME = re.compile(r"step-\d{8}-([0-9a-f]{8})-([0-9a-f]{16})\.safetensors")
"""The steps done, the run (a digest of its fingerprint), and the start of the file's checksum."""
UNFINISHED = "writing.safetensors"


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int, fingerprint: Mapping[str, str]) -> None:
        """Checkpoints in a folder, of which the last `keep` stay; the run's fingerprint is from `fingerprint`."""
        self.folder = folder
        self.keep = keep
        self.fingerprint = dict(fingerprint)
        self.name = _digest(self.fingerprint)[:8]

    def save(self, state: RunState) -> Path:
        """Write a checkpoint, then remove the oldest; returns its file. Every rank must call, and the first writes.

        Raises:
            StudyError: the checkpoint could not be written; earlier ones are untouched.
        """
        tensors = state.tensors()
        name = self._write(state, tensors).name if distributed.is_first() else None
        return self.folder / str(distributed.gathered(name)[0])

    def _write(self, state: RunState, tensors: Mapping[str, Tensor]) -> Path:
        aside = self.folder / UNFINISHED
        try:
            header = {"fingerprint": json.dumps(self.fingerprint), "numbers": json.dumps(state.numbers())}
            data = save(tensors, metadata=header)
            digest = hashlib.sha256(data).hexdigest()[:16]
            path = self.folder / f"step-{state.step:08d}-{self.name}-{digest}.safetensors"
            write_whole(data, aside, path)
        except (OSError, SafetensorError) as error:
            aside.unlink(missing_ok=True)
            needed = sum(tensor.nbytes for tensor in tensors.values())
            kept_files = self._files()
            rest = f"{kept_files[-1].name} is kept" if kept_files else "there is none before it"
            raise StudyError(
                f"{self.folder}: the checkpoint of step {state.step} could not be saved ({reason(error)}): it needs "
                f"{needed / 1e6:.1f} MB, and {shutil.disk_usage(self.folder).free / 1e6:.1f} MB are free; {rest}"
            ) from None
        for old in self._files()[: -self.keep]:
            old.unlink()
        return path

    def resume(self, state: RunState) -> bool:
        """Restore the last whole checkpoint into a new run; returns False where there is none.

        The first rank chooses the file and prints its choice on stderr, with each file that it leaves out and why:
        half-written, damaged, with damaged metrics or tokens, or of another run. The other ranks read the same file.

        Raises:
            StudyError: a file cannot be read, or all of this run's states are damaged. All files stay, since only the
                user knows whether a copy is left, and training from the first step is the user's decision.
        """
        chosen = distributed.gathered(self._resume(state) if distributed.is_first() else None)[0]
        if chosen is not None and not distributed.is_first():
            try:
                self._restore(self.folder / chosen, state)
            except StudyError as error:
                raise StudyError(f"{self.folder / chosen}: rank {distributed.number()}: {error}") from None
        return chosen is not None

    def _resume(self, state: RunState) -> str | None:
        """The name of the restored file."""
        aside = self.folder / UNFINISHED
        if aside.exists():
            say(f"{aside}: half-written, left out")
            aside.unlink()
        damaged: dict[Path, DamagedError] = {}
        for file in reversed(self._files()):
            try:
                self._restore(file, state)
            except DamagedError as error:
                say(f"{file}: {error}, left out")
                damaged[file] = error
                continue
            for later in damaged:
                _remove(later)
            say(f"{file}: the run goes on from step {state.step}")
            return file.name
        if damaged:
            *_, first = damaged.values()
            raise StudyError(
                f"{first.file}: damaged, and none of this run's checkpoints ({len(damaged)}) can be used; put it back "
                f"from a copy, or remove {self.folder} to train from the first step"
            )
        for file in sorted(self.folder.glob("step-*"))[-1:]:
            say(f"{file}: of {_whose(file, self.fingerprint)}; training starts anew")
        return None

    def _restore(self, file: Path, state: RunState) -> None:
        match = FILE_NAME.fullmatch(file.name)
        if match is None or file.is_dir() or checksum(file)[:16] != match[2]:
            raise DamagedError(file, "damaged, since its checksum is not the one in its name")
        try:
            with safe_open(file, framework="pt") as opened:
                numbers = json.loads(opened.metadata()["numbers"])
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
            state.restore(tensors, numbers)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise DamagedError(file, f"no state could be read from it ({reason(error)})") from None

    def _files(self) -> list[Path]:
        """This run's checkpoints, oldest first."""
        files = sorted(self.folder.glob("step-*"))
        return [file for file in files if (match := FILE_NAME.fullmatch(file.name)) and match[1] == self.name]

    @property
    def finished(self) -> Path:
        """Folder of the results; it exists once the run is finished."""
        return self.folder / f"finished-{self.name}"

    def clear(self) -> None:
        """Remove all states, other runs' too, with their metrics and tokens; the lock and the results stay."""
        for path in self.folder.iterdir():
            if path not in (self.folder / LOCK, self.finished):
                _remove(path)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder within the block: no other process can.

        Waits for the end of a process that holds it, on any machine where the file system shares locks. Such a process
        is the job of a killed Snakemake, which goes on by itself.

        Raises:
            StudyError: the file system has no locks.
        """
        while True:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                file = (self.folder / LOCK).open("a+")
            except FileNotFoundError:
                continue  # a study that ended just now removed the folder
            with file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    file.seek(0)
                    say(f"{self.folder}: process {file.read().strip()} still trains this run; waiting for its end")
                    fcntl.flock(file, fcntl.LOCK_EX)
                except OSError as error:
                    raise StudyError(
                        f"{self.folder}: cannot be locked ({reason(error)}); results must lie on a file system that "
                        "has locks"
                    ) from None
                if _same_file(file.fileno(), self.folder / LOCK):
                    file.truncate(0)
                    print(os.getpid(), "on", platform.node(), file=file, flush=True)
                    yield
                    return


def fingerprint(run: Run, seed: int, policy_folder: Path, problems_file: Path) -> dict[str, str]:
    """What a checkpoint and the run that resumes from it must have in common: names and checksums.

    Raises StudyError if the base policy is not as its manifest says.
    """
    versions = provenance()["versions"]
    return {
        "settings": _digest(without_operational(run.model_dump(mode="json"))),
        "seed": str(seed),
        "base policy": policy_digest(policy_folder),
        "problems": vouched_checksum(problems_file),
        "source files": _digest(at_start(job_files("train", run))),
        "library versions": _digest({name: versions[name] for name in ("python", "torch", "transformers", "vllm")}),
    }


def _whose(file: Path, fingerprint: Mapping[str, str]) -> str:
    """How a checkpoint's run differs from this one, in words."""
    try:
        with safe_open(file, framework="pt") as opened:
            theirs = json.loads(opened.metadata()["fingerprint"])
        return f"a run with other {', '.join(name for name in fingerprint if theirs.get(name) != fingerprint[name])}"
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError):
        return "an unknown run"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False

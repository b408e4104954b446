"""Checkpoints: a run's states, each written whole or not at all, with a checksum in its name (`checkpoint_files`).

They lie in a folder that no rule declares, since Snakemake deletes the outputs of a failed or killed job. One process
at a time holds the folder. Only a run of the same settings, seed, base policy, problems, prompts, source files and
library versions resumes from a checkpoint (`fingerprint`), since nothing else would give the same bits. Another run's
checkpoints stay until a run is finished, so that a setting may be changed back.
"""

import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from tailrl.artifacts.manifest import digest_of, policy_digest, vouched_checksum
from tailrl.config.jobs import Run
from tailrl.config.source_files import at_start, job_files
from tailrl.config.training import without_operational
from tailrl.rollout.prompts import prompts_digest
from tailrl.runtime import distributed
from tailrl.runtime.atomic_files import LOCK, DamagedError, rename_whole
from tailrl.runtime.errors import StorageError, reason, say
from tailrl.runtime.provenance import provenance
from tailrl.training.checkpoint_files import HEADER, check, load, read_header, write_parts
from tailrl.training.state import RunState

NAME = re.compile(r"step-\d{8}-([0-9a-f]{8})-([0-9a-f]{16})")
"""The steps done, the run (a digest of its fingerprint), and the start of a checksum."""
PROMPTS = "prompts"
"""The entry of a fingerprint on the prompts' tokens."""
CHANGED_PROMPTS = " (from the same problems: its chat template may hold the date, or the tokenizer changed)"
UNFINISHED = "writing-parts"


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, keep: int, fingerprint: Mapping[str, str]) -> None:
        """Checkpoints in a folder, of which the last `keep` stay; the run's fingerprint is from `fingerprint`."""
        self.folder = folder
        self.keep = keep
        self.fingerprint = dict(fingerprint)
        self.name = digest_of(self.fingerprint)[:8]

    def save(self, state: RunState) -> Path:
        """Write a checkpoint, then remove the oldest; returns its path. Every rank must call.

        Raises:
            StudyError: the checkpoint could not be written; earlier ones are untouched.
        """
        tensors = state.tensors()
        try:
            # The first rank alone has the metrics and the tokens.
            numbers = distributed.in_step(lambda: state.numbers() if distributed.is_first() else None)
            header = {"fingerprint": self.fingerprint, "numbers": numbers}
            path = self._write(f"step-{state.step:08d}-{self.name}", tensors, header)
        except (OSError, SafetensorError) as error:
            # Before any rank raises, whose end takes the others with it.
            distributed.in_step(lambda: self._remove_unfinished() if distributed.is_first() else False)
            needed = sum(tensor.nbytes for tensor in tensors.values())
            kept_files = self._files()
            rest = f"{kept_files[-1].name} is kept" if kept_files else "there is none before it"
            raise StorageError(
                f"{self.folder}: the checkpoint of step {state.step} could not be saved ({reason(error)}): it needs "
                f"{needed / 1e6:.1f} MB, and {shutil.disk_usage(self.folder).free / 1e6:.1f} MB are free; {rest}"
            ) from None
        if distributed.is_first():
            for old in self._files()[: -self.keep]:
                _remove(old)
        return path

    def _write(self, name: str, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> Path:
        aside = self.folder / UNFINISHED

        def begin() -> None:
            if distributed.is_first():
                self._remove_unfinished()
                aside.mkdir()

        def end() -> str:
            data = json.dumps({**header, "parts": parts}).encode()
            path = self.folder / f"{name}-{hashlib.sha256(data).hexdigest()[:16]}"
            if distributed.is_first():
                (aside / HEADER).write_bytes(data)
                rename_whole(aside, path)
            return path.name

        distributed.in_step(begin)
        parts = write_parts(tensors, aside)
        return self.folder / distributed.gathered(distributed.in_step(end))[0]

    def _remove_unfinished(self) -> bool:
        """Remove what an earlier process left half-written; returns whether there was any."""
        aside = self.folder / UNFINISHED
        if not os.path.lexists(aside):
            return False
        _remove(aside)
        return True

    def resume(self, state: RunState) -> bool:
        """Restore the last whole checkpoint into a new run; returns whether there is one. Every rank must call.

        The first rank prints the choice on stderr, with each checkpoint that is left out and why: half-written,
        damaged, with damaged metrics or tokens, or of another run.

        Raises:
            StudyError: a file cannot be read, or all of this run's states are damaged. All files stay, since only the
                user knows whether a copy is left, and training from the first step is the user's decision.
        """
        first = distributed.is_first()
        if first and self._remove_unfinished():
            say(f"{self.folder / UNFINISHED}: half-written, left out")
        damaged: dict[Path, DamagedError] = {}
        # The first rank decides, since it holds the folder.
        for file in distributed.gathered([*reversed(self._files())] if first else [])[0]:
            try:
                self._restore(file, state)
            except DamagedError as error:
                if first:
                    say(f"{file}: {error}, left out")
                damaged[file] = error
                continue
            if first:
                for later in damaged:
                    _remove(later)
                say(f"{file}: the run goes on from step {state.step}")
            return True
        if damaged:
            *_, last = damaged.values()
            raise StorageError(
                f"{last.file}: damaged, and none of this run's checkpoints ({len(damaged)}) can be used; put it back "
                f"from a copy, or remove {self.folder} to train from the first step"
            )
        for file in sorted(self.folder.glob("step-*"))[-1:] if first else ():
            say(f"{file}: of {_whose(file, self.fingerprint)}; training starts anew")
        return False

    def _restore(self, file: Path, state: RunState) -> None:
        """Restore a state on all ranks; where one cannot, all raise DamagedError, or StudyError if it may be whole."""
        try:
            numbers = distributed.in_step(lambda: check(file))["numbers"]
            tensors = load(file, state.blank)
            distributed.in_step(lambda: state.restore(tensors, numbers))
        except (OSError, SafetensorError, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise DamagedError(file, f"no state could be read from it ({reason(error)})") from None

    def _files(self) -> list[Path]:
        """This run's checkpoints, oldest first."""
        files = sorted(self.folder.glob("step-*"))
        return [file for file in files if (match := NAME.fullmatch(file.name)) and match[1] == self.name]

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
                    raise StorageError(
                        f"{self.folder}: cannot be locked ({reason(error)}); results must lie on a file system that "
                        "has locks"
                    ) from None
                if _same_file(file.fileno(), self.folder / LOCK):
                    file.truncate(0)
                    print(os.getpid(), "on", platform.node(), file=file, flush=True)
                    yield
                    return


def fingerprint(
    run: Run, seed: int, policy_folder: Path, problems_file: Path, prompts: Sequence[Sequence[int]]
) -> dict[str, str]:
    """What a checkpoint and the run that resumes from it must have in common: names and checksums.

    `prompts` are the token ids of all problems: a chat template may hold the date, and tokenizers change.

    Raises StudyError if the base policy is not as its manifest says.
    """
    versions = provenance()["versions"]
    return {
        "settings": digest_of(without_operational(run.model_dump(mode="json"))),
        "seed": str(seed),
        "base policy": policy_digest(policy_folder),
        "problems": vouched_checksum(problems_file),
        PROMPTS: prompts_digest(prompts),
        "source files": digest_of(at_start(job_files("train", run))),
        "library versions": digest_of({name: versions[name] for name in ("python", "torch", "transformers", "vllm")}),
    }


def _whose(file: Path, fingerprint: Mapping[str, str]) -> str:
    """How a checkpoint's run differs from this one, in words."""
    try:
        theirs = read_header(file)["fingerprint"]
        others = [name for name in fingerprint if theirs.get(name) != fingerprint[name]]
        return f"a run with other {', '.join(others)}{CHANGED_PROMPTS if others == [PROMPTS] else ''}"
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError):
        return "an unknown run"


def _remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False

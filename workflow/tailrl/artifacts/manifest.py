"""manifest.json: digests of a job's outputs and inputs. The only reader and writer of these files.

Small files are checked against their manifest at each reading, a policy once by each job that reads it.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from tailrl.artifacts.files import Record, parse_record, read_bytes
from tailrl.runtime.atomic_files import checksum
from tailrl.runtime.errors import StudyError, writing

MANIFEST = "manifest.json"
CARD = "README.md"
"""The model card is not in the manifest: it is written after its policy, and may be rewritten."""


class Output(Record):
    """A file's length in bytes and its SHA-256."""

    length: int
    sha256: str


class PolicyDigest(Record):
    """A policy that was evaluated: its training seed, the step of a snapshot, and its `policy_digest`."""

    seed: int
    step: int | None = None
    sha256: str


class Manifest(Record):
    """What one job left.

    Attributes:
        outputs: its files, by paths relative to the manifest's folder.
        inputs: SHA-256 of each input, by name: the problems, the base policy.
        steps: of a training run.
        arm, settings, policies: of an evaluation.
    """

    outputs: dict[str, Output]
    inputs: dict[str, str] = Field(default_factory=dict)
    steps: int | None = None
    arm: str | None = None
    settings: dict[str, Any] | None = None
    policies: list[PolicyDigest] = Field(default_factory=list)

    def digests(self, folder: str = ".") -> dict[str, str]:
        """SHA-256 of the outputs in a folder, by paths relative to it."""
        within = ((Path(name), output.sha256) for name, output in self.outputs.items())
        return {str(path.relative_to(folder)): sha256 for path, sha256 in within if path.is_relative_to(folder)}

    def evaluated(self, seed: int, step: int | None = None) -> str | None:
        """The `policy_digest` of an evaluated policy; None if it was not evaluated."""
        return next((p.sha256 for p in self.policies if (p.seed, p.step) == (seed, step)), None)


def write_manifest(path: Path, outputs: Iterable[Path], **others: Any) -> None:
    """Write the manifest of these files, with the other fields; raises StudyError if the disk refuses."""
    files = {os.path.relpath(file, path.parent): file for file in outputs}
    found = {name: {"length": file.stat().st_size, "sha256": checksum(file)} for name, file in files.items()}
    manifest = Manifest.model_validate({"outputs": found, **others})
    with writing(path):
        path.write_text(manifest.model_dump_json(indent=1, exclude_defaults=True) + "\n", encoding="utf-8")


def read_manifest(path: Path) -> Manifest:
    """A manifest; raises StudyError if it is missing or not valid."""
    return parse_record(Manifest, read_bytes(path), path)


def files_in(folder: Path) -> list[Path]:
    """A job's files under a folder, sorted, without manifests, model cards and hidden files."""
    files = (file for file in sorted(folder.rglob("*")) if file.is_file() and not file.name.startswith("."))
    return [file for file in files if file.name not in (MANIFEST, CARD)]


def read_vouched(path: Path, manifest: Path | None = None) -> bytes:
    """A small file's content, checked against its manifest (by default beside it); raises StudyError if it differs."""
    data, beside = read_bytes(path), manifest or path.with_name(MANIFEST)
    known = read_manifest(beside).outputs.get(path.name)
    if known is None or known.sha256 != hashlib.sha256(data).hexdigest():
        raise _changed(path, beside, path)
    return data


def read_digests(folder: Path, home: Path) -> dict[str, str]:
    """SHA-256 of each file in a folder, by its path; raises StudyError if any differs from the manifest in `home`."""
    found = {str(file.relative_to(folder)): checksum(file) for file in files_in(folder)}
    known = read_manifest(home / MANIFEST).digests(folder.relative_to(home).as_posix())
    for name in sorted(known.keys() | found.keys()):
        if known.get(name) != found.get(name):
            raise _changed(folder / name, home / MANIFEST, folder)
    return found


def policy_digest(folder: Path) -> str:
    """One SHA-256 over all files of a policy: weights, configuration and tokenizer, without its card.

    Raises:
        StudyError: a file cannot be read, or differs from the manifest of the job that made the policy. This manifest,
            if any, is in the folder, beside it, or for a snapshot beside `snapshots`.
    """
    homes = [folder, *([folder.parent] if folder.name == "policy" else folder.parents[1:2])]
    home = next((home for home in homes if (home / MANIFEST).is_file()), None)
    if home is not None and read_manifest(home / MANIFEST).digests(folder.relative_to(home).as_posix()):
        return digest_of(read_digests(folder, home))
    return digest_of({str(file.relative_to(folder)): checksum(file) for file in files_in(folder)})


def digest_of(digests: Mapping[str, str]) -> str:
    """One SHA-256 over the digests of several files."""
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def _changed(path: Path, manifest: Path, remove: Path) -> StudyError:
    return StudyError(
        f"{path}: is not as its job left it, as {manifest.name} shows; put it back, or remove {remove} and run the "
        "study again"
    )

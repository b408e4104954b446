"""manifest.json: digests of a job's outputs and inputs. The only reader and writer of these files.

Small files are checked against their manifest at each reading, a policy once by each job that reads it.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field

from tailrl.artifacts.files import Record, parse_record, read_bytes
from tailrl.config.source_files import edited
from tailrl.runtime.atomic_files import checksum
from tailrl.runtime.errors import DataError, StorageError, StudyError, few, say, writing

MANIFEST = "manifest.json"
HELD = 2**30
"""Bytes of the largest file that a report reads only to compare its digest, which takes seconds."""
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
        sources: digests of the job's source files when it started (`source_files.at_start`).
        steps: of a training run.
        arm, settings, policies: of an evaluation.
    """

    outputs: dict[str, Output]
    inputs: dict[str, str] = Field(default_factory=dict)
    sources: dict[str, str] = Field(default_factory=dict)
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
    """Write the manifest of these files, with the other fields; raises StudyError if the disk refuses.

    Says on stderr which source files were edited since the job started.
    """
    files = {os.path.relpath(file, path.parent): file for file in outputs}
    found = {name: {"length": file.stat().st_size, "sha256": checksum(file)} for name, file in files.items()}
    manifest = Manifest.model_validate({"outputs": found, **others})
    with writing(path):
        path.write_text(manifest.model_dump_json(indent=1, exclude_defaults=True) + "\n", encoding="utf-8")
    if names := edited(manifest.sources):
        say(f"{few(names)} changed while this job ran; its results stay, and the next snakemake makes them again")


def read_manifest(path: Path) -> Manifest:
    """A manifest; raises StudyError if it is missing or not valid."""
    if not path.is_file():
        results = path.parent if path.name == MANIFEST else path.with_name(path.name.replace(MANIFEST, "json"))
        raise StorageError(
            f"{path}: is missing, and nothing else says what its job left; put it back from a copy, or remove "
            f"{results} and run the study again"
        )
    return parse_record(Manifest, read_bytes(path), path)


def files_in(folder: Path) -> list[Path]:
    """A job's files under a folder, sorted, without manifests, model cards and hidden files."""
    files = (file for file in sorted(folder.rglob("*")) if file.is_file() and not file.name.startswith("."))
    return [file for file in files if file.name not in (MANIFEST, CARD)]


@cache
def tell_of_sources(*manifests: Path) -> tuple[str, ...]:
    """The source files that are not as the jobs of these manifests had them; names both on stderr, once."""
    found = {path: edited(read_manifest(path).sources) for path in manifests}
    files = tuple(sorted({file for names in found.values() for file in names}))
    if older := [str(path) for path, names in found.items() if names]:
        say(f"{few(older)}: made by another version of {few(files)} than is there now")
    return files


def check_outputs(path: Path) -> None:
    """Raises StudyError if a file of a manifest is not as its job left it; a file that is gone misleads nobody.

    Of files over HELD bytes the length alone is compared.
    """
    for name, known in read_manifest(path).outputs.items():
        file = path.parent / name
        if not file.is_file():
            continue
        length = file.stat().st_size
        if length != known.length or (length <= HELD and checksum(file) != known.sha256):
            raise _changed(file, path, file)


def read_vouched(path: Path, manifest: Path | None = None) -> bytes:
    """A small file's content, checked against its manifest (by default beside it); raises StudyError if it differs."""
    data, beside = read_bytes(path), manifest or path.with_name(MANIFEST)
    known = read_manifest(beside).outputs.get(path.name)
    if known is None or known.sha256 != hashlib.sha256(data).hexdigest():
        raise _changed(path, beside, path)
    return data


def vouched_checksum(path: Path) -> str:
    """SHA-256 of a file, such as the problems; raises StudyError if a manifest beside it has another one.

    A file without a manifest, or that none lists, is the user's own.
    """
    beside, digest = path.with_name(MANIFEST), checksum(path)
    known = read_manifest(beside).outputs.get(path.name) if beside.is_file() else None
    if known is not None and known.sha256 != digest:
        raise _changed(path, beside, path)
    if known is not None:
        tell_of_sources(beside)
    return digest


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
        tell_of_sources(home / MANIFEST)
        return digest_of(read_digests(folder, home))
    return digest_of({str(file.relative_to(folder)): checksum(file) for file in files_in(folder)})


def digest_of(value: Any) -> str:
    """One SHA-256 over plain data, such as the digests of several files."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _changed(path: Path, manifest: Path, remove: Path) -> StudyError:
    return DataError(
        f"{path}: is not as its job left it, as {manifest.name} shows; put it back, or remove {remove} and run the "
        "study again"
    )

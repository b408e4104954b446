"""Policies that are evaluated already, a file each: an interrupted evaluation goes on with the others.

The files lie in a folder that no rule declares, since Snakemake deletes the outputs of a failed or killed job. Each is
there whole or not at all. Its name has a digest of what it was made from, and one of its content.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tailrl.artifacts.evaluation import PolicyScores, Samples
from tailrl.artifacts.files import Record, parse_record
from tailrl.artifacts.manifest import digest_of
from tailrl.config.jobs import Evaluation
from tailrl.config.source_files import at_start, job_files
from tailrl.config.training import without_operational
from tailrl.runtime.atomic_files import write_whole
from tailrl.runtime.errors import DataError, say, writing
from tailrl.runtime.provenance import provenance


class EvaluatedPolicy(Record):
    """One policy's scores and responses."""

    scores: PolicyScores
    samples: list[Samples]


@dataclass(frozen=True, slots=True)
class Evaluee:
    """A policy to evaluate: its training seed, the step of a snapshot, its folder, and its `policy_digest`."""

    whose: Mapping[str, int]
    folder: Path
    sha256: str


class Parts:
    """The evaluated policies in one folder."""

    def __init__(self, folder: Path, problems: str, settings: Evaluation, prompts: str | None = None) -> None:
        """A part counts for equal problems, prompts, settings, sources and versions.

        `problems` is the SHA-256 of the problems, `prompts` the digest of the prompts' tokens.
        """
        versions = provenance()["versions"]
        self.folder = folder
        self.made_from = {
            "problems": problems,
            "prompts": str(prompts),
            "settings": json.dumps(without_operational(settings.model_dump(mode="json")), sort_keys=True),
            "source files": digest_of(at_start(job_files("evaluate", settings))),
            **{name: str(versions[name]) for name in ("python", "torch", "transformers", "vllm", "lm_eval")},
        }

    def write(self, policy: Evaluee, part: EvaluatedPolicy) -> None:
        """Keep a policy's part; raises StudyError if the disk refuses."""
        data = part.model_dump_json(exclude_defaults=True).encode()
        path = self.folder / f"{self._name(policy)}-{_digest(data)}.json"
        with writing(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_whole(data, self.folder / f"writing-{os.getpid()}", path)

    def read(self, policy: Evaluee) -> EvaluatedPolicy | None:
        """A policy's part; None if it has none. Says which files are damaged, and leaves them out."""
        for path in sorted(self.folder.glob(f"{self._name(policy)}-*.json")):
            try:
                data = path.read_bytes()
                if path.stem.rpartition("-")[2] == _digest(data):
                    return parse_record(EvaluatedPolicy, data, path)
            except (OSError, DataError):
                pass
            say(f"{path}: damaged, left out")
        return None

    def _name(self, policy: Evaluee) -> str:
        return f"policy-{digest_of({**self.made_from, **_texts(policy.whose), 'policy': policy.sha256})[:16]}"


def _texts(whose: Mapping[str, int]) -> dict[str, str]:
    return {name: str(value) for name, value in whose.items()}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]

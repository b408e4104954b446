"""run.json: a job's settings and the machine it ran on. The only reader and writer of these files."""

from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, ValidationError, field_validator

from tailrl.artifacts.files import Record, RecordT, parse_record
from tailrl.artifacts.manifest import read_vouched
from tailrl.config.base import Settings
from tailrl.config.jobs import Run
from tailrl.config.messages import sentences
from tailrl.runtime.errors import DataError

Count = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0)]


class Hardware(Record):
    """A job's machine; None for what is unknown."""

    cpu: str | None
    cores: Count | None
    memory_gb: Seconds
    gpu: str | None


class JobRecord(Record):
    """The record of any job: its settings, versions, machine and duration.

    Attributes:
        settings: the job's settings, as in JSON; a digest of them is in the fingerprint.
        versions: of the libraries; None for one that is not installed.
        dirty: whether there were uncommitted changes.
        threads: of the job; wall_seconds: from its start to its end.
    """

    kind: ClassVar[type[Settings]]
    """The model of the settings."""

    settings: dict[str, Any]
    versions: dict[str, str | None]
    commit: str | None
    dirty: bool | None
    hardware: Hardware
    threads: Count
    wall_seconds: Seconds

    @field_validator("settings")
    @classmethod
    def _of_their_kind(cls, settings: dict[str, Any]) -> dict[str, Any]:
        try:
            cls.kind.model_validate(settings)
        except ValidationError as error:
            raise ValueError(sentences(error, cls.kind)) from None
        return settings


class FirstPrompt(Record):
    """A prompt as the engine got it: the token ids, and their text with special tokens."""

    text: str
    tokens: list[Count]


class RunRecord(JobRecord):
    """A training run.

    Attributes:
        startup_seconds: until the first step, summed over all processes of the run.
        resumed_at_steps: the steps at which it resumed from a checkpoint.
        fingerprint: digests of all its inputs, see `tailrl.training.checkpoints`.
        sampler_self_test: the result of the engine's self-test; None if not finite.
        stopped: the rule that ended it early, in words.
        first_prompt: of the problems; None in older records.
    """

    kind = Run

    study: str
    arm: str
    seed: Count
    ranks: Count
    startup_seconds: Seconds
    resumed_at_steps: list[Count]
    fingerprint: dict[str, str]
    sampler_self_test: float | None
    stopped: str | None
    first_prompt: FirstPrompt | None = None

    @property
    def run(self) -> Run:
        """The settings as a model."""
        return Run.model_validate(self.settings)


def finished_jobs(folder: Path) -> list[Path]:
    """The folders of the finished runs of a study; raises StudyError without any."""
    jobs = sorted(path.parent for path in folder.glob("train/*/seed*/run.json"))
    if not jobs:
        raise DataError(f"{folder}: holds no finished run, train/<arm>/seed<seed>/run.json")
    return jobs


def read_record(folder: Path, kind: type[RecordT]) -> RecordT:
    """The record in a job's folder; raises StudyError, which names the file and the field."""
    path = folder / "run.json"
    return parse_record(kind, read_vouched(path), path)


def write_record(folder: Path, record: Record) -> None:
    """Write run.json into a job's folder."""
    (folder / "run.json").write_text(record.model_dump_json(indent=2) + "\n", encoding="utf-8")

"""What made a job's files, in words: its commit, its libraries and its machine."""

from collections.abc import Iterable, Sequence

from tailrl.artifacts.records import JobRecord


def made_by(records: Sequence[JobRecord], other_versions: str = "") -> list[str]:
    """Commit, versions and hardware of jobs, a sentence each without its end."""
    versions = [", ".join(f"{k} {v}" for k, v in sorted(r.versions.items())) for r in records]
    commits = [f"{r.commit or 'unknown'}{' with uncommitted changes' if r.dirty else ''}" for r in records]
    return [
        f"Commit: {distinct(commits)}",
        f"Versions: {distinct(versions)}{other_versions}",
        f"Hardware: {distinct(_hardware(record) for record in records)}",
    ]


def distinct(values: Iterable[object]) -> str:
    """The values as text, each once."""
    return "; also ".join(dict.fromkeys(str(value) for value in values))


def _hardware(record: JobRecord) -> str:
    machine = record.hardware
    cpu, gpu = machine.cpu or "CPU not recorded", f"GPU {machine.gpu}" if machine.gpu else "no GPU"
    return f"{cpu}, {machine.cores or '?'} cores, {machine.memory_gb:.0f} GB, {gpu}, {record.threads} thread(s) a job"

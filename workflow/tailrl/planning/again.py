"""Which finished jobs Snakemake is about to run again, and why, in one sentence."""

import ast
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tailrl.artifacts.manifest import MANIFEST, read_manifest
from tailrl.config.source_files import edited
from tailrl.config.training import differing
from tailrl.runtime.errors import StudyError, few


def again(dag: Any, persistence: Any) -> str:
    """The sentence, from Snakemake's own reasons; empty if no finished job runs again."""
    jobs = [job for job in dag.needrun_jobs() if job.output and _finished(job, persistence)]
    if not jobs:
        return ""
    kinds = Counter(sorted(job.rule.name for job in jobs)).most_common()
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds)
    files, keys, others = (set[str]() for _ in range(3))
    for job in jobs:
        reason = dag.reason(job)
        files |= set(map(str, reason.updated_input - reason.updated_input_run))
        if reason.input_changed:
            files |= set(persistence.input(job.output[0]) or ()) ^ set(map(str, job.input))
        if reason.params_changed:
            old, new = map(_values, (reason.params_changed.only_old, reason.params_changed.only_new))
            keys |= set(differing(_settings(old), _settings(new)))
            if any(isinstance(value, str) and not value.startswith("{") for value in new):
                files |= set(_edited(job.output) or ["a source file"])
        if reason.forced:
            others |= {"the command line forces it"}
        if reason.code_changed or reason.software_stack_changed:
            others |= {"their rules changed"}
    why = [f"{few(sorted(files))} changed"] if files else []
    why += [f"the study's {few(sorted(keys))} changed"] if keys else []
    reasons = "; ".join([*why, *sorted(others)]) or "their inputs changed"
    return f"finished jobs run again, {len(jobs)} in all ({counted}): {reasons}"


def _finished(job: Any, persistence: Any) -> bool:
    """Whether Snakemake has seen the job's end: an interrupted one only goes on, or gets its results back."""
    open_ones = persistence._filter_incomplete_keys([persistence._get_key(file) for file in job.output])
    return not open_ones and all(Path(file).exists() for file in job.output)


def manifests(outputs: Iterable[str]) -> list[Path]:
    """The manifests that lie among a job's outputs."""
    paths = [path / MANIFEST if path.is_dir() else path for path in map(Path, outputs)]
    return [path for path in paths if path.name.endswith(MANIFEST) and path.is_file()]


def _values(texts: Iterable[str]) -> list[Any]:
    """Parameters, of which Snakemake keeps the `repr`."""
    return [ast.literal_eval(text) for text in texts]


def _settings(values: Iterable[Any]) -> dict[str, Any]:
    """The settings among parameters, which are JSON."""
    texts = [value for value in values if isinstance(value, str) and value.startswith("{")]
    return {key: value for text in texts for key, value in json.loads(text).items()}


def _edited(outputs: Iterable[str]) -> list[str]:
    try:
        return sorted({file for path in manifests(outputs) for file in edited(read_manifest(path).sources)})
    except StudyError:
        return []

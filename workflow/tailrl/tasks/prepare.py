"""The problems of a study: what its first job writes."""

import json
from dataclasses import replace
from pathlib import Path

from tailrl.config.jobs import Problems
from tailrl.config.tasks import DataSetTask
from tailrl.runtime.atomic_files import unchanged
from tailrl.runtime.errors import ConfigurationError, say
from tailrl.tasks.loaded import canonical
from tailrl.tasks.problem import write_problems
from tailrl.tasks.registry import load_task


def write_all_problems(settings: Problems, out: Path) -> None:
    """Writes train.jsonl, evaluation.jsonl, warm_start.jsonl (empty without a warm start) and problems.json.

    Held-out problems are removed from the training problems. These are in the order of the curriculum's levels.
    problems.json counts what was removed, and lists the source rows that could not be used. A sentence says how many.

    Raises:
        StudyError: a source cannot be read, gives nothing, or is changed meanwhile.
    """
    tasks = (settings.train, settings.evaluation)
    with unchanged({task.path for task in tasks if isinstance(task, DataSetTask) and task.path}):
        _write_all(settings, out)


def _write_all(settings: Problems, out: Path) -> None:
    evaluation = load_task(settings.evaluation)
    held_out = {canonical(problem.prompt) for problem in evaluation.problems}
    report: dict[str, object] = {"evaluation": _describe("evaluation", len(evaluation.problems), 0, evaluation.skipped)}
    write_problems(evaluation.problems, out / "evaluation.jsonl")
    for name, tasks in (("train", (settings.train, *settings.harder)), ("warm_start", settings.warm_start)):
        loaded = [load_task(task) for task in tasks]
        levels = enumerate(loaded) if name == "train" else ((0, part) for part in loaded)
        every = [replace(problem, level=level) for level, part in levels for problem in part.problems]
        kept = [problem for problem in every if canonical(problem.prompt) not in held_out]
        if loaded and not kept:
            raise ConfigurationError(f"every {name} problem is also an evaluation problem")
        write_problems(kept, out / f"{name}.jsonl")
        skipped = {reason: rows for part in loaded for reason, rows in part.skipped.items()}
        report[name] = _describe(name, len(kept), len(every) - len(kept), skipped)
    (out / "problems.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _describe(name: str, kept: int, held_out: int, skipped: dict[str, list[str]]) -> dict[str, object]:
    if skipped:
        why = "; ".join(f"{reason} ({len(rows)}, first {rows[0]})" for reason, rows in skipped.items())
        say(f"{name}: {sum(map(len, skipped.values()))} rows give no problem: {why}; problems.json lists them")
    return {"problems": kept, "removed_because_evaluated": held_out, "skipped": skipped}

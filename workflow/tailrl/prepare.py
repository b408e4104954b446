"""What every arm starts from: the problems, and the policy before reinforcement learning."""

import json
from pathlib import Path

from tailrl.errors import StudyError
from tailrl.policy import create_policy, load_policy, load_tokenizer, save_policy
from tailrl.records import read_problems, write_problems
from tailrl.settings import Policy, PretrainedPolicy, Problems, ScratchPolicy
from tailrl.study import Study
from tailrl.tasks import download_task, load_task
from tailrl.tokenizer import train_tokenizer
from tailrl.training.warm_start import warm_start

TOKENIZER_SOLUTIONS = 2000
"""Worked solutions that the tokenizer sees; more of them would leave fewer tokens for the prose."""


def write_all_problems(settings: Problems, out: Path) -> None:
    """Writes train.jsonl, evaluation.jsonl, warm_start.jsonl (empty without a warm start) and problems.json.

    A problem that is evaluated is taken out of what is trained on; problems.json counts it, and lists the rows
    of the sources that could not be used.

    Raises:
        StudyError: a source cannot be read or gives nothing.
    """
    evaluation = load_task(settings.evaluation)
    held_out = {problem.prompt for problem in evaluation.problems}
    report: dict[str, object] = {"evaluation": _describe(len(evaluation.problems), 0, evaluation.skipped)}
    write_problems(evaluation.problems, out / "evaluation.jsonl")
    for name, tasks in (("train", (settings.train,)), ("warm_start", settings.warm_start)):
        loaded = [load_task(task) for task in tasks]
        kept = [problem for part in loaded for problem in part.problems if problem.prompt not in held_out]
        if loaded and not kept:
            raise StudyError(f"every {name} problem is also an evaluation problem")
        write_problems(kept, out / f"{name}.jsonl")
        skipped = {reason: rows for part in loaded for reason, rows in part.skipped.items()}
        report[name] = _describe(len(kept), sum(len(part.problems) for part in loaded) - len(kept), skipped)
    (out / "problems.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _describe(kept: int, held_out: int, skipped: dict[str, list[str]]) -> dict[str, object]:
    return {"problems": kept, "removed_because_evaluated": held_out, "skipped": skipped}


def write_base_policy(settings: Policy, warm_start_file: Path, out: Path) -> None:
    """Writes the policy that reinforcement learning starts from, as a Hugging Face folder.

    Made and warm-started here (with warm_start.json, its losses, beside the weights), or read from a folder or
    the hub; raises StudyError where that fails.
    """
    if not isinstance(settings, ScratchPolicy):
        save_policy(load_policy(settings.path), load_tokenizer(settings.path), out)
        return
    problems = read_problems(warm_start_file)
    if not all(problem.solution for problem in problems):
        raise StudyError(f"{warm_start_file}: a warm start needs worked solutions, which this task does not have")
    texts = (problem.prompt + problem.solution for problem in problems[:TOKENIZER_SOLUTIONS])
    tokenizer = train_tokenizer(settings.vocabulary_size, texts)
    model = create_policy(settings, tokenizer, settings.warm_start.seed)
    losses = warm_start(model, tokenizer, problems, settings.warm_start)
    save_policy(model, tokenizer, out)
    (out / "warm_start.json").write_text(json.dumps({"loss": losses}) + "\n", encoding="utf-8")


def download_inputs(study: Study) -> None:
    """Fetches into the Hugging Face cache what the study needs from the hub; raises StudyError out of reach."""
    for task in (study.task, study.evaluation.task):
        download_task(task)
    if isinstance(study.policy, PretrainedPolicy):
        load_tokenizer(study.policy.path)
        load_policy(study.policy.path)

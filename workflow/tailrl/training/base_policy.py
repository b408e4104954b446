"""The base policy, from which every arm starts: created and warm-started here, or loaded."""

import json
from pathlib import Path

from tailrl.artifacts.manifest import NAME, files_in, write_manifest
from tailrl.config.policy import Policy, ScratchPolicy
from tailrl.model.policy import check_vocabulary, create_policy, load_policy, load_tokenizer, save_policy
from tailrl.model.tokenizer import train_tokenizer
from tailrl.runtime.atomic_files import checksum
from tailrl.runtime.errors import StudyError
from tailrl.tasks.problem import read_problems
from tailrl.training.warm_start import warm_start

TOKENIZER_SOLUTIONS = 2000
"""Worked solutions that the tokenizer is trained on; more would leave fewer tokens for the prose."""


def write_base_policy(settings: Policy, warm_start_file: Path, out: Path) -> None:
    """Write the base policy as a Hugging Face folder; raises StudyError where that fails.

    It is created and warm-started here, with its losses in warm_start.json, or loaded from a folder or the hub. Its
    manifest lies beside it.
    """
    if not isinstance(settings, ScratchPolicy):
        tokenizer = load_tokenizer(settings.path)
        model = load_policy(settings.path)
        check_vocabulary(model.config, tokenizer, settings.path)
        save_policy(model, tokenizer, out)
        write_manifest(out / NAME, files_in(out))
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
    write_manifest(out / NAME, files_in(out), inputs={"problems": checksum(warm_start_file)})

"""The model card of a trained policy: README.md in its folder, from the files of its training."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tailrl.artifacts.evaluation import manifest_of, read_evaluation_file
from tailrl.artifacts.files import parse_object, read_text
from tailrl.artifacts.manifest import MANIFEST, digest_of, read_manifest
from tailrl.artifacts.metrics import read_metrics
from tailrl.artifacts.records import RunRecord, read_record
from tailrl.config.jobs import Run
from tailrl.runtime.errors import DataError
from tailrl.runtime.templates import renderer
from tailrl.tracking.metrics import REWARD

MEAN_OVER = 10
"""Steps at either end of a run over which a card gives the mean reward."""

READ_BY = "4.51.3, 4.57.6 and 5.19.0"
"""Versions of transformers that read written policies of the families they know: docs/results/families.csv."""

render = renderer(Path(__file__).parent)


def write_card(run_folder: Path, evaluation: Path | None = None) -> Path:
    """Write the card into the policy's folder, from `run.json` and `metrics.jsonl` beside it; returns its path.

    Args:
        run_folder: what training wrote: `policy/`, `run.json`, `metrics.jsonl`.
        evaluation: the summary of the arm's evaluation; None while there is none.

    Raises:
        StudyError: a file cannot be read, or the evaluation is of another policy.
    """
    record, config = read_record(run_folder, RunRecord), run_folder / "policy" / "config.json"
    size = parse_object(read_text(config), config).get("vocab_size")
    if not isinstance(size, int):
        raise DataError(f"{config}: has no vocab_size")
    rewards = read_metrics(run_folder).get(REWARD, np.zeros(0)).tolist()
    if not rewards:
        raise DataError(f"{run_folder / 'metrics.jsonl'}: has no {REWARD}")
    chat = (run_folder / "policy" / "chat_template.jinja").is_file()
    evaluated = None if evaluation is None else _evaluated(evaluation, run_folder, record)
    text = _card(record, record.run, size, chat, rewards, evaluated)
    path = run_folder / "policy" / "README.md"
    path.write_text(text, encoding="utf-8")
    return path


def _card(
    record: RunRecord, run: Run, size: int, chat: bool, rewards: list[float], evaluated: dict[str, Any] | None
) -> str:
    metadata: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    # A local folder means nothing on another machine.
    if run.policy.folder and not Path(run.policy.folder).exists():
        metadata["base_model"] = run.policy.folder
    metadata["tags"] = ["reinforcement-learning", run.estimator, run.vocabulary.rule]
    blocks = run.model_dump(mode="json", exclude_none=True, include=set(Run.model_fields) - {"study", "arm"})
    return render(
        "model_card.md.j2",
        read_by=READ_BY,
        record=record,
        run=run,
        metadata=yaml.safe_dump(metadata, sort_keys=False),
        chat=chat,
        arguments=_arguments(run, size),
        steps=len(rewards),
        ends=[sum(part) / len(part) for part in (rewards[:MEAN_OVER], rewards[-MEAN_OVER:])],
        mean_over=min(MEAN_OVER, len(rewards)),
        settings=yaml.safe_dump(blocks, sort_keys=False),
        evaluated=evaluated,
    )


def _arguments(run: Run, size: int) -> str:
    """The arguments of `generate` for the sampler's distribution during training."""
    arguments: dict[str, Any] = {"do_sample": True, "temperature": run.training.temperature, "top_k": 0, "top_p": 1.0}
    threshold = run.vocabulary.threshold(size)
    if run.vocabulary.side != "trainer":
        if run.vocabulary.rule == "min_p":
            arguments["min_p"] = math.exp(threshold)
        elif run.vocabulary.rule in ("top_k", "top_p"):
            arguments[run.vocabulary.rule] = threshold
    arguments["max_new_tokens"] = run.training.max_new_tokens
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _evaluated(path: Path, run_folder: Path, record: RunRecord) -> dict[str, Any]:
    settings = read_evaluation_file(path)
    evaluation = settings.arrays()
    score = next((score for score in evaluation.scores if score.seed == record.seed), None)
    if score is None:
        raise DataError(f"{path}: holds no policy of seed {record.seed}")
    policy = digest_of(read_manifest(run_folder / MANIFEST).digests("policy"))
    if (given := read_manifest(manifest_of(path)).evaluated(record.seed)) is None:
        raise DataError(f"{manifest_of(path)}: does not say which policy of seed {record.seed} was evaluated")
    if given != policy:
        raise DataError(f"{path}: evaluated another policy than {run_folder / 'policy'}")
    return {"problems": len(evaluation.problems), "settings": settings, "score": score}

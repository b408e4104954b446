"""The model card of a trained policy: README.md in its folder, made from the files that its training left."""

import json
import math
from pathlib import Path
from typing import Any

import yaml
from jinja2 import UndefinedError

from tailrl.config.jobs import Run
from tailrl.runtime.errors import StudyError, reason
from tailrl.runtime.templates import renderer
from tailrl.tracking.metrics import REWARD

MEAN_OVER = 10
"""Steps at either end of the run that the rewards in a card are means over."""

render = renderer(Path(__file__).parent)


def write_card(run_folder: Path, evaluation: Path | None = None) -> Path:
    """Write the card into the policy's folder, from `run.json` and `metrics.jsonl` beside it; returns its path.

    Args:
        run_folder: what training wrote: `policy/`, `run.json`, `metrics.jsonl`.
        evaluation: the summary of the arm's evaluation; None while there is none.

    Raises:
        StudyError: a file cannot be read.
    """
    record, config = _json(run_folder / "run.json"), _json(run_folder / "policy" / "config.json")
    try:
        run = Run.model_validate(record["settings"])
        steps = [json.loads(line) for line in _text(run_folder / "metrics.jsonl").splitlines()]
        found = None if evaluation is None else _json(evaluation)
        chat = (run_folder / "policy" / "chat_template.jinja").is_file()
        text = _card(record, run, config["vocab_size"], chat, [step[REWARD] for step in steps], found)
    except (KeyError, TypeError, ValueError, UndefinedError) as error:
        raise StudyError(f"{run_folder}: no model card can be made of it: {reason(error)}") from None
    path = run_folder / "policy" / "README.md"
    path.write_text(text, encoding="utf-8")
    return path


def _card(
    record: dict[str, Any], run: Run, size: int, chat: bool, rewards: list[float], evaluation: dict[str, Any] | None
) -> str:
    metadata: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    # A folder of this machine means nothing on another.
    if run.policy.source == "pretrained" and not Path(run.policy.path).exists():
        metadata["base_model"] = run.policy.path
    metadata["tags"] = ["reinforcement-learning", run.estimator, run.vocabulary.rule]
    blocks = run.model_dump(mode="json", exclude_none=True, include=set(Run.model_fields) - {"study", "arm"})
    ends = [sum(part) / len(part) for part in (rewards[:MEAN_OVER], rewards[-MEAN_OVER:])]
    [policy] = [None] if evaluation is None else [p for p in evaluation["policies"] if p["seed"] == record["seed"]]
    return render(
        "model_card.md.j2",
        record=record,
        run=run,
        metadata=yaml.safe_dump(metadata, sort_keys=False),
        chat=chat,
        arguments=_arguments(run, size),
        steps=len(rewards),
        ends=ends,
        mean_over=min(MEAN_OVER, len(rewards)),
        settings=yaml.safe_dump(blocks, sort_keys=False),
        evaluation=evaluation,
        policy=policy,
    )


def _arguments(run: Run, size: int) -> str:
    """Of `generate`: the distribution that the rollouts were drawn from."""
    arguments: dict[str, Any] = {"do_sample": True, "temperature": run.training.temperature, "top_k": 0, "top_p": 1.0}
    threshold = run.vocabulary.threshold(size)
    if run.vocabulary.side != "trainer":
        if run.vocabulary.rule == "min_p":
            arguments["min_p"] = math.exp(threshold)
        elif run.vocabulary.rule in ("top_k", "top_p"):
            arguments[run.vocabulary.rule] = threshold
    arguments["max_new_tokens"] = run.training.max_new_tokens
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StudyError(f"{path}: cannot be read: {reason(error)}") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_text(path))
    except ValueError as error:
        raise StudyError(f"{path}: not JSON: {reason(error)}") from None
    if not isinstance(found, dict):
        raise StudyError(f"{path}: not a JSON object")
    return found

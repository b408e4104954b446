"""The model card of a trained policy: README.md in its folder, from the files of its training."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tailrl.artifacts.evaluation import read_evaluation, read_evaluation_file
from tailrl.artifacts.files import parse_object, read_text
from tailrl.artifacts.metrics import read_metrics
from tailrl.artifacts.records import RunRecord, read_record
from tailrl.config.arm import Vocabulary
from tailrl.config.jobs import Run
from tailrl.runtime.errors import StudyError
from tailrl.tracking.metrics import REWARD

MEAN_OVER = 10
"""Steps at either end of a run over which a card gives the mean reward."""

UNKNOWN = "This card was written when training ended. The study that trained the policy evaluates it afterwards."

CARD = """\
---
{metadata}---

# {title}

A causal language model in Hugging Face format: {base}. Its task was `{task}`, with a reward of 1 for a right answer;
the arm is called `{arm}`.

## Sampling

{mask}

```python
{code}```

## Training

{steps} steps, {prompts} prompts a step, {group} responses each. {rewards} Sampled by {engine}.

Settings:

```yaml
{settings}```

{commit}

| | version |
| --- | --- |
{versions}

## Evaluation

{evaluation}
"""

CODE = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder, or the model's name on a hub
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
prompt = "..."  # as the task writes it
{inputs}
tokens = model.generate(**inputs, {settings})
print(tokenizer.decode(tokens[0, inputs["input_ids"].shape[1]:]))
"""
PLAIN = 'inputs = tokenizer(prompt, return_tensors="pt")'
CHAT = """\
inputs = tokenizer.apply_chat_template(
    [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
)"""


def write_card(run_folder: Path, evaluation: Path | None = None) -> Path:
    """Write the card into the policy's folder, from `run.json` and `metrics.jsonl` beside it; returns its path.

    Args:
        run_folder: what training wrote: `policy/`, `run.json`, `metrics.jsonl`.
        evaluation: the summary of the arm's evaluation; None while there is none.

    Raises:
        StudyError: a file cannot be read.
    """
    record, config = read_record(run_folder, RunRecord), run_folder / "policy" / "config.json"
    size = parse_object(read_text(config), config).get("vocab_size")
    if not isinstance(size, int):
        raise StudyError(f"{config}: has no vocab_size")
    rewards = read_metrics(run_folder).get(REWARD, np.zeros(0)).tolist()
    if not rewards:
        raise StudyError(f"{run_folder / 'metrics.jsonl'}: has no {REWARD}")
    chat = (run_folder / "policy" / "chat_template.jinja").is_file()
    found = None if evaluation is None else _evaluated(evaluation, record.seed)
    text = _card(record, record.run, size, chat, rewards, found or UNKNOWN)
    path = run_folder / "policy" / "README.md"
    path.write_text(text, encoding="utf-8")
    return path


def _card(record: RunRecord, run: Run, size: int, chat: bool, rewards: list[float], evaluation: str) -> str:
    pretrained = run.policy.path if run.policy.source == "pretrained" else None
    metadata: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    # A local folder means nothing on another machine.
    if pretrained is not None and not Path(pretrained).exists():
        metadata["base_model"] = pretrained
    metadata["tags"] = ["reinforcement-learning", run.estimator, run.vocabulary.rule]
    ends = [sum(part) / len(part) for part in (rewards[:MEAN_OVER], rewards[-MEAN_OVER:])]
    dirty = ", with changes that were not committed" if record.dirty else ""
    versions = "\n".join(f"| {name} | {value} |" for name, value in record.versions.items() if value)
    blocks = run.model_dump(mode="json", exclude_none=True, include=set(Run.model_fields) - {"study", "arm"})
    return CARD.format(
        metadata=yaml.safe_dump(metadata, sort_keys=False),
        title=f"{run.study}: {run.arm}, seed {record.seed}",
        base=f"{pretrained}, trained further by reinforcement learning"
        if pretrained
        else "a Llama made for its study from nothing, trained on worked solutions and then by reinforcement learning",
        task=run.task.name,
        arm=run.arm,
        mask=_mask(run.vocabulary),
        code=CODE.format(inputs=CHAT if chat else PLAIN, settings=_arguments(run, size)),
        steps=len(rewards),
        prompts=run.training.prompts,
        group=run.training.group_size,
        rewards=f"The mean reward was {ends[0]:.3f} in the first {min(MEAN_OVER, len(rewards))} steps and "
        f"{ends[1]:.3f} in as many last ones.",
        engine=f"{run.sampler.engine} in {run.sampler.dtype}",
        settings=yaml.safe_dump(blocks, sort_keys=False),
        commit=f"Trained by tailrl at commit {record.commit}{dirty}."
        if record.commit
        else "The commit that trained it is not known.",
        versions=versions,
        evaluation=evaluation,
    )


def _mask(vocabulary: Vocabulary) -> str:
    """The sampler's distribution during training, in words."""
    if vocabulary.rule == "full" or vocabulary.side == "trainer":
        return "Rollouts were sampled from the full vocabulary: no mask is needed."
    number = {"top_k": f"k = {vocabulary.k}", "top_p": f"p = {vocabulary.p}"}.get(
        vocabulary.rule, f"ρ = {vocabulary.rho}"
    )
    text = f"Rollouts were sampled from a pruned vocabulary, {vocabulary.rule} with {number}: use the same mask."
    if vocabulary.adapt != "none":
        text += f" The threshold moved in training ({vocabulary.adapt}); this number is its start."
    if vocabulary.rule == "entropy":
        text += " `generate` has no such mask; the code below samples without one."
    return text


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


def _evaluated(path: Path, seed: int) -> str:
    evaluation, settings = read_evaluation(path), read_evaluation_file(path)
    score = next((score for score in evaluation.scores if score.seed == seed), None)
    if score is None:
        raise StudyError(f"{path}: holds no policy of seed {seed}")
    k = settings.samples_per_problem
    return (
        f"On {len(evaluation.problems)} held-out problems of `{settings.task}`, {k} samples each at temperature "
        f"{settings.temperature} from the full vocabulary: avg@{k} = {score.avg_at_k:.1%}, pass@{k} = "
        f"{score.pass_at_k:.1%}."
    )

"""The model card of a trained policy: README.md in its folder, made from the files that its training left."""

import json
import math
from pathlib import Path
from typing import Any

import yaml

from tailrl.config.arm import Vocabulary
from tailrl.config.jobs import Run
from tailrl.runtime.errors import StudyError, reason
from tailrl.tracking.metrics import REWARD

MEAN_OVER = 10
"""Steps at either end of the run that the rewards in a card are means over."""

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
    record, config = _json(run_folder / "run.json"), _json(run_folder / "policy" / "config.json")
    try:
        run = Run.model_validate(record["settings"])
        steps = [json.loads(line) for line in _text(run_folder / "metrics.jsonl").splitlines()]
        found = None if evaluation is None else _json(evaluation)
        chat = (run_folder / "policy" / "chat_template.jinja").is_file()
        text = _card(record, run, config["vocab_size"], chat, [step[REWARD] for step in steps], found)
    except (KeyError, TypeError, ValueError) as error:
        raise StudyError(f"{run_folder}: no model card can be made of it: {reason(error)}") from None
    path = run_folder / "policy" / "README.md"
    path.write_text(text, encoding="utf-8")
    return path


def _card(
    record: dict[str, Any], run: Run, size: int, chat: bool, rewards: list[float], evaluation: dict[str, Any] | None
) -> str:
    pretrained = run.policy.path if run.policy.source == "pretrained" else None
    metadata: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    # A folder of this machine means nothing on another.
    if pretrained is not None and not Path(pretrained).exists():
        metadata["base_model"] = pretrained
    metadata["tags"] = ["reinforcement-learning", run.estimator, run.vocabulary.rule]
    ends = [sum(part) / len(part) for part in (rewards[:MEAN_OVER], rewards[-MEAN_OVER:])]
    dirty = ", with changes that were not committed" if record["dirty"] else ""
    versions = "\n".join(f"| {name} | {value} |" for name, value in record["versions"].items() if value)
    blocks = run.model_dump(mode="json", exclude_none=True, include=set(Run.model_fields) - {"study", "arm"})
    return CARD.format(
        metadata=yaml.safe_dump(metadata, sort_keys=False),
        title=f"{run.study}: {run.arm}, seed {record['seed']}",
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
        commit=f"Trained by tailrl at commit {record['commit']}{dirty}."
        if record["commit"]
        else "The commit that trained it is not known.",
        versions=versions,
        evaluation=_evaluated(evaluation, record["seed"]),
    )


def _mask(vocabulary: Vocabulary) -> str:
    """What the rollouts were drawn from, in a sentence."""
    if vocabulary.rule == "full" or vocabulary.side == "trainer":
        return "Rollouts were drawn from the full vocabulary: no mask is needed."
    number = {"top_k": f"k = {vocabulary.k}", "top_p": f"p = {vocabulary.p}"}.get(
        vocabulary.rule, f"ρ = {vocabulary.rho}"
    )
    text = f"Rollouts were drawn from a pruned vocabulary, {vocabulary.rule} with {number}: sample with the same mask."
    if vocabulary.adapt != "none":
        text += f" The threshold moved in training ({vocabulary.adapt}); the number here is where it began."
    if vocabulary.rule == "entropy":
        text += " `generate` knows no such mask, and below samples without one."
    return text


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


def _evaluated(evaluation: dict[str, Any] | None, seed: int) -> str:
    if evaluation is None:
        return "This card was written when training ended. The study that trained the policy evaluates it afterwards."
    [policy] = [policy for policy in evaluation["policies"] if policy["seed"] == seed]
    k = evaluation["samples_per_problem"]
    return (
        f"On {len(policy['per_problem'])} held-out problems of `{evaluation['task']}`, {k} samples each at temperature "
        f"{evaluation['temperature']} from the full vocabulary: avg@{k} = {policy['avg_at_k']:.1%}, pass@{k} = "
        f"{policy['pass_at_k']:.1%}."
    )


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

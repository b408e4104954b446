"""Held-out evaluation: lm-eval over the engine that trained, k sampled responses for each problem.

lm-eval owns the documents, the repeats, the scoring and the aggregation (the task is eval_tasks/boxed.yaml, which
calls back into this module); the project's Sampler answers its requests. Every arm is sampled from its full
distribution, and a response's random stream depends on the problem and the repeat but not on the policy, so that
policies are compared on common random numbers.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from tailrl.errors import StudyError, reason, writing
from tailrl.guard import guarded
from tailrl.policy import (
    check_vocabulary,
    encode_prompt,
    load_config,
    load_policy,
    load_tokenizer,
    named_weights,
    required_length,
)
from tailrl.records import Problem, Request, Rollout, read_problems
from tailrl.rollout import Decoding, Sampler, make_sampler
from tailrl.seeding import derive_seed
from tailrl.settings import Evaluation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TASKS_FOLDER = Path(__file__).parents[1] / "eval_tasks"
TASK = "boxed"
FILTER = "responses"


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What evaluating an arm gives, ready for JSON.

    Attributes:
        summary: the settings (arm, task, samples_per_problem, temperature, max_new_tokens, sampler, seed,
            lm_eval_version) and `policies`, one record each: seed; avg_at_k and pass_at_k, fractions from 0 to 1, means
            over problems; response_length_mean, tokens with the end token; stopped_fraction, responses that ended by
            themselves; per_problem, records of id and correct (k zeros and ones, in the order of the repeats).
            `snapshots`, where there are any, holds likewise one record each, with the step.
        samples: one record per policy and problem: seed, id, answer, responses (k texts, in the same order), and of a
            snapshot its step.
    """

    summary: dict[str, Any]
    samples: list[dict[str, Any]]


# --- what the task definition calls ------------------------------------------------------------------


def documents(problems_file: str, **_metadata: object) -> dict[str, Any]:
    """The problems as lm-eval's test split, held in memory; raises StudyError where the file cannot be used.

    Not through the JSON loader of `datasets`: that one writes to a cache shared by all jobs and guesses types.
    """
    from datasets import Dataset

    return {"test": Dataset.from_list([asdict(problem) for problem in read_held_out(Path(problems_file))])}


def read_held_out(problems_file: Path) -> list[Problem]:
    """The problems of a file, by ids that differ; raises StudyError where it cannot be used."""
    problems = read_problems(problems_file)
    id_, count = Counter(problem.id for problem in problems).most_common(1)[0]
    if count > 1:
        raise StudyError(f"{problems_file}: {count} problems share the id {id_!r}, which must be unique")
    return problems


def process_results(doc: Mapping[str, str], results: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Scores of one problem; `results` holds one entry, the problem's k responses.

    pass@k is taken over exactly these k responses: 1 where any of them is right.
    """
    from tailrl.tasks.scoring import score

    correct = [int(score(response, doc["answer"], doc["compared"]) == 1.0) for response in results[0]]
    return {"avg_at_k": sum(correct) / len(correct), "pass_at_k": float(any(correct)), "correct": correct}


def count_correct(correct: Sequence[Sequence[int]]) -> int:
    """Right responses over all problems."""
    return sum(map(sum, correct))


# --- the policies ------------------------------------------------------------------------------------


def check_weights(folder: Path) -> None:
    """Raises StudyError where the folder's safetensors are missing, cut short or not safetensors; reads no tensor."""
    index = folder / "model.safetensors.index.json"
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"] if index.exists() else {}
        for name in sorted(set(weight_map.values())) or ["model.safetensors"]:
            with safe_open(folder / name, framework="pt"):
                pass
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise StudyError(f"{folder}: no weights could be read from it: {reason(error)}") from None


# --- lm-eval's model ---------------------------------------------------------------------------------


def make_requests(
    instances: Sequence[Any], tokenizer: "PreTrainedTokenizerBase", seed: int, max_length: int
) -> list[Request]:
    """One seeded request per lm-eval instance, in their order.

    lm-eval passes the same instance once for each repeat and keeps the answers in the order it passed them: the
    n-th time a problem comes is its repeat n. Raises StudyError where prompt and response may not fit `max_length`.
    """
    prompts: dict[str, tuple[int, ...]] = {}
    repeats: Counter[str] = Counter()
    requests = []
    for instance in instances:
        text, options = instance.args
        problem = instance.doc["id"]
        if problem not in prompts:
            prompts[problem] = tuple(encode_prompt(tokenizer, text))
            if len(prompts[problem]) + options["max_gen_toks"] > max_length:
                raise StudyError(
                    f"evaluation: the prompt of problem {problem!r} has {len(prompts[problem])} tokens, which with "
                    f"max_new_tokens = {options['max_gen_toks']} is more than the {max_length} that the policy supports"
                )
        requests.append(Request(prompts[problem], derive_seed("evaluation", seed, problem, repeats[problem])))
        repeats[problem] += 1
    return requests


def make_lm(sampler: Sampler, tokenizer: "PreTrainedTokenizerBase", settings: Evaluation, max_length: int) -> Any:
    """An lm-eval model that samples from all tokens with `sampler`; its `rollouts` are those of the last call.

    The settings give the seed of the samples, and how long they may take.
    """
    from lm_eval.api.model import LM

    class SamplerLM(LM):  # type: ignore[misc]  # lm-eval is untyped
        rollouts: list[Rollout]

        def generate_until(self, requests: list[Any]) -> list[str]:
            options = requests[0].args[1]
            decoding = Decoding(temperature=options["temperature"], max_new_tokens=options["max_gen_toks"])
            made = make_requests(requests, tokenizer, settings.seed, max_length)
            with guarded(settings.rollout_timeout, f"a batch of {len(made)} responses"):
                self.rollouts = sampler.generate(made, decoding)
            return [tokenizer.decode(list(rollout.tokens), skip_special_tokens=True) for rollout in self.rollouts]

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            raise NotImplementedError(f"a sampler does not score given text ({len(requests)} requests to do so)")

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            raise NotImplementedError(f"a sampler does not score given text ({len(requests)} requests to do so)")

    return SamplerLM()


# --- evaluating --------------------------------------------------------------------------------------


def load_tasks(problems_file: Path, settings: Evaluation) -> Any:
    """lm-eval's tasks by name, here the one, on this file with the study's k, temperature and length."""
    from lm_eval.tasks import TaskManager

    overrides = {
        "task": TASK,
        "dataset_kwargs": {"problems_file": str(problems_file)},
        "repeats": settings.samples,
        "filter_list": [{"name": FILTER, "filter": [{"function": "take_first_k", "k": settings.samples}]}],
        "generation_kwargs": {
            "until": [],
            "do_sample": True,
            "temperature": settings.temperature,
            "max_gen_toks": settings.max_new_tokens,
        },
    }
    manager = TaskManager(include_path=str(TASKS_FOLDER), include_defaults=False)
    # A group is how lm-eval lets one override the fields of a task that a file defines.
    return manager.load([{"group": "evaluation", "task": [overrides]}])["tasks"]


def evaluate(
    arm: str,
    policies: Sequence[tuple[int, Path]],
    problems_file: Path,
    settings: Evaluation,
    sampler: Sampler,
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
    snapshots: Sequence[tuple[int, int, Path]] = (),
) -> Evaluated:
    """Evaluates the policies of one arm, one after the other, in one engine: every one that it is given, alike.

    Args:
        arm: name of the arm, for the record.
        policies: training seed and Hugging Face folder of each policy; all of the architecture that `sampler` holds.
        problems_file: JSONL as `records.write_problems` makes it.
        settings: k, temperature, length and the seed of the samples.
        sampler: the engine; it is left with the last policy's weights.
        tokenizer: the tokenizer that the policies share.
        max_length: longest prompt and response together that the engine takes, tokens.
        snapshots: policies on the way: training seed, steps done, folder.

    Raises StudyError, before anything is sampled, for a problems file, a policy or a prompt that cannot be used.
    """
    from lm_eval import evaluate as run

    of_steps = [({"seed": seed, "step": step}, folder) for seed, step, folder in snapshots]
    every = [*(({"seed": seed}, folder) for seed, folder in policies), *of_steps]
    for _, folder in every:
        check_weights(folder)
    tasks = load_tasks(problems_file, settings)
    records, samples = [], []
    for whose, folder in every:
        # By way of the model, not straight from the file: a tied head is not in the file, and the engine needs it.
        policy = load_policy(folder)
        with guarded(settings.rollout_timeout, "the hand-over of the weights"):
            sampler.load_weights(named_weights(policy))
        lm = make_lm(sampler, tokenizer, settings, max_length)
        # Not simple_evaluate, which would add a survey of the machine, 3 s, to each policy.
        outcome = run(lm, {"tasks": tasks}, bootstrap_iters=0)
        scored = sorted(outcome["samples"][TASK], key=lambda sample: int(sample["doc_id"]))
        records.append(_record(whose, outcome["results"][TASK], scored, lm.rollouts))
        for sample in scored:
            (responses,) = sample["filtered_resps"]
            samples.append(
                {**whose, "id": sample["doc"]["id"], "answer": sample["doc"]["answer"], "responses": responses}
            )
    summary = {
        "arm": arm,
        "task": settings.task.name,
        "samples_per_problem": settings.samples,
        "temperature": settings.temperature,
        "max_new_tokens": settings.max_new_tokens,
        "sampler": settings.sampler.model_dump(mode="json"),
        "seed": settings.seed,
        "policies": records[: len(policies)],
        **({"snapshots": records[len(policies) :]} if snapshots else {}),
        "lm_eval_version": version("lm_eval"),
    }
    return Evaluated(summary, samples)


def _record(
    whose: Mapping[str, int],
    aggregates: Mapping[str, Any],
    scored: Sequence[Mapping[str, Any]],
    rollouts: Sequence[Rollout],
) -> dict[str, Any]:
    """One policy's entry of the summary, from lm-eval's aggregates and scored problems."""
    return {
        **whose,
        "avg_at_k": aggregates[f"avg_at_k,{FILTER}"],
        "pass_at_k": aggregates[f"pass_at_k,{FILTER}"],
        "response_length_mean": fmean(len(rollout.tokens) for rollout in rollouts),
        "stopped_fraction": fmean(rollout.stopped for rollout in rollouts),
        "per_problem": [{"id": sample["doc"]["id"], "correct": sample["correct"]} for sample in scored],
    }


def evaluate_arm(
    arm: str,
    policies: Sequence[tuple[int, Path]],
    problems_file: Path,
    settings: Evaluation,
    snapshots: Sequence[tuple[int, int, Path]] = (),
) -> Evaluated:
    """`evaluate` with the tokenizer of the first policy and an engine of its own; raises StudyError likewise."""
    folder = policies[0][1]
    check_weights(folder)
    tokenizer, problems, config = load_tokenizer(folder), read_held_out(problems_file), load_config(folder)
    check_vocabulary(config, tokenizer, folder)
    prompts = [encode_prompt(tokenizer, problem.prompt) for problem in problems]
    length = required_length(problems, prompts, settings.max_new_tokens, config)
    with guarded(settings.rollout_timeout, "the engine's start"):
        sampler = make_sampler(settings.sampler, folder, length, settings.seed)
    return evaluate(arm, policies, problems_file, settings, sampler, tokenizer, length, snapshots)


def write_results(evaluated: Evaluated, json_path: Path, samples_path: Path) -> None:
    """The summary as one JSON object, the samples as one JSON object a line."""
    for path in (json_path, samples_path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with writing(json_path):
        json_path.write_text(json.dumps(evaluated.summary, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    with writing(samples_path), samples_path.open("w", encoding="utf-8") as file:
        for sample in evaluated.samples:
            file.write(json.dumps(sample, ensure_ascii=False) + "\n")

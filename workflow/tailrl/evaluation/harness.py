"""lm-eval's side of the evaluation: the task `boxed`, its documents and scores, and an `LM` over a `Sampler`."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tailrl.config.jobs import Evaluation
from tailrl.model.policy import encode_prompt
from tailrl.rollout import Decoding, Sampler
from tailrl.rollout.types import Request, Rollout
from tailrl.runtime.errors import ConfigurationError, DataError
from tailrl.runtime.seeding import derive_seed
from tailrl.runtime.timeouts import guarded
from tailrl.tasks.problem import Problem, read_problems

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TASKS_FOLDER = Path(__file__).parents[2] / "eval_tasks"
TASK = "boxed"
FILTER = "responses"


def documents(problems_file: str, **_metadata: object) -> dict[str, Any]:
    """The problems as lm-eval's test split, in memory; raises StudyError for an unusable file.

    Without the JSON loader of `datasets`, which guesses types and writes to a cache that all jobs share.
    """
    from datasets import Dataset

    return {"test": Dataset.from_list([asdict(problem) for problem in read_held_out(Path(problems_file))])}


def read_held_out(problems_file: Path) -> list[Problem]:
    """The problems of a file; raises StudyError for an unusable file or an id given twice."""
    problems = read_problems(problems_file)
    id_, count = Counter(problem.id for problem in problems).most_common(1)[0]
    if count > 1:
        raise DataError(f"{problems_file}: {count} problems share the id {id_!r}, which must be unique")
    return problems


def process_results(doc: Mapping[str, Any], results: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Scores of one problem, whose k responses are the only entry of `results`; pass@k is 1 if any is right."""
    from tailrl.tasks.scoring import reward_of

    problem = Problem(**doc)
    correct = [int(reward_of(response, problem) == 1.0) for response in results[0]]
    return {"avg_at_k": sum(correct) / len(correct), "pass_at_k": float(any(correct)), "correct": correct}


def count_correct(correct: Sequence[Sequence[int]]) -> int:
    """Right responses over all problems."""
    return sum(map(sum, correct))


GREEDY = ("top_k", 1.0)
"""The safe set of a greedy response, the most probable token: any engine samples from it."""


def make_requests(
    instances: Sequence[Any],
    tokenizer: "PreTrainedTokenizerBase",
    seed: int,
    max_length: int,
    threshold: float = 0.0,
) -> list[Request]:
    """One seeded request per lm-eval instance, in their order, each with this threshold of its safe set.

    lm-eval passes an instance once for each repeat: a problem's n-th instance is its repeat n. Raises StudyError if
    prompt and response may exceed `max_length`.
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
                raise ConfigurationError(
                    f"the prompt of problem {problem!r} has {len(prompts[problem])} tokens, which with "
                    f"evaluation.max_new_tokens = {options['max_gen_toks']} is more than the {max_length} "
                    "that the policy supports"
                )
        own_seed = derive_seed("evaluation", seed, problem, repeats[problem])
        requests.append(Request(prompts[problem], own_seed, threshold))
        repeats[problem] += 1
    return requests


def make_lm(
    sampler: Sampler,
    tokenizer: "PreTrainedTokenizerBase",
    settings: Evaluation,
    max_length: int,
    safe_set: tuple[str, float] = ("full", 0.0),
) -> Any:
    """An lm-eval model that samples with `sampler` from a safe set, by its rule and threshold.

    `rollouts` holds the last call's.

    The settings give the seed of the samples and their timeout.
    """
    from lm_eval.api.model import LM

    class SamplerLM(LM):  # type: ignore[misc]  # lm-eval is untyped
        rollouts: list[Rollout]

        def generate_until(self, requests: list[Any]) -> list[str]:
            options = requests[0].args[1]
            rule, threshold = safe_set
            decoding = Decoding(options["temperature"], options["max_gen_toks"], rule)
            made = make_requests(requests, tokenizer, settings.seed, max_length, threshold)
            with guarded(settings.rollout_timeout, f"a batch of {len(made)} responses"):
                self.rollouts = sampler.generate(made, decoding)
            return [tokenizer.decode(list(rollout.tokens), skip_special_tokens=True) for rollout in self.rollouts]

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            raise NotImplementedError(f"a sampler does not score given text ({len(requests)} requests to do so)")

        loglikelihood_rolling = loglikelihood

    return SamplerLM()


def load_tasks(problems_file: Path, settings: Evaluation, samples: int) -> Any:
    """lm-eval's tasks by name: TASK alone, on this file, with so many samples, the study's temperature and length."""
    from lm_eval.tasks import TaskManager

    overrides = {
        "task": TASK,
        "dataset_kwargs": {"problems_file": str(problems_file)},
        "repeats": samples,
        "filter_list": [{"name": FILTER, "filter": [{"function": "take_first_k", "k": samples}]}],
        "generation_kwargs": {
            "until": [],
            "do_sample": True,
            "temperature": settings.temperature,
            "max_gen_toks": settings.max_new_tokens,
        },
    }
    manager = TaskManager(include_path=str(TASKS_FOLDER), include_defaults=False)
    # lm-eval overrides the fields of a file's task in a group.
    return manager.load([{"group": "evaluation", "task": [overrides]}])["tasks"]

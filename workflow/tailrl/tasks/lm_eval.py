"""Tasks of lm-eval by their names: its documents and prompts become problems, and its own filter and metric score.

A problem's id says which document of which task it is, so that any process can ask lm-eval for the verdict.
"""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from tailrl.config.tasks.lm_eval import LmEvalTask
from tailrl.runtime.errors import ConfigurationError, StudyError, few, one_line, reason
from tailrl.tasks.loaded import Loaded
from tailrl.tasks.problem import Problem

VERDICT = "tailrl.tasks.lm_eval:verdict"
"""How such a problem's responses are compared: `tasks.scoring.reward_of` calls it."""


def load(task: LmEvalTask) -> Loaded:
    """The task's documents, in its order; raises StudyError where lm-eval has no such task, or no data for it."""
    key = _key(task)
    made = _loaded(key)
    number = len(made.instances) if task.problems is None else task.problems
    problems = []
    for place, instance in enumerate(made.instances[:number]):
        answer = made.task.doc_to_target(instance.doc)
        problems.append(Problem(f"{key}#{place}", instance.args[0], str(answer), compared=VERDICT))
    return Loaded(problems)


def download(task: LmEvalTask) -> str:
    """Fetch the task's data into the Hugging Face cache; returns the task's name."""
    _loaded(_key(task))
    return task.task


def verdict(prompt: str, response: str, row: Mapping[str, Any]) -> float:
    """What lm-eval's own filter and metric say of a response: 0 to 1. The response ends at the task's stop words."""
    from lm_eval.api.instance import Instance

    key, _, place = row["id"].rpartition("#")
    made = _loaded(key)
    doc = made.instances[int(place)].doc
    for word in made.task.config.generation_kwargs.get("until") or ():
        response = response.split(word)[0]
    asked = Instance("generate_until", doc, (prompt, {}), 0, resps=[response])
    made.chosen_filter.apply([asked])
    scores = made.task.process_results(doc, [asked.filtered_resps[made.chosen_filter.name]])
    return float(scores[made.metric])


class Made:
    """A task of lm-eval, its requests, and the filter and the metric that score."""

    def __init__(self, task: Any, settings: Mapping[str, Any]) -> None:
        self.task = task
        self.instances = task.instances
        filters = {one.name: one for one in task._filters}
        metrics = [entry["metric"] for entry in task.config.metric_list or ()]
        name = settings["task"]
        self.chosen_filter = _chosen(filters, settings.get("filter", list(filters)[-1]), "filter", name)
        self.metric = _chosen({one: one for one in metrics}, settings.get("metric", metrics[0]), "metric", name)


def _chosen(known: Mapping[str, Any], name: str, what: str, task: str) -> Any:
    if name not in known:
        raise ConfigurationError(f"task.{what}: {task} has no {what} {one_line(name)}; it has {few(list(known))}")
    return known[name]


def _key(task: LmEvalTask) -> str:
    """The settings that say what the task is, as text."""
    names = {"task", "filter", "metric", "fewshot", "path"}
    return json.dumps(task.model_dump(include=names, exclude_none=True), ensure_ascii=False)


@cache
def _manager() -> Any:
    """lm-eval's index of its tasks, which takes seconds to make."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


@cache
def _loaded(key: str) -> Made:
    settings = json.loads(key)
    name = settings["task"]
    manager = _manager()
    if name not in manager.all_subtasks:
        raise ConfigurationError(f"task.task: lm-eval knows no task {one_line(name)}")
    overrides: dict[str, Any] = {"task": name, "repeats": 1}
    if "fewshot" in settings:
        overrides["num_fewshot"] = settings["fewshot"]
    if "path" in settings:
        overrides |= _of_file(settings["path"])
    try:
        task = manager.load([{"group": "study", "task": [overrides]}])["tasks"][name]
        if task.OUTPUT_TYPE != "generate_until":
            raise ConfigurationError(
                f"task.task: {name} scores given answers ({task.OUTPUT_TYPE}); a sampler only generates"
            )
        task.build_all_requests(rank=0, world_size=1)
    except StudyError:
        raise
    except Exception as error:  # lm-eval, datasets and the hub have errors of their own
        raise ConfigurationError(f"task.task: lm-eval does not give {name}: {reason(error)}") from error
    return Made(task, settings)


def _of_file(path: str) -> dict[str, Any]:
    """Overrides by which a task has a file of its columns in place of its data set."""
    kind = "parquet" if path.endswith(".parquet") else "json"
    splits = {"training_split": None, "validation_split": None, "fewshot_split": None, "test_split": "test"}
    return {"dataset_path": kind, "dataset_name": None, "dataset_kwargs": {"data_files": {"test": path}}, **splits}

"""The tasks: each is a module of this package, named like its settings' module.

A module of generated problems has `draw(rng, settings) -> Problem`; one of a data set has `HUB_NAME` and `SPLIT` on the
Hugging Face hub, and `read_row(row)`, which gives a row's id, problem and answer.
"""

import itertools
from dataclasses import replace
from importlib import import_module

from tailrl.config.tasks import DataSetTask, GeneratedTask, ImportedTask, Task
from tailrl.config.tasks.lm_eval import LmEvalTask
from tailrl.runtime.errors import ConfigurationError, one_line
from tailrl.runtime.import_path import called
from tailrl.tasks.loaded import Loaded, generated
from tailrl.tasks.problem import Problem
from tailrl.tasks.sources import fetch, make_problems, read_rows


def load_task(task: Task) -> Loaded:
    """The problems that a task's settings name; raises StudyError if there are none."""
    if isinstance(task, ImportedTask):
        loaded = own_problems(task)
    else:
        module = import_module(f"tailrl.tasks.{task.name}")
        if isinstance(task, GeneratedTask):
            loaded = generated(task, module.draw)
        elif isinstance(task, DataSetTask) and not isinstance(task, LmEvalTask):
            rows = read_rows(task.path, module.HUB_NAME, module.SPLIT)
            loaded = make_problems(rows, module.read_row, task.path or module.HUB_NAME, task.problems)
        else:
            loaded = module.load(task)
    if task.reward is None:
        return loaded
    return replace(loaded, problems=[replace(problem, compared=task.reward) for problem in loaded.problems])


def own_problems(task: ImportedTask) -> Loaded:
    """The problems that a function of the user's gives.

    Raises:
        StudyError: it fails, or gives too few problems, or none that can be used.
    """
    rows = called(task.name, problems=task.problems, seed=task.seed, **task.options)
    problems: list[Problem] = []
    for number, row in enumerate(itertools.islice(rows, task.problems)):
        try:
            problems.append(row if isinstance(row, Problem) else Problem(**{"id": str(number), **row}))
        except TypeError as error:
            raise ConfigurationError(f"{task.name}: problem {number}: {one_line(error)}") from None
    if len(problems) < task.problems:
        raise ConfigurationError(f"{task.name}: gives {len(problems)} problems, and {task.problems} are asked for")
    return Loaded(problems)


def download_task(task: Task) -> str | None:
    """Fetch the task's data set into the Hugging Face cache, for nodes without a network.

    Returns:
        The data set's name; None for generated problems and local files.

    Raises:
        StudyError: the hub is out of reach.
    """
    if not isinstance(task, DataSetTask) or task.path is not None:
        return None
    module = import_module(f"tailrl.tasks.{task.name}")
    if isinstance(task, LmEvalTask):
        return str(module.download(task))
    fetch(module.HUB_NAME, module.SPLIT)
    return str(module.HUB_NAME)

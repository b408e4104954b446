"""The tasks: each is a module of this package, named like its settings' module, with `load(settings) -> Loaded`; a data
set of the Hugging Face hub also has `HUB_NAME` and `SPLIT`."""

from importlib import import_module

from tailrl.config.tasks import DataSetTask, Task
from tailrl.tasks.loaded import Loaded
from tailrl.tasks.sources import fetch


def load_task(task: Task) -> Loaded:
    """The problems that a task's settings name; raises StudyError if there are none."""
    loaded: Loaded = import_module(f"tailrl.tasks.{task.name}").load(task)
    return loaded


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
    fetch(module.HUB_NAME, module.SPLIT)
    return str(module.HUB_NAME)

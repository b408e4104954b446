"""A task of lm-eval by its name."""

from typing import Literal

from pydantic import Field

from tailrl.config.base import MOST_PROBLEMS
from tailrl.config.tasks import DataSetTask


class LmEvalTask(DataSetTask):
    """Any generative task that the installed lm-eval knows, with its own prompts, stop words, filters and verdicts."""

    name: Literal["lm_eval"]
    task: str = Field(min_length=1, description="lm-eval's name of it, such as gsm8k, minerva_math_algebra or aime25")
    filter: str | None = Field(None, description="lm-eval's name of the filter; null: the task's last one")
    metric: str | None = Field(None, description="lm-eval's name of the metric; null: the task's first one")
    fewshot: int | None = Field(
        None, ge=0, le=MOST_PROBLEMS, description="solved examples in a prompt; null: the task's own number"
    )

"""AIME 2025."""

from typing import Literal

from tailrl.config.tasks import DataSetTask


class Aime25Task(DataSetTask):
    """math-ai/aime25: the 30 problems of AIME 2025, answers from 0 to 999."""

    name: Literal["aime25"]

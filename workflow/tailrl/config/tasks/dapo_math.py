"""Competition mathematics."""

from typing import Literal

from tailrl.config.tasks import DataSetTask


class DapoMathTask(DataSetTask):
    """BytedTsinghua-SIA/DAPO-Math-17k: competition mathematics with integer answers."""

    name: Literal["dapo_math"]

"""The reward of a study's problems as verl's `compute_score`: verl loads this file by its path."""

from collections.abc import Mapping
from typing import Any

from tailrl.tasks.problem import Problem
from tailrl.tasks.scoring import reward_of


def compute_score(
    data_source: str,  # noqa: ARG001 verl gives all of them by name
    solution_str: str,
    ground_truth: str,  # noqa: ARG001
    extra_info: Mapping[str, Any] | None = None,
    **_: Any,
) -> float:
    """The reward, 0 to 1, of a response to the problem whose fields are `extra_info["problem"]`."""
    return reward_of(solution_str, Problem(**(extra_info or {})["problem"]))

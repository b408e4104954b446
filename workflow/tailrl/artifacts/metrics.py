"""metrics.jsonl: one line of numbers per step of a run. The only reader and writer of these files."""

import io
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tailrl.artifacts.files import parse_object
from tailrl.artifacts.manifest import read_vouched
from tailrl.runtime.errors import DataError
from tailrl.runtime.jsonl import numbered_lines
from tailrl.tracking.metrics import CATALOGUE, REWARD, STEP

FloatArray = NDArray[np.float64]
Metrics = Mapping[str, FloatArray]
"""By key, (N,) over the steps; NaN where a step lacks the key."""

StepMetrics = dict[str, float | None]
"""What one step logged; None for a value that was not finite."""


def metrics_line(metrics: Mapping[str, float]) -> str:
    """A step's line; values that are not finite become null, since JSON has no NaN."""
    return json.dumps({name: value if math.isfinite(value) else None for name, value in metrics.items()}) + "\n"


def follow_metrics(path: Path, ended: Callable[[], bool]) -> Iterator[StepMetrics]:
    """The steps of a growing file, each once its line is complete, until its writer has ended."""
    with path.open(encoding="utf-8") as file:
        part, over = "", False
        while not over:
            over = ended()  # asked before reading, so that the last lines are read too
            *lines, part = (part + file.read()).split("\n")
            yield from (parse_object(line, path) for line in lines)


def read_steps(job: Path) -> list[StepMetrics]:
    """Every step of a finished run.

    Raises:
        StudyError: the file is missing or empty, a line is not an object of numbers, a step is missing, a reward does
            not lie between 0 and 1, or another metric has a value that cannot be (`range` in tracking/metrics.yaml).
    """
    path = job / "metrics.jsonl"
    points: list[StepMetrics] = []
    for step, (number, line) in enumerate(numbered_lines(io.BytesIO(read_vouched(path)), path)):
        where = f"{path}, line {number}"
        try:
            point = parse_object(line, where)
            if not all(value is None or type(value) in (int, float) for value in point.values()):
                raise TypeError
            list(map(float, filter(None, point.values())))
        except (DataError, TypeError, ValueError, OverflowError):  # a whole number may be larger than any float
            raise DataError(f"{where}: not a JSON object of numbers") from None
        if point.get(STEP) != step:
            raise DataError(f"{where}: {STEP} is {point.get(STEP)}, not {step}")
        reward = point.get(REWARD, 0.0)
        if reward is None or not 0 <= reward <= 1:
            raise DataError(f"{where}: {REWARD} is {reward}, but rewards lie between 0 and 1")
        for key, value in point.items():
            known = CATALOGUE.get(key)
            if value is not None and known is not None and (why := known.refusal(value)):
                raise DataError(f"{where}: {key} is {value:g}, and {why}")
        points.append(point)
    if not points:
        raise DataError(f"{path}: holds no training step")
    return points


def read_metrics(job: Path) -> Metrics:
    """Every step of a finished run, by key; raises StudyError like `read_steps`."""
    points = [{key: math.nan if value is None else value for key, value in point.items()} for point in read_steps(job)]
    keys = dict.fromkeys(key for point in points for key in point)
    return {key: np.array([point.get(key, math.nan) for point in points], dtype=np.float64) for key in keys}

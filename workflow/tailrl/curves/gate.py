"""The gate for curves: is a logged metric within a limit at the end of the run?"""

import math
from collections.abc import Iterable

import numpy as np

from tailrl.curves.reading import Reading, RunReading, last_tenth
from tailrl.diagnosis.gate import CANNOT_TELL, Judgement, Limit, judge_number
from tailrl.stats.intervals import LEVEL, NO_INTERVAL, Interval


def judge_curves(reading: Reading, limits: Iterable[Limit]) -> list[Judgement]:
    """A judgement on each limit, for each run: on the median of the last tenth of the steps.

    Its interval is that of a median of independent values; fewer than six have none, and the median itself decides.
    """
    return [_judge(run, limit) for limit in limits for run in reading.runs]


def _judge(run: RunReading, limit: Limit) -> Judgement:
    logged = [run.main, *run.others]
    named = [told for told in logged if limit.name in (told.curve.name, told.metric.name)]
    fitting = named or [told for told in logged if told.metric.of == limit.of]
    where = f"{run.run}: " if run.run else ""
    if not fitting:
        names = ", ".join(told.curve.name for told in logged)
        return Judgement(limit, NO_INTERVAL, CANNOT_TELL, f"{where}{limit.name} is not among the curves: {names}.")
    found = judge_number(limit, median_interval(last_tenth(fitting[0].curve.value_N)))
    return Judgement(found.limit, found.value, found.code, where + found.words)


def median_interval(value_N: np.ndarray) -> Interval:
    """The median with its interval by order statistics; NaN ends for fewer than six values."""
    ordered = np.sort(value_N)
    count = len(ordered)
    if not count:
        return NO_INTERVAL
    below = np.cumsum([math.comb(count, n) for n in range(count)]) / 2.0**count
    cut = int((below <= LEVEL / 2).sum())
    low, high = (float(ordered[cut - 1]), float(ordered[-cut])) if cut else (math.nan, math.nan)
    return Interval(float(np.median(ordered)), low, high, count)

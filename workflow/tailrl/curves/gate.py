"""The gate for curves: is a logged metric within a limit at the end of the run?"""

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from tailrl.curves.reading import LAST, MetricReading, Reading, RunReading, last_points, last_tenth, median_of
from tailrl.diagnosis.gate import BEYOND, CANNOT_TELL, WITHIN, Judgement, Limit, judge_number
from tailrl.page_parts.number_text import count, short
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
    found = _at_end(limit, fitting[0])
    return Judgement(found.limit, found.value, found.code, where + found.words)


def _at_end(limit: Limit, told: MetricReading) -> Judgement:
    """The judgement on a curve's last tenth: never within, where its very end or a NaN there says otherwise."""
    value_N = told.curve.value_N
    found = judge_number(limit, median_interval(last_tenth(value_N)))
    now = judge_number(limit, Interval(median_of(last_points(value_N)), math.nan, math.nan, LAST))
    end_N = value_N[-max(1, len(value_N) // 10) :]
    unsound = int((~np.isfinite(end_N)).sum())
    words = ""
    if unsound:
        words = f"{limit.name} cannot be told: {unsound} of the last {count(len(end_N), 'step')} are NaN or infinite."
    elif told.impossible:
        words = f"{limit.name} cannot be told: the logged value is {short(told.level)}, and it is never below 0."
    elif now.code == BEYOND:  # too few points for a verdict, and too many for chance
        words = f"In the last {LAST} steps {now.words}"
    return replace(found, code=CANNOT_TELL, words=words) if words and found.code == WITHIN else found


def median_interval(value_N: np.ndarray) -> Interval:
    """The median with its interval by order statistics; NaN ends for fewer than six values."""
    ordered = np.sort(value_N)
    size = len(ordered)
    if not size:
        return NO_INTERVAL
    below = np.cumsum([math.comb(size, n) for n in range(size)]) / 2.0**size
    cut = int((below <= LEVEL / 2).sum())
    low, high = (float(ordered[cut - 1]), float(ordered[-cut])) if cut else (math.nan, math.nan)
    return Interval(float(np.median(ordered)), low, high, size)

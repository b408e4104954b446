"""What curves alone say of a mismatch: its size, by which rule, since when, what its shape rules out, what to do."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from pydantic import Field

from tailrl.artifacts.files import Record
from tailrl.artifacts.metrics import FloatArray
from tailrl.curves.history import TENSORBOARD, Curve, History
from tailrl.curves.names import KNOWN, OWN_ROLES, Metric, Names, metrics
from tailrl.curves.shapes import Shape, shape_of
from tailrl.diagnosis.metrics import Rule
from tailrl.diagnosis.sizes import Band, band_of, sizes
from tailrl.runtime.data_files import yaml_beside
from tailrl.runtime.errors import ConfigurationError, DataError

# What each quantity is as a k3 in nats, roughly: k3 is about half the mean square of Δ, and mean |Δ| about its root.
AS_K3: dict[str, Callable[[float], float]] = {
    "k3": lambda value: value,
    "k3_reverse": lambda value: value,
    "abs_logp": lambda value: value**2,
    "response_abs_logp": lambda value: value**2,
    "k2": lambda value: value,
    "k1": abs,
    "js": lambda value: 4 * value,
    "chi2_token": lambda value: value / 2,
}
EXACT = ("k3",)  # of AS_K3: what needs no conversion
BY_RULE = ("abs_prob", "error_factor")  # sizes of their own, which only a framework's rule judges
LAST = 3  # points at the end of a curve that may differ from its last tenth
SHAPED = (*AS_K3, *BY_RULE)  # whose shape is told, the best first
OF_CURVES = (*SHAPED, *OWN_ROLES)  # what `--columns` may name in a file of metrics
NEVER_NEGATIVE = tuple(name for name in SHAPED if name not in ("k1", "chi2_token"))  # the others may be by chance


class ShapeWords(Record):
    """What is said of a shape: see `shapes.yaml`."""

    says: str
    fits: list[str]
    excludes: list[str] = Field(alias="not")
    look: str


class Shapes(Record):
    """`shapes.yaml`."""

    shapes: dict[str, ShapeWords]
    causes: dict[str, str]


@cache
def shape_words() -> Shapes:
    """The words for shapes and causes."""
    return Shapes.model_validate(yaml_beside(__file__, "shapes.yaml"))


@dataclass(frozen=True, slots=True)
class MetricReading:
    """One metric of one run.

    Attributes:
        curve: its values. metric: what it is.
        shape: its shape. k3: nats, its present level as a k3; NaN where it cannot be told.
        rules: the framework's own rules of thumb, each with whether its present level is within it.
        unsound: steps whose value is NaN or infinite. ended: the step from which on all are; NaN: the last one is a
            number.
    """

    curve: Curve
    metric: Metric
    shape: Shape
    level: float
    k3: float
    rules: tuple[tuple[Rule, bool], ...]
    unsound: int
    ended: float

    @property
    def impossible(self) -> bool:
        """Whether the present level is below 0, by more than rounding, and the quantity cannot be."""
        return self.metric.of in NEVER_NEGATIVE and self.level < -sizes().bands[0].below


@dataclass(frozen=True, slots=True)
class RunReading:
    """What the curves of one run say.

    Attributes:
        run: its name; empty where a file has one run.
        main: the metric that the words below are about.
        others: the run's other known metrics.
        band: the main metric's size; None: only its framework's own rules judge it.
        idle: whether the learning rate was 0 at every step where it was logged.
        restarts: the steps at which the log goes back.
    """

    run: str
    main: MetricReading
    others: tuple[MetricReading, ...]
    band: Band | None
    idle: bool
    restarts: tuple[float, ...]

    @property
    def shape(self) -> str:
        """The key of the words for the main metric's shape."""
        grows = self.main.shape.name in ("growth", "rise")
        return "growth_without_updates" if self.idle and grows else self.main.shape.name


@dataclass(frozen=True, slots=True)
class Reading:
    """What a file of metrics says of the mismatch, run by run."""

    where: str
    kind: str
    runs: tuple[RunReading, ...]


def own_names(columns: Mapping[str, str]) -> Names:
    """What a user calls metrics, the step and the learning rate, ours to the file's.

    Raises:
        StudyError: some are of curves, and others of a log of tokens.
    """
    strange = [role for role in columns if role not in OF_CURVES]
    if strange and any(role in SHAPED for role in columns):
        raise ConfigurationError(f"--columns: {strange[0]} is of a log of tokens, and the others of curves")
    return KNOWN if strange else Names(columns)


def together(histories: Sequence[History]) -> History:
    """Several files as one. A file without names of runs gives its own name; TensorBoard's files are of one run."""
    if len(histories) == 1:
        return histories[0]
    curves: list[Curve] = []
    restarts: dict[str, tuple[float, ...]] = {}
    for history in histories:
        own = "" if history.kind == TENSORBOARD else Path(history.where).stem
        curves += [replace(curve, run=curve.run or own) for curve in history.curves]
        restarts |= {run or own: steps for run, steps in history.restarts.items()}
    where = ", ".join(history.where for history in histories)
    return History(where, histories[0].kind, tuple(curves), restarts)


def read_curves(history: History, names: Names = KNOWN) -> Reading:
    """What the curves of a history say.

    Raises:
        StudyError: no curve has a metric of the mismatch.
    """
    by_run: dict[str, list[Curve]] = {}
    for curve in history.curves:
        by_run.setdefault(curve.run, []).append(curve)
    readings = [_read_run(run, curves, history, names) for run, curves in by_run.items()]
    found = tuple(reading for reading in readings if reading is not None)
    if not found:
        logged = sorted({curve.name for curve in history.curves})
        some = ", ".join(logged[:4]) + (", ..." if len(logged) > 4 else "")
        raise DataError(
            f"{history.where}: is {history.kind} without a metric of the mismatch: it has {some or 'no numbers'}; "
            f"known are {_examples()}; --columns k3=NAME says which of yours is one"
        )
    return Reading(history.where, history.kind, found)


def _examples() -> str:
    by_framework: dict[str, str] = {}
    for name, metric in metrics().items():
        if metric.of in SHAPED:
            by_framework.setdefault(metric.framework, name)
    return ", ".join(f"{name} ({framework})" for framework, name in by_framework.items())


def _read_run(run: str, curves: Iterable[Curve], history: History, names: Names) -> RunReading | None:
    told = []
    rates: list[Curve] = []
    for curve in curves:
        if names.is_learning_rate(curve.name):
            rates.append(curve)
        elif (metric := names.metric(curve.name)) is not None:
            told.append(_tell(curve, metric))
    judged = [one for one in told if one.metric.of in SHAPED]
    if not judged:
        return None
    main = min(judged, key=lambda one: (SHAPED.index(one.metric.of), -len(one.curve.step_N)))
    band = None
    if math.isfinite(main.k3) and not main.impossible:
        band = band_of(main.k3)
    idle = bool(rates) and all(bool((curve.value_N == 0).all()) for curve in rates)
    others = tuple(one for one in told if one is not main)
    return RunReading(run, main, others, band, idle, history.restarts.get(run, ()))


def size_at_end(value_N: FloatArray, best: float = 0.0) -> float:
    """The present level: the median of the last tenth, or that of the last points if it is farther from `best`."""
    levels = [median_of(values_N) for values_N in (last_tenth(value_N), last_points(value_N))]
    return max(levels, key=lambda level: abs(level - best))


def median_of(value_N: FloatArray) -> float:
    """The median; NaN of no value."""
    return float(np.median(value_N)) if len(value_N) else math.nan


def last_points(value_N: FloatArray) -> FloatArray:
    """The last finite values of a curve, LAST of them: what a run does right now."""
    finite: FloatArray = value_N[np.isfinite(value_N)]
    return finite[-LAST:]


def last_tenth(value_N: FloatArray) -> FloatArray:
    """The finite values of a curve's last tenth, at least one if there is any."""
    finite: FloatArray = value_N[np.isfinite(value_N)]
    return finite[-max(1, len(finite) // 10) :]


def _tell(curve: Curve, metric: Metric) -> MetricReading:
    best = 1.0 if metric.of == "error_factor" else 0.0
    size_N = np.abs(curve.value_N - best)
    shape = shape_of(curve.step_N, size_N)
    level = size_at_end(curve.value_N, best) if metric.of in SHAPED else median_of(last_tenth(curve.value_N))
    rules = tuple((rule, rule.holds(level)) for rule in metric.rules)
    convert = AS_K3.get(metric.of)
    k3 = convert(level) if convert is not None and math.isfinite(level) else math.nan
    unsound_N = ~np.isfinite(curve.value_N)
    sound = np.flatnonzero(~unsound_N)
    ended = float(curve.step_N[sound[-1] + 1]) if len(sound) and unsound_N[-1] else math.nan
    return MetricReading(curve, metric, shape, level, k3, rules if len(sound) else (), int(unsound_N.sum()), ended)

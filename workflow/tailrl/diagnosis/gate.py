"""A gate for CI: is a number of the mismatch within a limit? `tailrl diagnose --max k3=1e-3 --min ess=0.5`."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tailrl.diagnosis.exact_checks import Fault
from tailrl.diagnosis.measure import TOKEN, Measured
from tailrl.diagnosis.metrics import OTHERS, frameworks, quantity
from tailrl.page_parts.number_text import short
from tailrl.runtime.errors import ConfigurationError, one_line
from tailrl.stats.intervals import Interval

WITHIN, BEYOND, CANNOT_TELL = 0, 1, 2  # exit codes
WORDS: dict[int, Literal["within", "beyond", "cannot tell"]] = {0: "within", 1: "beyond", 2: "cannot tell"}
SHORT_NAMES = {"ess": "ess_token", "kl": "k1", "abs_diff": "abs_logp"}
MORE_IS_BETTER = ("ess_token", "ess_truncated", "ess_seq", "pearson")
EXTREMES = ("abs_logp_max", "abs_prob_max", "ratio_max", "ratio_min")
HIDING = ("copy", "constant", "negative", "probabilities", "padding")  # faults after which numbers are too small
Side = Literal["max", "min"]


@dataclass(frozen=True, slots=True)
class Limit:
    """A number's limit; `of`: our name of the quantity, `name`: the user's."""

    name: str
    of: str
    side: Side
    value: float


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether a number is within its limit: WITHIN, BEYOND or CANNOT_TELL, and why in one sentence."""

    limit: Limit
    value: Interval
    code: int
    words: str


def read_limits(largest: Sequence[str], least: Sequence[str]) -> list[Limit]:
    """The limits of options such as `k3=1e-3`: of `--max` and of `--min`.

    Raises:
        StudyError: an option has another form, names no known number, or is of the side on which more is better.
    """
    sides: tuple[tuple[Side, Sequence[str]], ...] = (("max", largest), ("min", least))
    return [_read_limit(side, text) for side, texts in sides for text in texts]


def _read_limit(side: Side, text: str) -> Limit:
    name, separator, number = text.partition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not separator or not math.isfinite(value):
        raise ConfigurationError(f"--{side} {text}: write it as NAME=NUMBER, such as k3=1e-3")
    of = _quantity_of(name)
    if of is None:
        known = ", ".join(sorted({*SHORT_NAMES, *TOKEN, *OTHERS, *EXTREMES}))
        raise ConfigurationError(
            f"--{side} {text}: no number is called {one_line(name)}; known are {known}, and the metrics of the "
            "frameworks by their own names, such as training/rollout_probs_diff_mean"
        )
    if side == "max" and of in MORE_IS_BETTER:
        raise ConfigurationError(f"--max {text}: of {name} more is better; give --min {text}")
    return Limit(name, of, side, value)


def _quantity_of(name: str) -> str | None:
    """Our name of a number, from a short name, our name or a framework's; None if nobody has it."""
    name = SHORT_NAMES.get(name, name)
    if name in TOKEN or name in OTHERS or name in EXTREMES:
        return name
    return next((metrics[name].of for metrics in frameworks().values() if name in metrics), None)


def judge(measured: Measured, limits: Iterable[Limit], faults: Iterable[Fault] = ()) -> list[Judgement]:
    """A judgement on each limit.

    A number with an interval is within its limit where the whole interval is, beyond where the whole interval is, and
    otherwise it cannot be told: more responses would say. An extreme and an effective sample size have no interval; the
    number itself decides. One response says nothing of others. A log whose numbers are too small by a fault is never
    within a limit.
    """
    hiding = [fault for fault in faults if fault.name in HIDING]
    found = [_of_log(measured, limit) for limit in limits]
    if not hiding:
        return found
    words = f"cannot be told. {hiding[0].says}"
    return [
        replace(one, code=CANNOT_TELL, words=f"{one.limit.name} {words}") if one.code == WITHIN else one
        for one in found
    ]


def _of_log(measured: Measured, limit: Limit) -> Judgement:
    value = quantity(measured, limit.of)
    if value.n < 2 and limit.of not in EXTREMES and not math.isnan(value.mean):
        words = f"{limit.name} is {short(value.mean)} in one response, which says nothing of others."
        return Judgement(limit, value, CANNOT_TELL, words)
    return judge_number(limit, value)


def judge_number(limit: Limit, value: Interval) -> Judgement:
    """The judgement on one number."""
    number = short(value.mean)
    of = f"{limit.name} is {number}"
    if math.isnan(value.mean):
        return Judgement(limit, value, CANNOT_TELL, f"{limit.name} cannot be told from this log.")
    low, high = (value.mean, value.mean) if math.isnan(value.low) else (value.low, value.high)
    if not math.isnan(value.low):
        of = f"{of} [{short(low)}, {short(high)}]"
    words = f"at {'most' if limit.side == 'max' else 'least'} {limit.value:g}"
    if limit.side == "max":
        is_within = high <= limit.value
        is_beyond = low > limit.value
    else:
        is_within = low >= limit.value
        is_beyond = high < limit.value
    if is_within:
        return Judgement(limit, value, WITHIN, f"{of}: within {words}.")
    if is_beyond:
        return Judgement(limit, value, BEYOND, f"{of}: beyond {words}.")
    return Judgement(limit, value, CANNOT_TELL, f"{of}: {words} lies in the interval; log more responses.")


def exit_code(judgements: Iterable[Judgement]) -> int:
    """1 if any number is beyond its limit, else 2 if any cannot be told, else 0."""
    codes = {judgement.code for judgement in judgements}
    return BEYOND if BEYOND in codes else CANNOT_TELL if CANNOT_TELL in codes else WITHIN

"""Alarms: pure functions of a step and of the steps before it.

An adapter gives the numbers of each step to `Alarms.step`, which returns what is wrong. Limits are data, in
`alarms.yaml`. A quantity that a step does not have is NaN, and its alarms stay silent.
"""

import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

import numpy as np

from tailrl.runtime.data_files import yaml_beside
from tailrl.runtime.errors import ConfigurationError, one_line

SIZES = ("level", "mean_abs", "k3")
"""Of the mismatch, the least noisy first: a step is compared with earlier ones by the first that it has."""


@dataclass(frozen=True, slots=True)
class Step:
    """The numbers of a step; NaN for what is not known.

    Attributes:
        number: of the step.
        tokens, responses: how many have log-probs of both sides.
        lag: the least lag of its responses. `level`, `tail` and `confident` are of the `floor_tokens` at that lag.
        level: the median of |ℓ| / (1 − p), nats, of `level_tokens` that are not sure: how sure the policy is does not
            change it.
        mean_abs, k3: means of |ℓ| and of e^ℓ − 1 − ℓ, nats, ℓ = log π_train − log π_infer of a sampled token.
        tail: tokens with |ℓ| above 1 nat. confident: those with at least 50 % on one side, 2 nats lower on the other.
        unsound: the share of tokens without two log-probs: NaN, infinite or above 0. not_finite: a metric that is NaN
            or infinite, with its value.
        outside: the share of tokens with ratios outside 0.8 to 1.2.
        ess: effective sample size of tokens' ratios, a fraction.
        unsure, equal: tokens with log-probs below −0.001 on both sides, and those of them with equal ones.
        version: the newest version of the sampler's weights. ahead, ahead_by: responses with a version after their
            step, and by how much at most. digest: a digest or name of the sampler's weights.
        clip: the share of tokens that a clip acts on. learning_rate, reward: of the step.
        slope: the median over prompts of how advantages rise with rewards; shift: |mean| by the root mean square of
            advantages, over prompts; correlation: of advantages with rewards over all responses, where prompts are
            not known.
        alike_prompts, alike_nats: prompts whose several responses are all the same, if most of the step's are so (else
            0), and the nats of the chance of that.
        prompts, replies: digests of the distinct prompts, and of responses (tokens and the sampler's log-probs) with
            at least half a nat.
    """

    number: float
    tokens: float = math.nan
    responses: float = math.nan
    lag: float = math.nan
    floor_tokens: float = math.nan
    level: float = math.nan
    level_tokens: float = math.nan
    mean_abs: float = math.nan
    k3: float = math.nan
    tail: float = math.nan
    confident: float = math.nan
    unsound: float = math.nan
    not_finite: str = ""
    outside: float = math.nan
    ess: float = math.nan
    unsure: float = math.nan
    equal: float = math.nan
    version: float = math.nan
    ahead: float = math.nan
    ahead_by: float = math.nan
    digest: str = ""
    clip: float = math.nan
    learning_rate: float = math.nan
    reward: float = math.nan
    slope: float = math.nan
    shift: float = math.nan
    correlation: float = math.nan
    alike_prompts: float = math.nan
    alike_nats: float = math.nan
    prompts: frozenset[int] = frozenset()
    replies: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Alarm:
    """What is wrong at a step: the alarm's name in `alarms.yaml`, a sentence with its numbers, and what to do."""

    name: str
    step: float
    says: str
    do: str
    numbers: Mapping[str, Any] = field(default_factory=dict)


Found = dict[str, Any] | None
"""The numbers of an alarm's sentence; None: nothing is wrong."""

Past = Sequence[Step]
"""The steps before, the oldest first, without those that a size alarm was raised at."""

Limits = Mapping[str, float]


# --- the alarms ----------------------------------------------------------------------------------------


def floor_jump(step: Step, past: Past, limits: Limits) -> Found:
    """The typical mismatch is far above its own recent level and its noise: at this step, or less at the last two."""
    name = _size_name(step)
    values = _series(step, past, name)[-int(limits["window"]) :]
    if len(values) < limits["fewest"]:
        return None
    now, which = math.log(getattr(step, name)), "" if name == "level" else "metric_"
    factor = limits[f"{which}factor"] ** (2.0 if name == "k3" else 1.0)
    sampling = MEDIAN_NOISE / math.sqrt(step.level_tokens) if name == "level" and step.level_tokens > 0 else 0.0
    for last, earlier in (([now], values), ([now, math.log(values[-1])], values[:-1])):
        if len(earlier) < limits["fewest"]:
            continue
        level, noise = _level(earlier)
        rises = [one - level for one in last]
        least = limits[f"{which}noises"] * max(noise, sampling) / math.sqrt(len(last))
        if min(rises) > math.log(factor) and float(np.mean(rises)) > least:
            return {"now": f"{math.exp(now):.3g}", "factor": f"{math.exp(rises[0]):.3g}", "past": len(earlier)}
    return None


def slow_growth(step: Step, past: Past, limits: Limits) -> Found:
    """The typical mismatch has become a multiple of what it was when the run began, without any jump."""
    name = _size_name(step)
    ends = int(limits["ends"])
    values = [*_series(step, past, name), getattr(step, name)] if name else []
    if len(values) < limits["fewest"]:
        return None
    first, last = values[:ends], values[-ends:]
    factor = limits["factor" if name == "level" else "metric_factor"] ** (2.0 if name == "k3" else 1.0)
    growth = median(last) / median(first)
    if growth <= factor or min(last) <= max(first):
        return None
    return {"first": f"{median(first):.3g}", "now": f"{median(last):.3g}", "growth": f"{growth:.3g}", "ends": ends}


def floor_tail(step: Step, past: Past, limits: Limits) -> Found:
    """Many more tokens far off than the earlier share of such tokens lets expect."""
    return _many(step, past, "tail", limits)


def confident_disagreement(step: Step, past: Past, limits: Limits) -> Found:
    """Tokens that one side is sure of and the other is not: many, and many more than before.

    Stale weights can do this without a fault, so a step with a lag is compared with earlier ones of the same lag.
    """
    if step.lag > 0 and len(_alike(step, past)) < limits["fewest_with_lag"]:
        return None
    if not step.confident >= limits["share"] * step.floor_tokens:
        return None
    return _many(step, past, "confident", limits)


def weights_stop(step: Step, past: Past, limits: Limits) -> Found:
    """The engine's weights do not change: by their digest, by their version, or since the mismatch grows."""
    digests = [one.digest for one in (*past, step) if one.digest]
    words = _stays(digests, "the engine's weights have the same digest as in the step before")
    if not words and math.isfinite(step.version):
        versions = [one.version for one in (*past, step) if math.isfinite(one.version)]
        words = _stays(versions, f"the engine's newest weights are still version {step.version:g}")
    words = words or _growth(step, past, limits)
    return {"evidence": words} if words else None


def negative_lag(step: Step, _past: Past, _limits: Limits) -> Found:
    """Responses of weights that did not exist yet."""
    return {"count": int(step.ahead), "most": f"{step.ahead_by:g}"} if step.ahead > 0 else None


def ess_collapse(step: Step, past: Past, limits: Limits) -> Found:
    """The effective sample size is low, or half of what it was."""
    if step.tokens < limits["tokens"]:
        return None
    before = median([one.ess for one in past if math.isfinite(one.ess)])
    if not (step.ess < limits["below"] or step.ess < limits["share"] * before):
        return None
    return {"now": f"{step.ess:.3g}", "before": f"{before:.3g}" if math.isfinite(before) else "not known before"}


def unsound_tokens(step: Step, _past: Past, limits: Limits) -> Found:
    """Many tokens have no log-prob on one side."""
    return {"share": f"{step.unsound:.1%}"} if step.unsound >= limits["share"] else None


def not_finite(step: Step, _past: Past, _limits: Limits) -> Found:
    """A metric of the mismatch is no number."""
    return {"metric": step.not_finite} if step.not_finite else None


def copied_columns(step: Step, _past: Past, limits: Limits) -> Found:
    """Both columns are equal to the last bit."""
    if not (step.unsure >= limits["tokens"] and step.equal == step.unsure):
        return None
    return {"tokens": f"{step.unsure:,.0f}"}


def idle_clip(step: Step, past: Past, limits: Limits) -> Found:
    """The clip acts on no token, while many ratios of trainer and sampler are beyond it."""
    steps = [*past, step][-int(limits["steps"]) :]
    if len(steps) < limits["steps"] or any(one.clip != 0 for one in steps):
        return None
    shares = [one.outside for one in steps if math.isfinite(one.outside)]
    sizes = [one.k3 for one in steps if math.isfinite(one.k3)]
    if shares and float(np.mean(shares)) >= limits["share"]:
        return {"steps": len(steps), "share": f"{np.mean(shares):.1%}"}
    if not shares and sizes and float(np.mean(sizes)) >= limits["k3"]:
        return {"steps": len(steps), "share": f"by k3 = {np.mean(sizes):.2g} many"}
    return None


def lost_seed(step: Step, _past: Past, limits: Limits) -> Found:
    """All responses to a prompt are the same, at most prompts, against the chance that the log-probs give that."""
    log10_chance = -step.alike_nats / math.log(10)
    if not (step.alike_prompts >= limits["groups"] and log10_chance <= limits["log10_chance"]):
        return None
    return {"groups": int(step.alike_prompts), "log10_chance": f"{log10_chance:.0f}"}


def stuck_batch(step: Step, past: Past, limits: Limits) -> Found:
    """The prompts of the step before, or responses that were trained on already."""
    if not past:
        return None
    before = past[-1]
    if len(step.prompts) >= 2 and (share := _share(step.prompts, before.prompts)) >= limits["prompts"]:
        return {"share": f"{share:.0%}", "what": "prompts", "when": f"step {before.number:g}"}
    for earlier in reversed(past[-int(limits["steps"]) :]):
        enough = len(step.replies) >= limits["count"]
        if enough and (share := _share(step.replies, earlier.replies)) >= limits["responses"]:
            return {"share": f"{share:.0%}", "what": "responses", "when": f"step {earlier.number:g}"}
    return None


def learning_rate(step: Step, past: Past, limits: Limits) -> Found:
    """The rate is 0 for several steps, or jumps though no warm-up is under way."""
    rates = [one.learning_rate for one in past if math.isfinite(one.learning_rate)]
    now = step.learning_rate
    if not math.isfinite(now):
        return None
    zeros = int(limits["zeros"] if any(rate > 0 for rate in rates) else limits["first_zeros"])
    last = [*rates, now][-zeros:]
    if len(last) == zeros and not any(last):
        return {"evidence": f"is 0 in {zeros} steps"}
    nothing = 1e-6 * max(rates, default=0.0)
    if len(rates) >= limits["fewest"] and 0 < now <= nothing:
        return {"evidence": f"is {now:.3g}, and was {max(rates):.3g}"}
    rising = len(rates) >= 2 and rates[-1] > rates[-2]
    if len(rates) >= limits["fewest"] and not rising and rates[-1] > 0 and now > limits["factor"] * rates[-1]:
        return {"evidence": f"is {now:.3g}, {now / rates[-1]:.3g} times that of the step before"}
    return None


def rogue_normaliser(step: Step, past: Past, limits: Limits) -> Found:
    """Advantages do not follow the rewards as they did: another scale, another sign, or a shift."""
    slopes = [one.slope for one in past if math.isfinite(one.slope) and one.slope > 0]
    if math.isfinite(step.slope) and step.slope < 0:
        return {"evidence": "advantages fall where rewards rise: their sign is turned"}
    if len(slopes) >= limits["fewest"] and math.isfinite(step.slope):
        level, noise = _level(slopes)
        change = math.log(step.slope) - level if step.slope > 0 else -math.inf
        if abs(change) > max(math.log(limits["factor"]), limits["noises"] * noise):
            return {"evidence": f"advantages are {math.exp(change):.3g} times as large for the same rewards as before"}
    shifts = [one.shift for one in past if math.isfinite(one.shift)]
    if len(shifts) >= limits["fewest"] and step.shift > limits["shift"] > 2 * max(shifts[-20:]):
        return {"evidence": f"the mean of a prompt's advantages is {step.shift:.2g} of their size, and was about 0"}
    if step.correlation < limits["correlation"] and step.responses >= limits["responses"]:
        return {"evidence": f"advantages fall where rewards rise: their correlation is {step.correlation:.2g}"}
    return None


OF_SIZE = ("floor_jump", "floor_tail", "confident_disagreement", "ess_collapse")
"""A step with one of these is no measure for later ones."""


# --- what they are made of -----------------------------------------------------------------------------


MEDIAN_NOISE = 3.0  # the standard deviation of the logarithm of a median of n such sizes, times √n


def _size_name(step: Step) -> str:
    return next((name for name in SIZES if getattr(step, name) > 0), "")


def _series(step: Step, past: Past, name: str) -> list[float]:
    """The earlier positive values of a size, of steps with the same lag."""
    return [value for one in _alike(step, past) if name and (value := getattr(one, name)) > 0]


def _alike(step: Step, past: Past) -> list[Step]:
    """The earlier steps with the same lag."""
    return [one for one in past if one.lag == step.lag or (math.isnan(one.lag) and math.isnan(step.lag))]


def _level(values: Sequence[float]) -> tuple[float, float]:
    """The median of logarithms, and the standard deviation of their noise, by their median deviation.

    Few values say little of the noise: it is taken for larger.
    """
    logs = np.log(values)
    noise = 1.4826 * float(np.median(np.abs(logs - np.median(logs)))) * (1 + 5 / len(values))
    return float(np.median(logs)), max(noise, 0.05)


def median(values: Sequence[float]) -> float:
    """The median; NaN of no values."""
    return float(np.median(values)) if len(values) else math.nan


def _share(of: Collection[int], before: Collection[int]) -> float:
    return len(set(of) & set(before)) / len(of)


def _many(step: Step, past: Past, name: str, limits: Limits) -> Found:
    """Whether a count of tokens is far beyond what the earlier share of them gives."""
    now, tokens = getattr(step, name), step.floor_tokens
    if not now >= limits["count"]:
        return None
    alike = [one for one in _alike(step, past) if math.isfinite(getattr(one, name)) and one.floor_tokens > 0]
    before = math.fsum(getattr(one, name) for one in alike)
    total = math.fsum(one.floor_tokens for one in alike)
    if len(alike) < limits.get("fewest", 0):
        return None
    expected = (before + 0.5) / total * tokens if total else 0.0
    if now <= limits["factor"] * expected or (expected and _log10_tail(now, expected) > limits["log10_chance"]):
        return None
    share = f"{now / expected:.3g}" if expected else "many"
    return {"count": int(now), "tokens": f"{tokens:,.0f}", "factor": share}


def _log10_tail(count: float, expected: float) -> float:
    """log10 of an upper bound of the chance of at least `count` events where `expected` are: Chernoff's for Poisson."""
    if count <= expected:
        return 0.0
    return (count - expected - count * math.log(count / expected)) / math.log(10)


FEWEST_VERSIONS = 5


def _stays(values: Sequence[Any], words: str) -> str:
    """The words where the last value has stayed for longer than any value before it."""
    lengths = [0]
    for before, after in itertools.pairwise(values):
        if before == after:
            lengths[-1] += 1
        else:
            lengths.append(0)
    *earlier, now = lengths
    # The first may have begun before the log did.
    if len(earlier) < 2 and now >= FEWEST_VERSIONS and not any(earlier):
        return f"{words} after {now} more steps"
    if len(values) - now - 1 < FEWEST_VERSIONS or not earlier:
        return ""
    longest = max(earlier)
    allowed = longest if len(set(earlier)) == 1 else 2 * longest + 1
    return f"{words} after {now + 1} steps; it stayed for {longest + 1} at most before" if now > allowed else ""


def _growth(step: Step, past: Past, limits: Limits) -> str:
    """The last sizes are above all of those some steps before: each update leads away from the engine's weights.

    At lag 0 the size is the floor, which updates do not change much. At other or unknown lags it grows with the size of
    the updates too: it must grow by more, and the learning rate must not have risen.
    """
    name = _size_name(step)
    values = [*_series(step, past, name), getattr(step, name)] if name else []
    last_steps, before = int(limits["rising"]), int(limits["before"])
    last, earlier = values[-last_steps:], values[-int(limits["window"]) : -last_steps]
    if len(earlier) < before:
        return _early_growth(values, last_steps if step.lag == 0 else int(limits["unknown_rising"]), limits)
    first = earlier[: max(before, len(earlier) // 2)]
    steps_of_noise = np.abs(np.diff(np.log(earlier)))
    noise = max(0.05, 1.4826 / math.sqrt(2) * float(np.median(steps_of_noise)) * (1 + 5 / len(earlier)))
    growth = median(np.log(last).tolist()) - _level(first)[0]
    factor = limits["factor"] if step.lag == 0 else limits["stale_factor"]
    least = max((2.0 if name == "k3" else 1.0) * math.log(factor), limits["noises"] * noise)
    rates = [one.learning_rate for one in past if math.isfinite(one.learning_rate)]
    is_faster = bool(rates) and step.learning_rate > 1.2 * min(rates)
    if min(last) > max(first) and growth > least and (step.lag == 0 or not is_faster):
        return f"the mismatch grew {math.exp(growth):.3g} times in {len(earlier)} steps, as it does without new weights"
    return ""


def _early_growth(values: Sequence[float], fewest: int, limits: Limits) -> str:
    """The same in a run's first steps: it rose at each of them. An asynchronous run may begin so, with growing lags."""
    rising = len(values) >= fewest and all(a < b for a, b in itertools.pairwise(values))
    if rising and values[-1] > limits["early_factor"] * values[0]:
        return f"the mismatch rose at each of the first {len(values)} steps, {values[-1] / values[0]:.3g} times in all"
    return ""


# --- step by step --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AlarmWords:
    """What `alarms.yaml` says of an alarm."""

    says: str
    do: str
    limits: Mapping[str, float]
    source: str


@cache
def catalogue() -> dict[str, AlarmWords]:
    """The words and limits of each alarm, by the name of its function here."""
    said = yaml_beside(__file__, "alarms.yaml")
    return {name: AlarmWords(**words) for name, words in said.items()}


def check_names(names: Collection[str]) -> None:
    """Raises StudyError for a name of no alarm."""
    for name in names:
        if name not in catalogue():
            raise ConfigurationError(f"no alarm is called {one_line(name)}; there are {', '.join(catalogue())}")


MOST_STEPS = 200  # steps that are remembered


class Alarms:
    """Follows a run: give it each step's numbers in order.

    Example:
        >>> alarms = Alarms()
        >>> for number in range(8):
        ...     raised = alarms.step(Step(number, mean_abs=0.002 if number < 7 else 0.05))
        >>> [alarm.name for alarm in raised]
        ['floor_jump']
    """

    def __init__(self, exact: bool = False, without: Collection[str] = ()) -> None:
        """`exact`: the engine computes with the trainer's own bits. `without`: names of alarms that stay silent."""
        silent = {*without, *(["copied_columns"] if exact else [])}
        self._active: dict[str, Callable[[Step, Past, Limits], Found]] = {
            name: globals()[name] for name in catalogue() if name not in silent
        }
        self._past: deque[Step] = deque(maxlen=MOST_STEPS)
        self._measure: deque[Step] = deque(maxlen=MOST_STEPS)

    def step(self, step: Step) -> list[Alarm]:
        """The alarms of the next step; an empty list where nothing is wrong."""
        raised = []
        for name, alarm in self._active.items():
            words = catalogue()[name]
            past = self._measure if name in OF_SIZE else self._past
            if (numbers := alarm(step, list(past), words.limits)) is not None:
                raised.append(Alarm(name, step.number, words.says.format(**numbers), words.do, numbers))
        self._past.append(step)
        if not any(alarm.name in OF_SIZE for alarm in raised):
            self._measure.append(step)
        return raised


def numbers_of(step: Step) -> dict[str, Any]:
    """The known numbers of a step, for JSON."""
    plain = {one.name: getattr(step, one.name) for one in fields(step) if one.name not in ("prompts", "replies")}
    return {name: v for name, v in plain.items() if v != "" and not (isinstance(v, float) and not math.isfinite(v))}

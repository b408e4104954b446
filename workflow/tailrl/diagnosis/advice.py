"""What to do about a mismatch: one fixed rule, `advice.yaml`, from the causes, the place and the size."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from pydantic import Field

from tailrl.artifacts.files import Record
from tailrl.diagnosis.causes import CLOSE, Cause, disagrees_with_itself
from tailrl.diagnosis.exact_checks import Fault
from tailrl.diagnosis.features import features, grows_with
from tailrl.diagnosis.measure import Measured
from tailrl.diagnosis.metrics import quantity
from tailrl.diagnosis.replay import Replayed, catalogue
from tailrl.diagnosis.signals import Signals
from tailrl.diagnosis.sizes import band_of
from tailrl.diagnosis.sure import beyond_sixteen_bits
from tailrl.diagnosis.trend import trend_of
from tailrl.diagnosis.where import Place
from tailrl.runtime.data_files import yaml_beside

SURE = 0.5  # the probability from which a cause counts
MOVED = 0.5  # the share of Σ Δ² that is the trainer's own, from which samples are old

Kind = Literal["none", "ask", "fix", "remedy", "beyond"]


EXPLAINS = ("base", "filled", "first_choice", "grid", "padding")
"""Faults of a log that make a mismatch by themselves, or hide it."""

NOTHING_TO_SAY = ("copy", "constant", "negative", "probabilities")
"""Faults of a log after which its other numbers mean nothing."""


class Choice(Record, allow_inf_nan=True):
    """A remedy of `replay.yaml` at a threshold; None: at the least that does. `cleaned`: in place of the rule's."""

    name: str
    threshold: float | None = None
    cleaned: float | None = None


class AdviceRule(Record, allow_inf_nan=True):
    """A rule: its conditions, what to do, and which remedies may serve. See the header of `advice.yaml`."""

    name: str
    fact: str | None = Field(default=None, alias="if")
    causes: list[str] | None = None
    k3_upto: float = math.inf
    kind: Literal["none", "ask", "fix", "remedy"]
    words: str
    remedies: list[Choice] = Field(default_factory=list)
    cleaned: float | None = None
    finding: str = ""
    beyond: str = ""
    evidence: str
    scope: str
    settings: dict[str, str] = Field(default_factory=dict)


class AdviceRules(Record):
    """`advice.yaml`."""

    cleaned: float
    keeps: float
    ess: float
    rules: list[AdviceRule]


@cache
def advice_rules() -> AdviceRules:
    """The rule of advice."""
    return AdviceRules.model_validate(yaml_beside(__file__, "advice.yaml"))


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do.

    Attributes:
        kind: `none`, no correction is needed; `ask`, it depends on what the log does not say; `fix`, remove the cause
            first, and use `name` until then; `remedy`, use `name`; `beyond`, no remedy keeps enough of the sample.
        words: what to do.
        name, threshold: the remedy's key in `replay.yaml` and its setting; None: no remedy.
        gives: what the remedy keeps and leaves of this log, or why there is none; empty where none was asked for.
        finding: the page of the documentation that the advice follows.
    """

    kind: Kind
    words: str
    name: str | None = None
    threshold: float = math.nan
    gives: str = ""
    finding: str = ""


@dataclass(frozen=True, slots=True)
class _Log:
    """What the facts are about."""

    measured: Measured
    replayed: bool
    wrong: Fault | None
    focus: Place | None
    grows: bool


FACTS: dict[str, Callable[[_Log], bool]] = {
    "no_tokens": lambda log: not log.measured.tokens,
    "trainer_disagrees_with_itself": lambda log: disagrees_with_itself(log.measured.signals),
    "nothing_replayed": lambda log: not log.replayed,
    "grows": lambda log: log.grows,
    "within_sixteen_bits": lambda log: not beyond_sixteen_bits(log.measured.signals),
    "grows_with_age": lambda log: tells_age(log.measured.signals),
    "log_is_wrong": lambda log: log.wrong is not None,
    "tokens_of_responses": lambda log: log.focus is not None and not log.focus.whole,
}
"""What a rule's `if` may ask."""


def tells_age(signals: Signals) -> bool:
    """Whether the log shows that the samples are old.

    The mismatch grows with step − version, or most of it is between the trainer's recomputed and its present log-probs.
    """
    return bool(signals.sums) and (grows_with(signals, "lag") or features(signals)["moved"] >= MOVED)


def deciding_cause(causes: Sequence[Cause], harmless: bool = False) -> Cause | None:
    """The cause that the advice follows: the first that is as probable as not, a fixable one before the others.

    A close second one counts too, unless the mismatch is `harmless`: of a size at which nothing needs to be mended.
    """
    fixed = {
        name for rule in advice_rules().rules if rule.fact is None and rule.kind == "fix" for name in rule.causes or ()
    }
    fixed -= {name for rule in advice_rules().rules if rule.kind == "remedy" for name in rule.causes or ()}
    probable = [one for one in causes if one.sure >= SURE]
    if not probable and sum(one.sure for one in causes[:2]) >= SURE and fixed >= {one.name for one in causes[:2]}:
        return causes[0]  # either of the two is to be fixed
    if probable and not harmless:
        probable = [one for one in causes if one.sure >= min(SURE, CLOSE * probable[0].sure)]
    return next((one for one in probable if one.name in fixed), probable[0] if probable else None)


def framework_of(measured: Measured) -> str:
    """The framework of a log, as `replay.yaml` names it: the rows say it, or the format is its own; else empty."""
    words = [*measured.frameworks, *measured.titles]
    return next((name for word in words for name in catalogue().versions if word.lower().startswith(name.lower())), "")


def advise(
    measured: Measured,
    causes: Sequence[Cause],
    remedies: Sequence[Replayed],
    faults: Sequence[Fault] = (),
    focus: Place | None = None,
    framework: str = "",
) -> Advice:
    """The advice by the first rule that holds; `framework`: whose lines are wanted, as `replay.yaml` names it."""
    k3 = quantity(measured, "k3").mean
    is_harmless = not math.isnan(k3) and band_of(k3).level == "fine"
    cause = deciding_cause(causes, is_harmless)
    wrong = next((fault for fault in faults if fault.name in (*NOTHING_TO_SAY, *EXPLAINS)), None)
    trend = trend_of(measured)
    grows = trend is not None and trend.grows
    log = _Log(measured, bool(remedies), wrong, focus, grows)
    rule = next(rule for rule in advice_rules().rules if _holds(rule, log, cause, k3))
    words = rule.words.format(
        do=cause.words.do if cause else "",
        fault=wrong.do if wrong else "",
        look=focus.look if focus else "",
        k3=f"{k3:.2g}",
    )
    if not rule.remedies:
        return Advice(rule.kind, words, gives=rule.beyond, finding=rule.finding)
    if is_harmless:  # weights would add variance, and no gain from them was seen
        return Advice("none" if rule.kind == "remedy" else rule.kind, words, finding=rule.finding)
    chosen = _chosen(rule, remedies, k3, framework)
    if chosen is None:
        return Advice("fix" if rule.kind == "fix" else "beyond", words, gives=rule.beyond, finding=rule.finding)
    return Advice(rule.kind, words, chosen.name, chosen.threshold, _gives(chosen, k3), rule.finding)


def _holds(rule: AdviceRule, log: _Log, cause: Cause | None, k3: float) -> bool:
    if rule.fact is not None and not FACTS[rule.fact](log):
        return False
    if rule.causes is not None and (cause is None or cause.name not in rule.causes):
        return False
    return rule.k3_upto == math.inf or k3 <= rule.k3_upto


def _chosen(rule: AdviceRule, remedies: Iterable[Replayed], k3: float, framework: str) -> Replayed | None:
    """The first remedy of a rule that does enough, one with lines for the framework before the others."""
    rules = advice_rules()
    cleaned = rules.cleaned if rule.cleaned is None else rule.cleaned
    good = sorted(
        (one for one in remedies if one.ess >= rules.ess and one.kept_responses >= rules.keeps),
        key=lambda one: one.threshold,
    )
    found = []
    for choice in rule.remedies:
        most = k3 * (cleaned if choice.cleaned is None else choice.cleaned)
        tried = [one for one in good if one.name == choice.name and choice.threshold in (None, one.threshold)]
        fitting = [one for one in tried if one.kept_k3 <= most or most == math.inf]
        found += fitting[:1]
    with_lines = [one for one in found if framework in catalogue().remedies[one.name].lines]
    return next(iter(with_lines or found), None)


def _gives(one: Replayed, k3: float) -> str:
    """What a remedy keeps and leaves of this log."""
    limit = f" ({one.note})" if one.note else ""
    if one.kept_tokens == 1:
        return f"It keeps every token, bounds the weights, and leaves an effective sample size of {one.ess:.0%}{limit}."
    kept = f"It keeps {one.kept_tokens:.1%} of the tokens in {one.kept_responses:.0%} of the responses"
    left = f"{one.kept_k3 / k3:.2g} of the mean k3" if k3 > 0 else "nothing of the mean k3"
    return f"{kept}, with {left}, and an effective sample size of {one.ess:.0%}{limit}."

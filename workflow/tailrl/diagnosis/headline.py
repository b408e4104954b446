"""The answer in a few sentences: bad or not and by which rule, where, why and how sure, and what to do."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tailrl.diagnosis.advice import EXPLAINS, NOTHING_TO_SAY
from tailrl.diagnosis.causes import CLOSE, Cause, agrees, disagrees_with_itself
from tailrl.diagnosis.diagnosis import Diagnosis
from tailrl.diagnosis.measure import Measured
from tailrl.diagnosis.metrics import named_metrics, quantity
from tailrl.diagnosis.sizes import LEVELS, band_of, limits
from tailrl.diagnosis.sure import beyond_sixteen_bits
from tailrl.diagnosis.trend import trend_of
from tailrl.page_parts.number_text import count, short

CERTAIN = 0.9  # how sure a cause is that is named without "probable"
LEAST_SURE = 0.5  # of a cause that is called probable
MOST_NAMED = 2
LARGER = (
    "It is larger than 16 bits gave. A log alone cannot tell which it is: weights or a cache of 8 or 4 bits; or "
    "another beginning or end of the prompt; or a mistake inside a model."
)  # where it looks like rounding


@dataclass(frozen=True, slots=True)
class Headline:
    """The answer.

    Attributes:
        verdict: bad or not, the number, and the rule.
        rules: what the frameworks' own rules say of it; empty without a number.
        why: the causes and how sure they are, a sentence each.
        where: where the mismatch is, a sentence each.
        do: what to do.
        meanwhile: what a remedy gives until then, or why none does; empty where none is needed.
    """

    verdict: str
    rules: str
    why: tuple[str, ...]
    where: tuple[str, ...]
    do: str
    meanwhile: str


def headline(diagnosis: Diagnosis) -> Headline:
    """The answer of a diagnosis."""
    measured, advice = diagnosis.measured, diagnosis.advice
    faults = [fault for fault in diagnosis.faults if fault.name in NOTHING_TO_SAY]
    if faults:
        return Headline(f"Nothing can be said: {_lower(faults[0].says)}", "", (), (), faults[0].do, "")
    if not measured.tokens:
        words = "Nothing can be said: no token of this log has log-probs of both sides."
        return Headline(words, "", _faults(diagnosis), (), advice.words, "")
    do = advice.words
    if diagnosis.faults and not _is_wrong(diagnosis):
        do = f"{diagnosis.faults[0].do} {do}"
    trend = trend_of(measured)
    where = (*(place.sentence() for place in diagnosis.places), *([trend.sentence()] if trend else []))
    reasons = (*_faults(diagnosis), *why(diagnosis))
    return Headline(verdict(diagnosis), rules(measured), reasons, where, do, advice.gives)


def _is_wrong(diagnosis: Diagnosis) -> bool:
    """Whether a fault of the log makes the mismatch: then its shape tells no cause."""
    return any(fault.name in EXPLAINS for fault in diagnosis.faults)


def _lower(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def _faults(diagnosis: Diagnosis) -> tuple[str, ...]:
    return tuple(f"The log itself: {_lower(fault.says)}" for fault in diagnosis.faults)


def verdict(diagnosis: Diagnosis) -> str:
    """Bad or not, the number with its interval, and the rule."""
    measured = diagnosis.measured
    k3 = quantity(measured, "k3")
    if disagrees_with_itself(measured.signals):
        own, other = (short(quantity(one, "abs_logp").mean) for one in (measured.floor or measured, measured))
        return (
            f"Nothing can be said of the sampler: the trainer disagrees with itself. Its log-probs of the same tokens, "
            f"computed twice, differ by {own} nats a token, and those of the sampler by {other}."
        )
    if measured.extremes["abs_logp_max"] == 0:
        return "Not bad: sampler and trainer agree to the last bit."
    if math.isnan(k3.mean):
        return "Nothing can be said: k3 is no number."
    band = band_of(k3.mean)
    ends = f" [{short(k3.low)}, {short(k3.high)}]" if not math.isnan(k3.low) and k3.low < k3.high else ""
    level = "bad" if band.level == "coarse" and not _few_bits_fit(diagnosis) else band.level
    words = f"{LEVELS[level]}: k3 is {short(k3.mean)} nats a token{ends}, {band.title} ({limits(band)})."
    is_in_few_tokens = any(place.grouping == "tokens" for place in diagnosis.places)
    if band_of(k3.low if ends else k3.mean).level != band.level and not is_in_few_tokens:
        return f"{words} The interval reaches into better sizes: more responses would tell."
    return words


def rules(measured: Measured) -> str:
    """What the frameworks' own rules of thumb say, in a sentence."""
    held: dict[str, list[bool]] = {}
    for one in named_metrics(measured):
        for rule, holds in one.judged:
            if rule.every:
                held.setdefault(one.framework, []).append(holds)
    if not held:
        return ""
    broken = {framework: own.count(False) for framework, own in held.items() if not all(own)}
    if not broken:
        return f"It is within the frameworks' own rules of thumb ({', '.join(held)})."
    some = ", ".join(f"{number} of {len(held[framework])} of {framework}" for framework, number in broken.items())
    return f"It breaks rules of thumb of the frameworks: {some}."


def why(diagnosis: Diagnosis) -> tuple[str, ...]:
    """The causes, each with how sure it is; two where they are close."""
    focus = diagnosis.focus
    if _is_wrong(diagnosis):
        return (f"Elsewhere: {_lower(cause_sentence(diagnosis.elsewhere))}",) if focus else ()
    is_rounding = bool(diagnosis.causes) and diagnosis.causes[0].name == "precision"
    if focus is None and is_rounding and _grows(diagnosis):
        others = diagnosis.causes[1:]
        close = [one for one in others if one.sure >= CLOSE * diagnosis.causes[0].sure]
        words = (
            "Token by token it looks like rounding, but rounding does not grow with the steps. A log alone cannot tell "
            "which it is: weights that do not reach the engine; or older samples; or a policy that says other things."
        )
        return (words, *((cause_sentence(close),) if close else ()))
    if focus is None:
        mismatched = None if agrees(diagnosis.measured.signals) else diagnosis.measured.tokens
        told = (cause_sentence(diagnosis.causes, mismatched),)
        return (*told, LARGER) if is_rounding and beyond_sixteen_bits(diagnosis.measured.signals) else told
    there = (f"There: {_lower(cause_sentence(diagnosis.causes))}",) if focus.whole or focus.cause else ()
    return *there, f"Elsewhere: {_lower(cause_sentence(diagnosis.elsewhere))}"


def _grows(diagnosis: Diagnosis) -> bool:
    """Whether the size grows to one that rounding in 16 bits has not."""
    trend = trend_of(diagnosis.measured)
    return trend is not None and trend.grows and diagnosis.advice.kind != "none"


def _few_bits_fit(diagnosis: Diagnosis) -> bool:
    """Whether number formats may be the cause: nothing is to be mended, or rounding is at least as good as close."""
    if diagnosis.advice.kind in ("none", "ask"):
        return True
    sure = {one.name: one.sure for one in diagnosis.causes if not one.words.fault}
    is_close = bool(sure) and sure.get("precision", 0.0) >= CLOSE * max(sure.values())
    return is_close and not _is_wrong(diagnosis) and not _grows(diagnosis)


def cause_sentence(causes: Sequence[Cause], mismatched: int | None = None) -> str:
    """The most probable causes in a sentence; never a fact where another one is nearly as probable.

    `mismatched`: the number of tokens with a mismatch of which no cause could be told; None: there is none.
    """
    if not causes:
        few = f"No cause can be told from {count(mismatched, 'token')}." if mismatched else ""
        return few or "No mismatch that needs a cause."
    faults = [one for one in causes if one.words.fault]
    if len(causes) > 1 and faults:  # a fault of the log is beside a cause of the mismatch, not in its place
        rest = [one for one in causes if one not in faults]
        also = ", ".join(_named(one) for one in (faults if rest else faults[1:]))
        return f"{cause_sentence(rest or faults[:1])} The log also has {also}."
    first, *others = causes[:MOST_NAMED]
    close = [one for one in others if one.sure >= CLOSE * first.sure]
    if close:
        fitting = " or ".join(_named(one) for one in (first, *close))
        return f"Two causes fit: {fitting}."
    if first.name == "unknown":
        return f"No known cause fits ({first.sure:.0%} sure)."
    if first.sure >= CERTAIN:
        return f"Cause, {first.sure:.0%} sure: {first.title}."
    if first.sure >= LEAST_SURE:
        return f"Probable cause, {first.sure:.0%} sure: {first.title}."
    return f"No cause is sure; the most probable one: {_named(first)}."


def _named(cause: Cause) -> str:
    return f"{cause.title} ({cause.sure:.0%})"

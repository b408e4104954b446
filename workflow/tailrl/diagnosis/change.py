"""What a change did: two logs, before and after it. Size, cause and groups, with intervals over responses.

Responses to prompts that both logs have are paired: a prompt's part in both means cancels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tailrl.diagnosis.advice import NOTHING_TO_SAY
from tailrl.diagnosis.diagnosis import Diagnosis
from tailrl.diagnosis.gate import HIDING, Judgement
from tailrl.diagnosis.headline import cause_sentence
from tailrl.diagnosis.log import Log, from_end
from tailrl.diagnosis.measure import TOKEN, Measured
from tailrl.diagnosis.metrics import from_zero, quantity
from tailrl.diagnosis.page import SUMMARY, cell
from tailrl.diagnosis.sizes import LEVELS, band_of
from tailrl.page_parts import TEMPLATES
from tailrl.page_parts.markdown import prose
from tailrl.page_parts.number_text import short
from tailrl.runtime.templates import renderer
from tailrl.stats.intervals import Interval, Ratio, ratio_difference, ratio_interval

MEANS = ("abs_logp", "k3", "k1", "abs_prob")  # of SUMMARY and beside it: means over tokens, which have an interval
FEW_GROUPS = 8  # of a column: more are not compared one by one
ENDS = 3  # tokens at a response's end that are a group
BEGINNING = 4  # and at its beginning

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Difference:
    """A mean before and after, and what it changed by (after minus before), with intervals over responses."""

    name: str
    before: Interval
    after: Interval
    change: Interval

    @property
    def verdict(self) -> str:
        """Smaller, larger, or no detectable difference."""
        if self.change.low > 0:
            return "larger"
        return "smaller" if self.change.high < 0 else "no detectable difference"

    @property
    def factor(self) -> str:
        """The later mean as a multiple of the earlier one; empty where that is none."""
        return f"{self.after.mean / self.before.mean:.3g}" if self.before.mean > 0 else ""


@dataclass(frozen=True, slots=True)
class Change:
    """Two logs and what lies between them.

    Attributes:
        numbers: of MEANS. groups: of k3, by the place in the response, by the probability, by words of a column.
        paired: the number of prompts that both logs have.
    """

    before: Diagnosis
    after: Diagnosis
    numbers: tuple[Difference, ...]
    groups: tuple[Difference, ...]
    paired: int

    @property
    def k3(self) -> Difference:
        """The difference that decides."""
        return next(one for one in self.numbers if one.name == "k3")


def compare(before: Diagnosis, after: Diagnosis) -> Change:
    """What changed from one log to the other."""
    numbers = tuple(_of_means(before.measured, after.measured, name) for name in MEANS)
    groups = tuple(_of_groups(before.sample, after.sample)) if before.sample and after.sample else ()
    paired = np.intersect1d(before.measured.column("prompt"), after.measured.column("prompt"))  # NaN equals none
    return Change(before, after, numbers, groups, len(paired))


def _of_means(before: Measured, after: Measured, name: str) -> Difference:
    ratios = [Ratio(one.column(name), one.column("tokens"), one.column("prompt")) for one in (before, after)]
    return Difference(name, quantity(before, name), quantity(after, name), ratio_difference(ratios[0], ratios[1]))


def _of_groups(before: Log, after: Log) -> Iterator[Difference]:
    """The k3 of each group that both logs have."""
    groups = [dict(_groups(log)) for log in (before, after)]
    for name in groups[0]:
        if name not in groups[1]:
            continue
        ratios = [_ratio(log, own[name]) for log, own in zip((before, after), groups, strict=True)]
        if all(ratio.below_T.sum() > 0 for ratio in ratios):
            means = [from_zero(ratio_interval(one.above_T, one.below_T, np.arange(len(one.above_T)))) for one in ratios]
            yield Difference(name, means[0], means[1], ratio_difference(ratios[0], ratios[1]))


def _ratio(log: Log, chosen_T: Bools) -> Ratio:
    """k3 and tokens of each response, of the chosen tokens."""
    trainer_T, sampler_T = np.minimum(log.trainer_T, 0.0), np.minimum(log.sampler_T, 0.0)
    k3_T = np.where(chosen_T, TOKEN["k3"](trainer_T, sampler_T), 0.0)
    count = len(log.start_S)
    k3_S = np.bincount(log.sequence_T, k3_T, count).astype(np.float64)
    tokens_S = np.bincount(log.sequence_T, chosen_T, count).astype(np.float64)
    return Ratio(k3_S, tokens_S, log.prompt_S)


def _groups(log: Log) -> Iterator[tuple[str, Bools]]:
    from_end_T = from_end(log)
    yield f"the first {BEGINNING} tokens of a response", log.position_T < BEGINNING
    yield f"the last {ENDS} tokens", from_end_T < ENDS
    yield "the tokens between", (log.position_T >= BEGINNING) & (from_end_T >= ENDS)
    for name, low, high in (("0.9 on", 0.9, 1.1), ("0.1 to 0.9", 0.1, 0.9), ("below 0.1", -1.0, 0.1)):
        prob_T = np.exp(np.minimum(log.trainer_T, 0.0))
        yield f"tokens of a probability {name}", (prob_T >= low) & (prob_T < high)
    if np.isfinite(log.seen_T).any():
        yield "tokens that already occurred", log.seen_T == 1
        yield "tokens that did not occur before", log.seen_T == 0
    for column in dict.fromkeys(name for labels in log.labels_S for name in labels):
        words = np.array([labels.get(column, "") for labels in log.labels_S])
        if 2 <= len(values := np.unique(words)) <= FEW_GROUPS:
            for value in values.tolist():
                yield f"{column} {value}", (words == value)[log.sequence_T]


# --- the page ------------------------------------------------------------------------------------------


def verdict(change: Change) -> str:
    """What the change did, in one line."""
    k3 = change.k3
    if not (change.before.measured.tokens and change.after.measured.tokens):
        return "Nothing can be said: one of the logs has no token with log-probs of both sides."
    for name, one in (("after", change.after), ("before", change.before)):
        for fault in one.faults:
            if fault.name in (*NOTHING_TO_SAY, *HIDING):
                return f"Nothing can be said: the log {name} has a fault. {fault.says}"
    levels = [LEVELS[band_of(one.mean).level].lower() for one in (k3.before, k3.after)]
    state = f"{levels[0]} before and after" if levels[0] == levels[1] else f"{levels[0]} before, {levels[1]} after"
    numbers = f"k3 is {short(k3.before.mean)} nats a token before and {short(k3.after.mean)} after"
    ends = f"a difference of {k3.change.mean:+.3g} [{k3.change.low:+.3g}, {k3.change.high:+.3g}]"
    return f"{k3.verdict.capitalize()}: {numbers}, {ends}. It is {state}."


render = renderer((Path(__file__).parent / "templates", TEMPLATES), cell, prose)


def change_text(change: Change, out: Path | None = None, judgements: Sequence[Judgement] = ()) -> str:
    """The answer in a few lines of Markdown; `out`: where the whole page is."""
    return render("change.md.j2", out=out or "", judgements=judgements, **_values(change))


def change_html(change: Change, judgements: Sequence[Judgement] = ()) -> str:
    """The whole page."""
    return render("change.html.j2", title="Before and after", judgements=judgements, **_values(change))


def _values(change: Change) -> dict[str, object]:
    sides = (("before", change.before), ("after", change.after))
    return {
        "change": change,
        "verdict": verdict(change),
        "names": SUMMARY | {"k1": "k1, nats a token", "abs_prob": "mean difference of the probabilities"},
        "faults": [(name, fault.says) for name, one in sides for fault in one.faults],
        "causes": [(name, cause_sentence(one.causes)) for name, one in sides],
        "places": [(name, place.sentence()) for name, one in sides for place in one.places],
        "sizes": [(name, one.measured.sequences, one.measured.tokens) for name, one in sides],
    }

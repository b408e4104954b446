"""What was found in a log, as a page."""

import itertools
import math
from pathlib import Path

import numpy as np

from tailrl.analysis.format import count
from tailrl.diagnosis.measure import NATS_EDGES, SEQUENCE_GROUPS, Measured
from tailrl.diagnosis.metrics import Named, named_metrics, quantity
from tailrl.runtime.templates import renderer
from tailrl.stats.intervals import Interval, ratio_interval

OPTIONAL_COLUMNS = {
    "token": "token ids",
    "recomputed": "the trainer's log-probs before the update (recomputed)",
    "advantage": "advantages",
    "again": "the trainer's log-probs computed a second time (the noise floor)",
    "trainer_top": "the trainer's largest log-prob at each position",
    "sampler_top": "the sampler's largest log-prob at each position",
    "rank": "ranks of the sampled tokens",
    "step": "training steps",
    "version": "versions of the sampler's weights",
    "reward": "rewards",
    "text": "texts",
}
"""The optional columns, in words."""

render = renderer(Path(__file__).parent / "templates", count)


def diagnosis_page(measured: Measured) -> str:
    """The page in Markdown: what was read, the numbers by framework, and the signature of the mismatch."""
    return render(
        "diagnosis.md.j2",
        measured=measured,
        odd={name: number for name, number in measured.odd.items() if number},
        lacking=[words for name, words in OPTIONAL_COLUMNS.items() if name not in measured.has],
        summary={name: cell(quantity(measured, name)) for name in ("abs_logp", "k3", "ess_token", "ess_seq")},
        named=[(one, cell(one.value), verdict(one)) for one in named_metrics(measured)],
        signature=_signature(measured),
    )


def cell(value: Interval) -> str:
    """A value with its interval, three digits."""
    if math.isnan(value.low) or value.low == value.high:
        return f"{value.mean:.3g}"
    return f"{value.mean:.3g} [{value.low:.3g}, {value.high:.3g}]"


def verdict(one: Named) -> str:
    """What the framework's own rules of thumb say of a value."""
    return "; ".join(
        f"{'within' if rule.holds(one.value.mean) else 'beyond'}: {rule.words} is {_limits(rule.least, rule.most)}"
        for rule in one.rules
        if not math.isnan(one.value.mean)
    )


def _limits(least: float | None, most: float | None) -> str:
    ends = (("at least", least), ("at most", most))
    return " and ".join(f"{words} {end:g}" for words, end in ends if end is not None)


def _signature(measured: Measured) -> list[tuple[str, int, str, str, str]]:
    """Each bin with tokens: its ends in −log π_train, tokens, mean |ℓ|, mean ℓ, and mean |ℓ| / mean (1 − π_train)."""
    if not measured.bins:
        return []
    sums = {name: values.sum(axis=0) for name, values in measured.bins.items()}
    found = []
    for i, (low, high) in enumerate(itertools.pairwise(NATS_EDGES)):
        if not (tokens := int(sums["tokens"][i])):
            continue
        signed, rest = (sums[name][i] / tokens for name in ("signed", "rest"))
        above_G, below_G = (measured.bins[name][:, i] for name in ("size", "tokens"))
        size = ratio_interval(above_G, below_G, np.arange(SEQUENCE_GROUPS))
        ends = f"from {low:g}" if math.isinf(high) else f"{low:g} to {high:g}"
        found.append((ends, tokens, cell(size), f"{signed:+.2g}", f"{size.mean / rest:.3g}" if rest else ""))
    return found

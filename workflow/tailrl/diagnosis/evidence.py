"""The numbers that speak for causes, and the sentences of `causes.yaml` with them."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from tailrl.diagnosis.features import falls, features, gain, grows_with, growth, mean_lag, ratio, source, temperature
from tailrl.diagnosis.measure import Measured
from tailrl.diagnosis.signals import EARLY, HEAD, IMPROBABLE, LAGS, LATE, RARE
from tailrl.diagnosis.sure import beyond_sixteen_bits, settled
from tailrl.page_parts.number_text import count

NO_SHARE = re.compile(r"(?<![\d.])0 %")

WORTH_A_WORD = 0.01  # a share, or a correlation, that is smaller is no evidence
TIMES = ("first", "early", "last", "late", "size", "spread", "tail", "law")
"""Features in decades, which sentences have as factors."""

PATTERN_WORDS = {"odds": "the token's probability", "token": "the token itself", "place": "its place in the response"}

Numbers = Mapping[str, object]


def evidence(sentences: Sequence[str], numbers: Sequence[Numbers]) -> tuple[str, ...]:
    """The sentences with their numbers.

    A sentence is said for each of the mappings that has all its numbers; one with a share of 0 % is no evidence, and
    left out.
    """
    said = (_said(sentence, known) for sentence in sentences for known in numbers)
    return tuple(sentence for sentence in said if sentence and not NO_SHARE.search(sentence))


def _said(sentence: str, numbers: Numbers) -> str:
    try:
        return sentence.format_map(numbers)
    except KeyError:
        return ""


def numbers(measured: Measured) -> list[Numbers]:
    """What sentences may name: of the whole log, of each kind of odd log-prob, and of each side."""
    found: list[Numbers] = [{"odd": count(n, "token"), "odd_name": name} for name, n in measured.odd.items() if n]
    signals = measured.signals
    for side, zeros in signals.zeros.items():
        if zeros:
            found.append({"zeros": count(zeros, "token"), "zeros_side": side, "improbable": IMPROBABLE})
        if signals.cut(side):
            low, same, near = signals.least(side)
            found.append({"cut": count(same, "token"), "cut_side": side, "cut_low": low, "cut_near": near})
    return [*found, dict(_of_all(measured))] if signals.sums.get("tokens") else found


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _of_all(measured: Measured) -> Iterator[tuple[str, object]]:
    """Of all tokens; what a log does not say, or is not worth a word, is left out."""
    signals = measured.signals
    sums, shape = signals.sums, features(signals)
    tokens, fits = signals.lag_sums
    best, present = int(signals.shifted.argmax()), LAGS.index(0)
    yield "shifted", count(int(signals.shifted.sum()), "sequence")
    yield "compared", signals.compared
    yield "lag", count(abs(LAGS[best]), "token")
    yield "when", "later" if LAGS[best] > 0 else "earlier"
    yield "moved", ratio(fits[best], tokens[best])
    yield "unmoved", ratio(fits[present], tokens[present])

    warmth, explained = temperature(signals)
    yield "warmer", "warmer" if warmth > 1 else "cooler"
    yield "warmth", warmth
    yield "by_warmth", _percent(max(0.0, explained))
    if explained > 0.3:
        yield "mostly_by_warmth", _percent(explained)
    yield "source", source(signals)

    yield "not_smaller", _percent(1 - ratio(sums["above"], sums["tokens"]))
    yield "theirs", _percent(1 - ratio(sums["positive"], sums["squared"], 1.0))
    yield "mass", _percent(math.exp(-sums["size"] / sums["tokens"]))
    yield "least_mass", _percent(math.exp(min(signals.edges[0], 0.0)))
    if sums["ranked"]:
        yield "rank", sums["rank"]

    if sums["sure_and_not"]:
        yield "sure_and_not", _percent(ratio(sums["sure_and_not"], sums["tokens"]))
    yield from {"head": HEAD, "rare": RARE, "after_first": EARLY - 1, "late_from": LATE}.items()
    yield from ((f"times_{name}", 10 ** shape[name]) for name in TIMES)
    yield from ((name, shape[name]) for name in ("head_sign", "rare_sign"))
    yield "tenth", 10 ** (shape["size"] + shape["spread"])
    yield "mean", ratio(sums["size"], sums["tokens"])
    yield "root_mean_square", math.sqrt(ratio(sums["squared"], sums["tokens"]))
    shares = {words: shape[f"by_{name}"] for name, words in PATTERN_WORDS.items()}
    patterns = [f"{_percent(share)} with {words}" for words, share in shares.items() if share >= WORTH_A_WORD]
    if patterns:
        yield "patterns", ", ".join(patterns)

    if grows_with(signals, "lag"):
        yield "with_age", growth(signals, "lag")
        yield "age", mean_lag(signals)
    if grows_with(signals, "step"):
        yield "with_step", growth(signals, "step")
    if sums["recomputed"]:
        yield "own_moves", _percent(max(0.0, 1 - ratio(sums["engine_squared"], sums["paired"], 1.0)))
    if abs(gain(signals)) >= WORTH_A_WORD:
        yield "gain", gain(signals)
    yield "falls", falls(signals)
    for name in ("seen", "new"):
        yield name, _percent(ratio(sums[f"{name}_above"], sums[f"{name}_sided"]))

    yield "sixteen_bits", settled().sixteen_bits
    yield "beyond_sixteen" if beyond_sixteen_bits(signals) else "within_sixteen", ""
    yield "positive", _percent(ratio(sums["positive"], sums["squared"], 0.5))
    if sums["again"]:
        yield "floors", math.sqrt(ratio(sums["again_paired"], sums["again_squared"], math.inf))

    low, same, near = signals.least("sampler")
    yield "low", low
    yield "near_low", count(same + near, "token")
    yield "impossible", _percent(ratio(sums["impossible"], sums["tokens"]))
    if signals.vocabulary:
        yield "vocabulary", signals.vocabulary
        yield "floor", _percent(min(1.0, signals.vocabulary * math.exp(low)))

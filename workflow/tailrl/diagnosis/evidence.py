"""The sentences that speak for a cause, with this log's numbers."""

import math
import re
from collections.abc import Callable

from tailrl.diagnosis.features import (
    falls,
    features,
    gain,
    grows_with,
    growth,
    mean_lag,
    ratio,
    source,
    temperature,
)
from tailrl.diagnosis.measure import Measured
from tailrl.diagnosis.signals import EARLY, HEAD, IMPROBABLE, LAGS, LATE, RARE
from tailrl.diagnosis.sure import beyond_sixteen_bits, settled
from tailrl.page_parts.number_text import count

NO_SHARE = re.compile(r"(?<![\d.])0 %")

WORTH_A_WORD = 0.01
"""A share, or a correlation, that is smaller is no evidence."""


def evidence(name: str, measured: Measured) -> tuple[str, ...]:
    """The sentences for a cause of `causes.yaml`; one with a share of 0 % is no evidence, and left out."""
    return tuple(sentence for sentence in EVIDENCE[name](measured) if not NO_SHARE.search(sentence))


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _share(measured: Measured, name: str) -> str:
    sums = measured.signals.sums
    return _percent(ratio(sums[name], sums["tokens"]))


def _nan(measured: Measured) -> list[str]:
    return [f"{count(number, 'token')}: the {name}." for name, number in measured.odd.items() if number]


def _mask(measured: Measured) -> list[str]:
    return [
        f"{count(zeros, 'token')} in runs of exactly 0 of the {side}, some of which the other side gives less than "
        f"e^{IMPROBABLE:g}."
        for side, zeros in measured.signals.zeros.items()
        if zeros
    ]


def _shift(measured: Measured) -> list[str]:
    signals = measured.signals
    tokens, fits = signals.lag_sums
    best, present = int(signals.shifted.argmax()), LAGS.index(0)
    lag = LAGS[best]
    return [
        f"In {count(int(signals.shifted.sum()), 'sequence')} of {signals.compared} the two sides fit at least four "
        "times better after a move.",
        f"With the trainer's log-probs taken {count(abs(lag), 'token')} {'later' if lag > 0 else 'earlier'}, mean |Δ| "
        f"is {ratio(fits[best], tokens[best]):.2g} nats; as logged, {ratio(fits[present], tokens[present]):.2g}.",
    ]


def _clipped(measured: Measured) -> list[str]:
    found = []
    for side in measured.signals.zeros:
        low, same, near = measured.signals.least(side)
        if measured.signals.cut(side):
            found.append(
                f"{count(same, 'token')} of the {side} have exactly its least log-prob, "
                f"{low:.4g}; {near} lie within half a nat above it."
            )
    return found


def _temperature(measured: Measured) -> list[str]:
    found, explained = temperature(measured.signals)
    shape = features(measured.signals)
    warmer = "warmer" if found > 1 else "cooler"
    return [
        f"The sampler is {warmer}: its temperature is about {found:.2f} times the trainer's.",
        f"One ratio of temperatures explains {_percent(max(0.0, explained))} of Σ Δ².",
        f"Σ Δ / Σ |Δ| is {shape['head_sign']:+.2f} for certain tokens (above e^{HEAD:g}), and "
        f"{shape['rare_sign']:+.2f} for rare ones (below e^{RARE:g}).",
    ]


def _raw(measured: Measured) -> list[str]:
    found, explained = temperature(measured.signals)
    sentences = [
        f"E[d] / E[d²] is {source(measured.signals):+.2f}, with d = tanh(Δ/2): it is −1 for tokens from the logged "
        "distribution of the sampler, and +1 for tokens from the trainer's."
    ]
    if explained > 0.3:
        sentences.append(
            f"The sampler's logged log-probs are as of a temperature {found:.2f} times the trainer's, which explains "
            f"{_percent(explained)} of Σ Δ²."
        )
    return sentences


def _truncation(measured: Measured) -> list[str]:
    signals = measured.signals
    low, _ = signals.edges
    sums = signals.sums
    mass, most = math.exp(-sums["size"] / sums["tokens"]), math.exp(min(low, 0.0))
    above, theirs = ratio(sums["above"], sums["tokens"]), 1 - ratio(sums["positive"], sums["squared"], 1.0)
    sentences = [
        f"The sampler's probability is not the smaller one at {_percent(1 - above)} of the tokens; {_percent(theirs)} "
        "of Σ Δ² is theirs.",
        f"The sampler's set has {_percent(mass)} of the trainer's probability on average and {_percent(most)} at the "
        "least: top-p cuts at such a value.",
    ]
    if sums["ranked"]:
        sentences.append(f"No sampled token has a rank above {sums['rank']:.0f}, counted from 0.")
    return sentences


def _prompt(measured: Measured) -> list[str]:
    signals = measured.signals
    sums, shape = signals.sums, features(signals)
    certain = (
        f"At {_share(measured, 'sure_and_not')} of the tokens the sampler is certain and the trainer gives less than"
    )
    return [
        *([f"{certain} e^{RARE:g}."] if sums["sure_and_not"] else []),
        f"|Δ|/(1 − p) of a response's first token is {10 ** shape['first']:.2g} times that of its middle, of the next "
        f"{EARLY - 1} {10 ** shape['early']:.2g} times, of the last {10 ** shape['last']:.2g} times.",
        f"Mean |Δ| is {ratio(sums['size'], sums['tokens']):.2g} nats.",
        *_structure(measured),
    ]


def _stale(measured: Measured) -> list[str]:
    signals, sentences = measured.signals, []
    if grows_with(signals, "lag"):
        sentences.append(
            "It grows with the age of the sampler's weights: the correlation of a response's mismatch with step − "
            f"version is {growth(signals, 'lag'):+.2f}, at {mean_lag(signals):.3g} versions on average."
        )
    if grows_with(signals, "step"):
        sentences.append(
            "It grows with the steps, and no logged age of the weights does: the correlation of a response's mismatch "
            f"with the step is {growth(signals, 'step'):+.2f}, as where weights do not arrive at the engine."
        )
    if signals.sums["recomputed"]:
        share = max(0.0, 1 - ratio(signals.sums["engine_squared"], signals.sums["paired"], 1.0))
        sentences.append(
            f"{_percent(share)} of Σ Δ² is between the trainer's present log-probs and its recomputed ones, "
            "and not between the recomputed ones and the sampler's."
        )
    if abs(gain(signals)) >= WORTH_A_WORD:
        sentences.append(f"The correlation of a response's Σ Δ with its gain is {gain(signals):+.2f}.")
    shape = features(signals)
    sentences.append(
        f"A tenth of the tokens has |Δ|/(1 − p) above {10 ** (shape['size'] + shape['spread']):.2g} nats, half above "
        f"{10 ** shape['size']:.2g}: a few states moved far."
    )
    return sentences


def _structure(measured: Measured) -> list[str]:
    """How much of the errors has a pattern, which independent noise lacks; nothing where none is worth a word."""
    shape = features(measured.signals)
    named = {"odds": "the token's probability", "token": "the token itself", "place": "its place in the response"}
    parts = {words: shape[f"by_{name}"] for name, words in named.items() if shape[f"by_{name}"] >= WORTH_A_WORD}
    if not parts:
        return []
    several = ", ".join(f"{_percent(value)} with {words}" for words, value in parts.items())
    return [f"Of the variance of Δ/(1 − p), {several} goes along: independent rounding has no such pattern."]


def _seen(measured: Measured) -> list[str]:
    s = measured.signals.sums
    seen, new = (_percent(ratio(s[f"{name}_above"], s[f"{name}_sided"])) for name in ("seen", "new"))
    return [
        f"The trainer gives more than the sampler to {seen} of the tokens that already occurred, and to {new} of the "
        "others."
    ]


def _in_flight(measured: Measured) -> list[str]:
    return [
        f"Within a response the mismatch falls at one place, by {falls(measured.signals):.2g} standard errors more "
        "than it rises at another one, on average over responses."
    ]


def _at_places(measured: Measured) -> list[str]:
    shape = features(measured.signals)
    return [
        f"|Δ|/(1 − p) of a response's last token is {10 ** shape['last']:.2g} times that of its middle, of tokens "
        f"after the first {LATE} {10 ** shape['late']:.2g} times."
    ]


def _noise(measured: Measured) -> list[str]:
    signals = measured.signals
    shape, sums = features(signals), signals.sums
    sixteen = (
        "16 bits give as much."
        if not beyond_sixteen_bits(signals)
        else f"On logs of known cause 16 bits gave at most {settled().sixteen_bits:g}: look for weights or a cache of "
        "fewer bits, or for a mistake inside a model."
    )
    sentences = [
        f"|Δ|/(1 − p) has the median {10 ** shape['size']:.2g} nats, {10 ** shape['spread']:.2g} times that at 90 % "
        f"and {10 ** shape['tail']:.2g} times at 99 %. {sixteen}",
        *_structure(measured),
        f"{_percent(ratio(sums['positive'], sums['squared'], 0.5))} of Σ Δ² lies above 0: noise has no side.",
        f"Certain tokens have {10 ** shape['law']:.2g} times the |Δ|/(1 − p) of rare ones.",
    ]
    if sums["again"]:
        times = math.sqrt(ratio(sums["again_paired"], sums["again_squared"], math.inf))
        sentences.append(f"The root of the mean square of Δ is {times:.3g} times the trainer's own noise floor.")
    return sentences


def _floor(measured: Measured) -> list[str]:
    signals = measured.signals
    low, same, near = signals.least("sampler")
    sentences = [
        f"{count(same + near, 'token')} of the sampler lie within half a nat of its least log-prob, {low:.4g}.",
        f"At {_share(measured, 'impossible')} of the tokens the trainer gives less than e^−12, and the sampler over "
        "seven times as much.",
    ]
    if signals.vocabulary:
        share = min(1.0, signals.vocabulary * math.exp(low))
        sentences.append(f"Among {signals.vocabulary:,} token ids this is a floor of about {_percent(share)}.")
    return sentences


def _unknown(measured: Measured) -> list[str]:
    sums = measured.signals.sums
    return [
        f"Mean |Δ| is {ratio(sums['size'], sums['tokens']):.2g} nats, its root mean square "
        f"{math.sqrt(ratio(sums['squared'], sums['tokens'])):.2g}; no known cause fits well.",
        *_structure(measured),
    ]


EVIDENCE: dict[str, Callable[[Measured], list[str]]] = {
    "nan": _nan,
    "mask": _mask,
    "shift": _shift,
    "clipped": _clipped,
    "temperature": _temperature,
    "penalty": _seen,
    "generation_config": lambda measured: [*_truncation(measured), *_seen(measured)],
    "raw": _raw,
    "truncation": _truncation,
    "prompt": _prompt,
    "stale": _stale,
    "in_flight": _in_flight,
    "depth": _at_places,
    "last": _at_places,
    "precision": _noise,
    "routing": _noise,
    "floor": _floor,
    "unknown": _unknown,
}
"""By the cause's name."""

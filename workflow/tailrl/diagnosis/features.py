"""The numbers that causes are told by, each with a meaning of its own, from a log's sums."""

import math
from typing import Literal

import numpy as np

from tailrl.artifacts.metrics import FloatArray
from tailrl.diagnosis.signals import LOG_TEMPERATURES, PATTERNS, RARE, SIZE_EDGES, Signals

FEATURES = (
    *("size", "quiet", "spread", "tail", "source", "positive", "above", "temperature_fit", "temperature_size", "law"),
    *("head_sign", "rare_sign", "first", "early", "last", "neighbours", "size_neighbours"),
    *("disagreement", "impossible", "gain", "older", "later", "moved", "entropy", "plateau", "crossing", "one_sided"),
    *("crossed_source", "sided_source", "amount", "every", "lost", "by_odds", "by_token", "by_place", "by_pair"),
    *("bias", "late", "depth", "seen_above", "seen_sign", "falls"),
)
"""In the order of a vector: see `features`."""


FEWEST_RESPONSES = 8
CLEAR = 4.0  # standard errors: responses to one prompt are alike, so fewer of them are independent
FEWEST_SEEN = 20  # tokens of either kind, that already occurred or did not


def ratio(above: float, below: float, otherwise: float = 0.0) -> float:
    """above / below; `otherwise` where that is none."""
    return above / below if below > 0 and math.isfinite(above) else otherwise


def decades(above: float, below: float) -> float:
    """log10 of a ratio, cut to three decades; 0 where it is none."""
    return float(np.clip(math.log10(above / below), -3, 3)) if above > 0 and below > 0 else 0.0


def quantile(sizes: FloatArray, share: float) -> float:
    """A quantile of log10 |x| from its histogram: the middle of a bin."""
    place = int(np.searchsorted(np.cumsum(sizes), share * sizes.sum()))
    low, high = SIZE_EDGES[place : place + 2]
    return float(np.clip((low + high) / 2, SIZE_EDGES[1], SIZE_EDGES[-2]))


def temperature(signals: Signals) -> tuple[float, float]:
    """The ratio of temperatures, sampler over trainer, that fits best, and the share of Σℓ² that it explains."""
    product_KG, square_KG = signals.temperature
    explained_KG = (2 * product_KG - square_KG) / max(signals.sums.get("weighted_squared", 0.0), 1e-300)
    explained_G = np.nan_to_num(explained_KG).max(0)
    best = int(explained_G.argmax())
    return float(np.exp(LOG_TEMPERATURES[best])), float(explained_G[best])


def source(signals: Signals) -> float:
    """E[d] / E[d²]: −1 where the tokens come from the sampler's logged distribution, +1 where from the trainer's.

    With m = (p + q)/2, p = m(1 + d) and q = m(1 − d): Σ m d = 0 over a vocabulary, so E_q[d] = −Σ m d², and E_q[d²]
    is the same to second order. A distribution that sums to less than 1 gives more.
    A small mismatch says nothing: one token's worth of −1 is added.
    """
    _, d_S, squared_S = signals.sequences()[:3]
    return (float(d_S.sum()) - 1) / (float(squared_S.sum()) + 1)


def gain(signals: Signals) -> float:
    """Correlation of a response's Σℓ, per root of its length, with its advantage or else its reward."""
    tokens_S, _, _, delta_S, gain_S = signals.sequences()[:5]
    real_S = (tokens_S > 0) & np.isfinite(gain_S)
    if real_S.sum() < 8:
        return 0.0
    value_S = np.tanh(delta_S[real_S] / np.sqrt(tokens_S[real_S]) / (np.abs(delta_S[real_S]).mean() + 1e-12))
    if not (value_S.std() and gain_S[real_S].std()):
        return 0.0
    found = float(np.corrcoef(value_S, gain_S[real_S])[0, 1])
    return found if math.isfinite(found) else 0.0


def every(signals: Signals) -> float:
    """Mean over standard deviation of a response's Σℓ, per root of its length: below −1 where every response is hit.

    A wrong prompt takes something from every response; older weights differ in a few states, which some responses meet.
    """
    tokens_S, _, _, delta_S = signals.sequences()[:4]
    real_S = tokens_S > 0
    value_S = np.maximum(delta_S[real_S] / np.sqrt(tokens_S[real_S]), -20.0)
    if len(value_S) < 8 or not value_S.std():
        return 0.0
    return float(np.clip(value_S.mean() / value_S.std(), -5.0, 5.0))


def growth(signals: Signals, by: Literal["lag", "step"]) -> float:
    """The correlation of a response's mismatch, log10 of its mean d², with its lag (step − version) or its step.

    Stale weights make the mismatch grow with the lag. A lag that all responses share says nothing, for an asynchronous
    run has it whatever its mismatch is. The step is asked only where lags are unknown or alike: 0 otherwise.
    """
    tokens_S, _, squared_S, *_, version_S, step_S, _ = signals.sequences()
    real_S = (tokens_S > 0) & (squared_S > 0) & np.isfinite(step_S)
    lag_S = step_S - version_S
    lags = np.unique(lag_S[real_S & np.isfinite(lag_S)])
    if by == "lag":
        real_S &= np.isfinite(lag_S)
    elif len(lags) > 1:
        return 0.0
    value_S = (lag_S if by == "lag" else step_S)[real_S]
    if len(value_S) < FEWEST_RESPONSES or len(np.unique(value_S)) < 2:
        return 0.0
    size_S = np.log10(squared_S[real_S] / tokens_S[real_S])
    found = float(np.corrcoef(size_S, value_S)[0, 1]) if size_S.std() else 0.0
    return found if math.isfinite(found) else 0.0


def grows_with(signals: Signals, by: Literal["lag", "step"]) -> bool:
    """Whether the growth is above that of chance: CLEAR standard errors of a correlation."""
    return growth(signals, by) > CLEAR / math.sqrt(max(signals.sequences().shape[1], CLEAR**2))


def mean_lag(signals: Signals) -> float:
    """Mean of step − version, steps, where both are logged; 0 where none is."""
    *_, version_S, step_S, _ = signals.sequences()
    known_S = np.isfinite(version_S) & np.isfinite(step_S)
    return float((step_S - version_S)[known_S].mean()) if known_S.any() else 0.0


def seen_apart(signals: Signals) -> tuple[float, float]:
    """Tokens that already occurred against the others: sizes of the differences of shares with ℓ > 0, and of Σℓ/Σ|ℓ|.

    0 where few tokens of either kind have a side. A penalty on tokens that already occurred makes both large.
    """
    s = signals.sums
    if min(s["seen_sided"], s["new_sided"]) < FEWEST_SEEN:
        return 0.0, 0.0
    above = s["seen_above"] / s["seen_sided"] - s["new_above"] / s["new_sided"]
    signed = ratio(s["seen_signed"], s["seen_size"]) - ratio(s["new_signed"], s["new_size"])
    return abs(above), abs(signed)


def falls(signals: Signals) -> float:
    """The mean over responses of how much clearer the mismatch falls than it rises within them: see `_falls`."""
    fall_S = signals.sequences()[7]
    known_S = np.isfinite(fall_S)
    return float(fall_S[known_S].mean()) if known_S.sum() >= FEWEST_RESPONSES else 0.0


def pattern(signals: Signals, name: str) -> float:
    """The share of the variance of x between the groups of PATTERNS: 0 for independent noise, which has no pattern.

    The intraclass correlation of a one-way analysis of variance, without bias by the number of groups. A mistake inside
    a model errs alike where the probability, the token or the place is alike; rounding in 16 bits does not.
    """
    tokens_G, x_G = signals.patterns[name][:, signals.patterns[name][0] > 0]
    tokens, groups = float(tokens_G.sum()), len(tokens_G)
    size = (tokens - float((tokens_G**2).sum()) / tokens) / max(groups - 1, 1) if groups else 0.0
    if groups < 2 or tokens <= groups or size <= 1:
        return 0.0
    within = float((x_G**2 / tokens_G).sum())
    between = (within - float(x_G.sum()) ** 2 / tokens) / (groups - 1)
    rest = (signals.sums["cut_squared"] - within) / (tokens - groups)
    return float(np.clip(ratio(between - rest, between + (size - 1) * rest), -0.2, 1.0))


def features(signals: Signals) -> dict[str, float]:
    """FEATURES of a log.

    size: log10 of the median |x|; quiet: decades from its 10 % quantile to there; spread, tail: from there to its 90 %
    and 99 % quantiles. source: see above, squashed. positive: the share of Σℓ² with ℓ > 0; above: of tokens.
    temperature_fit: of `temperature`, with temperature_size, its |ln|. law: decades by which |ℓ|/(1 − p̄) of certain
    tokens is above that of rare ones. head_sign, rare_sign: Σℓ/Σ|ℓ|. first, early, last, late: decades of |x| there
    above the middle's. neighbours: correlation of x with the next token's; size_neighbours: of |x|. disagreement,
    impossible: log10 of the shares of tokens that the sampler is sure of and the trainer finds rare, and that the
    trainer gives e^−12 and the sampler far more. gain: see above. older, later: `growth` by lag and by step. moved: how
    much of Σℓ² is the trainer's own,
    where its recomputed log-probs are logged. entropy: mean −s, nats. plateau: log10 of the share of tokens within
    half a nat of the sampler's least log-prob. crossing, one_sided: whether certain and rare tokens err to different
    sides, or to one. crossed_source, sided_source: these with the source: temperatures cross, and the source says
    which log-probs are true; a truncated sampler's tokens err to one side, more than any whole distribution's. amount:
    log10 of the root mean square of ℓ, cut to 3 nats. every: see above. lost: the share of Σℓ², so cut, where the
    sampler is certain. by_odds, by_token, by_place, by_pair: see `pattern`. bias: |mean| over root mean square of x.
    depth: the trainer's mean −log-prob, nats, where only the sampler is certain; one token of 3 nats is added.
    seen_above, seen_sign: see `seen_apart`. falls: see above.
    """
    s = signals.sums
    tokens = s["tokens"]
    middle = quantile(signals.sizes, 0.5)
    found, explained = temperature(signals)
    x_mean, x_squared = s["cut_size"] / tokens, s["cut_squared"] / tokens
    place = ratio(s["middle_size"], s["middle"])
    beta = source(signals)
    head, rare = ratio(s["head_signed"], s["head_size"]), ratio(s["rare_signed"], s["rare_size"])
    seen_above, seen_sign = seen_apart(signals)
    return {
        "size": middle,
        "quiet": min(4.0, middle - quantile(signals.sizes, 0.1)),
        "spread": quantile(signals.sizes, 0.9) - middle,
        "tail": quantile(signals.sizes, 0.99) - middle,
        "source": 4 * beta / (3 + abs(beta)),
        "positive": ratio(s["positive"], s["squared"], 0.5),
        "above": s["above"] / tokens,
        "temperature_fit": max(0.0, explained),
        "temperature_size": abs(math.log(found)) * max(0.0, explained),
        "law": decades(ratio(s["head_size"], s["head_rest"]), ratio(s["rare_size"], s["rare"])),
        "head_sign": head,
        "rare_sign": rare,
        **{name: decades(ratio(s[f"{name}_size"], s[name]), place) for name in ("first", "early", "last", "late")},
        "neighbours": ratio(s["neighbours"], s["cut_squared"]),
        "size_neighbours": ratio(ratio(s["size_neighbours"], s["pairs"], x_mean**2) - x_mean**2, x_squared - x_mean**2),
        "disagreement": math.log10(s["sure_and_not"] / tokens + 1e-4),
        "impossible": math.log10(s["impossible"] / tokens + 1e-4),
        "gain": gain(signals),
        "older": growth(signals, "lag"),
        "later": growth(signals, "step"),
        "moved": max(0.0, 1 - ratio(s["engine_squared"], s["paired"], 1.0)) if s["recomputed"] else 0.0,
        "entropy": min(3.0, s["entropy"] / tokens),
        "plateau": math.log10(signals.least("sampler")[2] / tokens + 1e-4),
        "crossing": max(0.0, -head * rare),
        "one_sided": max(0.0, head * rare),
        "crossed_source": max(0.0, -head * rare) * math.tanh(2 * beta),
        "sided_source": max(0.0, head * rare) * float(np.clip(-beta - 1, 0, 3)) / 3,
        "amount": math.log10(s["weighted_squared"] / tokens + 1e-14) / 2,
        "every": every(signals),
        "lost": ratio(s["lost"], s["weighted_squared"]),
        "seen_above": seen_above,
        "seen_sign": seen_sign,
        "falls": falls(signals),
        "depth": (s["depth"] - RARE) / (s["sure_and_not"] + 1),
        **{f"by_{name}": pattern(signals, name) for name in PATTERNS},
        "bias": ratio(abs(float(signals.patterns["odds"][1].sum())), math.sqrt(tokens * s["cut_squared"])),
    }

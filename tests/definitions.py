"""What the package must agree with, written out in plain loops over float64 probabilities."""

import math
from collections.abc import Sequence


def softmax(logits: Sequence[float]) -> list[float]:
    """Probabilities of one row of logits."""
    largest = max(logits)
    weights = [math.exp(z - largest) for z in logits]
    total = math.fsum(weights)
    return [w / total for w in weights]


def disturbed(logits: Sequence[float], bias: Sequence[float], noise: Sequence[float], floor: float) -> list[float]:
    """Probabilities of one row of logits, each moved by its bias and its noise, under a floor."""
    moved = softmax([z + b + e for z, b, e in zip(logits, bias, noise, strict=True)])
    return [(1 - floor) * p + floor / len(moved) for p in moved]


def safe_tokens(probs: Sequence[float], rule: str, threshold: float) -> list[bool]:
    """The safe set of one state, by the rule's words: which tokens are in it.

    Args:
        probs: of every token.
        rule: full, min_p, entropy, top_k or top_p.
        threshold: ln ρ, k or p; full has none.
    """
    if rule == "full":
        return [True] * len(probs)
    largest = max(probs)
    if rule == "min_p":
        return [p >= math.exp(threshold) * largest for p in probs]
    if rule == "entropy":
        entropy = -sum(p * math.log(p) for p in probs if p > 0)
        return [p >= math.exp(threshold) * math.exp(-entropy) or p == largest for p in probs]
    # The tokens from the most probable on, until there are enough of them; then what ties with the last one.
    mass, least = 0.0, 1.0
    for count, p in enumerate(sorted(probs, reverse=True)):
        if count > 0 and (count >= threshold if rule == "top_k" else mass >= threshold):
            break
        mass, least = mass + p, p
    return [p >= least for p in probs]

"""Hypotheses on what was written: which of the model's numbers a column holds. `catalogue.yaml` names them.

Each takes a response's predicted numbers, and a number, and returns what the column would hold: nats, NaN where the
hypothesis says nothing.
"""

from dataclasses import dataclass

import numpy as np

from tailrl.artifacts.metrics import FloatArray


@dataclass(frozen=True, slots=True)
class Predicted:
    """What a world gives for the scored tokens of one response.

    Attributes:
        logprob_T, top_T: nats, log-probs of the tokens, and the largest at their positions.
        position_T: int64, places in the response.
        length: tokens of the response.
    """

    logprob_T: FloatArray
    top_T: FloatArray
    position_T: np.ndarray
    length: int


def as_it_is(predicted: Predicted, value: float) -> FloatArray:  # noqa: ARG001 - the interface of all
    """The log-probs."""
    return predicted.logprob_T


def most_likely(predicted: Predicted, value: float) -> FloatArray:  # noqa: ARG001
    """The log-prob of the most probable token, not of the sampled one."""
    return predicted.top_T


def negated(predicted: Predicted, value: float) -> FloatArray:  # noqa: ARG001
    """Negative log-likelihoods."""
    return -predicted.logprob_T


def probability(predicted: Predicted, value: float) -> FloatArray:  # noqa: ARG001
    """Probabilities."""
    return np.exp(predicted.logprob_T)


def other_base(predicted: Predicted, value: float) -> FloatArray:
    """Logarithms of another base, whose natural logarithm is the number."""
    return predicted.logprob_T / value


def shifted(predicted: Predicted, value: float) -> FloatArray:
    """Each token has the number of the token so many places later."""
    by_place = np.full(predicted.length, np.nan)
    by_place[predicted.position_T] = predicted.logprob_T
    wanted_T = predicted.position_T + int(value)
    inside_T = (wanted_T >= 0) & (wanted_T < predicted.length)
    return np.where(inside_T, by_place[np.clip(wanted_T, 0, predicted.length - 1)], np.nan)


def mean_of_response(predicted: Predicted, value: float) -> FloatArray:  # noqa: ARG001
    """The mean of the response, for each of its tokens."""
    return np.full(len(predicted.logprob_T), predicted.logprob_T.mean())


def floor(predicted: Predicted, value: float) -> FloatArray:
    """Log-probs cut off below the number."""
    return np.maximum(predicted.logprob_T, value)


def rounded(predicted: Predicted, value: float) -> FloatArray:
    """Log-probs on a grid of this width."""
    return np.round(predicted.logprob_T / value) * value

"""Remedies replayed on a log's tokens: what each would keep, weigh and drop, at several thresholds."""

from dataclasses import dataclass

from tailrl.diagnosis.log import Log


@dataclass(frozen=True, slots=True)
class Replayed:
    """A remedy at a threshold, on the tokens of a log.

    Attributes:
        name: the remedy's key; threshold: its setting.
        kept_tokens, kept_responses: shares that keep a weight above 0.
        ess: effective sample size of the weights, as a share.
        largest: the largest weight.
        cosine: between the gradients in log-prob space with and without the remedy; NaN without advantages.
    """

    name: str
    threshold: float
    kept_tokens: float
    kept_responses: float
    ess: float
    largest: float
    cosine: float


class Replay:
    """Adds up what each remedy does to the parts of a log."""

    def add(self, log: Log) -> None:
        """Adds a part of a log."""

    def table(self) -> tuple[Replayed, ...]:
        """Each remedy at each threshold."""
        return ()

"""The worst responses of a log, token by token, for the token explorer."""

from dataclasses import dataclass

from tailrl.artifacts.metrics import FloatArray
from tailrl.diagnosis.log import IntArray, Log


@dataclass(frozen=True, slots=True)
class Response:
    """A response of T tokens, as logged: see `log.LoggedRow`. `texts`: each token's text; empty if none is known."""

    sampler_T: FloatArray
    trainer_T: FloatArray
    token_T: IntArray
    advantage_T: FloatArray
    trainer_top_T: FloatArray
    sampler_top_T: FloatArray
    rank_T: FloatArray
    step: float
    reward: float
    text: str | None
    texts: tuple[str, ...] = ()


class Worst:
    """Keeps the responses with the largest mismatch of the parts of a log."""

    def add(self, log: Log) -> None:
        """Adds a part of a log."""

    def responses(self) -> tuple[Response, ...]:
        """The worst response first."""
        return ()

"""The worst responses of a log, token by token, for the token explorer."""

import numpy as np

from tailrl.diagnosis.log import SIDES, Log, spans
from tailrl.page_parts.explorer import Response, mean_mismatch

__all__ = ["Response", "Worst"]

MOST_RESPONSES = 20  # responses that are kept
MOST_KEPT_TOKENS = 100_000  # of a response: what bounds the memory
COLUMNS = (*SIDES, "token", "advantage", "trainer_top", "sampler_top", "rank", "trainer_set", "sampler_set")
"""What the explorer has of each token."""


class Worst:
    """Keeps the MOST_RESPONSES with the largest mean |Δ| of their tokens, of all parts of a log."""

    def __init__(self) -> None:
        self._kept: list[tuple[float, int, Response]] = []
        self._seen = 0

    def add(self, log: Log) -> None:
        """Adds a part of a log."""
        mean_S = mean_mismatch(log.sampler_T, log.trainer_T, log.sequence_T, len(log.start_S))
        tokens = spans(log)
        least = self._kept[-1][0] if len(self._kept) == MOST_RESPONSES else -np.inf
        for place in np.argsort(-mean_S, kind="stable")[:MOST_RESPONSES]:
            if mean_S[place] > least:
                self._kept.append(
                    (float(mean_S[place]), -self._seen - int(place), _response(log, place, tokens[place]))
                )
        self._kept.sort(key=lambda kept: kept[:2], reverse=True)
        del self._kept[MOST_RESPONSES:]
        self._seen += len(log.start_S)

    def responses(self) -> tuple[Response, ...]:
        """The worst response first; of equals the earlier one."""
        return tuple(response for _, _, response in self._kept)


def _response(log: Log, place: int, tokens: slice) -> Response:
    tokens = slice(tokens.start, min(tokens.stop, tokens.start + MOST_KEPT_TOKENS))
    # Copied: a view would keep the whole part.
    columns = {f"{name}_T": getattr(log, f"{name}_T")[tokens].copy() for name in COLUMNS}
    return Response(**columns, step=float(log.step_S[place]), reward=float(log.reward_S[place]), text=log.text_S[place])

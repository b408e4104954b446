"""The worst responses of a log, token by token, for the token explorer."""

from typing import Any

import numpy as np

from tailrl.diagnosis.log import IntArray, Log
from tailrl.page_parts.explorer import Response, mean_mismatch

__all__ = ["Response", "Worst"]

MOST_RESPONSES = 20
"""Responses that are kept."""

MOST_KEPT_TOKENS = 100_000
"""Of a response: what bounds the memory."""


class Worst:
    """Keeps the MOST_RESPONSES with the largest mean |Δ| of their tokens, of all parts of a log."""

    def __init__(self) -> None:
        self._kept: list[tuple[float, int, Response]] = []
        self._seen = 0

    def add(self, log: Log) -> None:
        """Adds a part of a log."""
        mean_S = mean_mismatch(log.sampler_T, log.trainer_T, log.sequence_T, len(log.start_S))
        end_S = np.append(log.start_S[1:], len(log.sequence_T))
        least = self._kept[-1][0] if len(self._kept) == MOST_RESPONSES else -np.inf
        for place in np.argsort(-mean_S, kind="stable")[:MOST_RESPONSES]:
            if mean_S[place] > least:
                self._kept.append((float(mean_S[place]), -self._seen - int(place), _response(log, place, end_S)))
        self._kept.sort(key=lambda kept: kept[:2], reverse=True)
        del self._kept[MOST_RESPONSES:]
        self._seen += len(log.start_S)

    def responses(self) -> tuple[Response, ...]:
        """The worst response first; of equals the earlier one."""
        return tuple(response for _, _, response in self._kept)


def _response(log: Log, place: int, end_S: IntArray) -> Response:
    tokens = slice(log.start_S[place], min(end_S[place], log.start_S[place] + MOST_KEPT_TOKENS))

    def column(name: str) -> Any:  # copied: a view would keep the whole part
        return getattr(log, f"{name}_T")[tokens].copy()

    return Response(
        sampler_T=column("sampler"),
        trainer_T=column("trainer"),
        token_T=column("token"),
        advantage_T=column("advantage"),
        trainer_top_T=column("trainer_top"),
        sampler_top_T=column("sampler_top"),
        rank_T=column("rank"),
        trainer_set_T=column("trainer_set"),
        sampler_set_T=column("sampler_set"),
        step=float(log.step_S[place]),
        reward=float(log.reward_S[place]),
        text=log.text_S[place],
    )

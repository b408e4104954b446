"""The worst responses of a log, token by token, for the token explorer."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tailrl.diagnosis.log import IntArray, Log
from tailrl.pages.explorer import Response, delta, token_texts
from tailrl.runtime.errors import StudyError, reason

__all__ = ["Response", "Worst", "read_tokenizer", "with_texts"]

MOST_RESPONSES = 20
"""Responses that are kept."""

MOST_KEPT_TOKENS = 100_000
"""Of a response: what bounds the memory."""

ODD_NATS = 1.0
"""What a token without two log-probs counts for: more than any rounding."""


class Worst:
    """Keeps the MOST_RESPONSES with the largest mean |Δ| of their tokens, of all parts of a log."""

    def __init__(self) -> None:
        self._kept: list[tuple[float, int, Response]] = []
        self._seen = 0

    def add(self, log: Log) -> None:
        """Adds a part of a log."""
        size_T = np.abs(delta(log.sampler_T, log.trainer_T))
        size_T = np.where(np.isnan(size_T), ODD_NATS, size_T)
        end_S = np.append(log.start_S[1:], len(size_T))
        mean_S = np.bincount(log.sequence_T, size_T, len(log.start_S)) / np.maximum(end_S - log.start_S, 1)
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
        step=float(log.step_S[place]),
        reward=float(log.reward_S[place]),
        text=log.text_S[place],
    )


def read_tokenizer(path: Path) -> Any:
    """The tokenizer in a tokenizer.json, or in a model's folder; raises StudyError if there is none."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise StudyError("--tokenizer: needs the Python package tokenizers, which is not installed") from None
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library's errors are plain exceptions
        raise StudyError(f"{file}: is no tokenizer.json: {reason(error)}") from None


def with_texts(responses: Sequence[Response], tokenizer: Any) -> tuple[Response, ...]:
    """The responses with each token's text by a tokenizer of `tokenizers`; those without token ids stay as they are."""
    return tuple(
        replace(response, texts=token_texts(tokenizer, response.token_T.tolist()))
        if (response.token_T >= 0).all()
        else response
        for response in responses
    )

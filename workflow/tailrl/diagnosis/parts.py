"""Parts of a log: the tokens that one chooses, several logs as one, and a sample that fits into memory."""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from tailrl.diagnosis.log import Log

MOST_TOKENS = 400_000  # of a sample: some 50 MB


def part_of(log: Log, chosen_T: NDArray[np.bool_]) -> Log:
    """The chosen tokens as a log. They keep their place in the response; a response without any is left out."""
    count_S = np.bincount(log.sequence_T[chosen_T], minlength=len(log.start_S))
    kept_S = count_S > 0
    number_S = np.cumsum(kept_S) - 1
    columns: dict[str, object] = {
        "start_S": np.concatenate([[0], np.cumsum(count_S[kept_S])[:-1]]).astype(np.int64),
        "sequence_T": number_S[log.sequence_T[chosen_T]],
    }
    for one in fields(Log):
        if one.name in columns:
            continue
        values = getattr(log, one.name)
        if isinstance(values, tuple):
            columns[one.name] = tuple(value for value, kept in zip(values, kept_S, strict=True) if kept)
        else:
            columns[one.name] = values[chosen_T if one.name.endswith("_T") else kept_S]
    return Log(**columns)  # type: ignore[arg-type]


def joined(logs: Sequence[Log]) -> Log:
    """Several logs as one, in their order."""
    sizes = [(len(log.start_S), len(log.sequence_T)) for log in logs]
    before = np.concatenate([[[0, 0]], np.cumsum(sizes, 0)[:-1]]).astype(np.int64)
    columns: dict[str, object] = {}
    for one in fields(Log):
        values = [getattr(log, one.name) for log in logs]
        if one.name in ("start_S", "sequence_T"):
            ahead = before[:, 1 if one.name == "start_S" else 0]
            values = [own + int(number) for own, number in zip(values, ahead, strict=True)]
        columns[one.name] = sum(values, ()) if isinstance(values[0], tuple) else np.concatenate(values)
    return Log(**columns)  # type: ignore[arg-type]


class Sample:
    """Every n-th response of a log, n as small as MOST_TOKENS allows; a longer response is cut to that many tokens."""

    def __init__(self, most: int = MOST_TOKENS) -> None:
        self.every = 1
        self._most = most
        self._parts: list[tuple[NDArray[np.int64], Log]] = []  # the responses' numbers in the whole log, and the part
        self._seen = 0

    def add(self, log: Log) -> None:
        """Adds a part of a log."""
        number_S = np.arange(self._seen, self._seen + len(log.start_S))
        self._seen += len(log.start_S)
        self._keep(number_S, part_of(log, log.position_T < self._most) if len(log.position_T) else log)
        while sum(len(part.sequence_T) for _, part in self._parts) > self._most and self._responses() > 1:
            self.every *= 2
            parts, self._parts = self._parts, []
            for numbers, part in parts:
                self._keep(numbers, part)

    def _keep(self, number_S: NDArray[np.int64], log: Log) -> None:
        chosen_S = number_S % self.every == 0
        if chosen_S.any():
            self._parts.append((number_S[chosen_S], part_of(log, chosen_S[log.sequence_T])))

    def _responses(self) -> int:
        return sum(len(part.start_S) for _, part in self._parts)

    def log(self) -> Log | None:
        """The sample; None of an empty log."""
        return joined([part for _, part in self._parts]) if self._parts else None

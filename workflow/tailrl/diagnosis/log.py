"""A part of a log: sampled tokens with both sides' log-probs, packed sequence after sequence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrl.artifacts.metrics import FloatArray

IntArray = NDArray[np.int64]

LOGPROB_ROUNDING = 1e-5  # nats above 0 that rounding may give a log-prob
SIDES = ("sampler", "trainer")  # as columns of log-probs are called

OPTIONAL_NUMBERS = (
    *("recomputed", "advantage", "again", "trainer_top", "sampler_top", "rank"),
    *("trainer_set", "sampler_set"),
)
"""The numbers of a token that a log may leave out."""


@dataclass(frozen=True, slots=True)
class LoggedRow:
    """One sequence of a log: what a reader found of it.

    Attributes:
        where: its file and line, for messages.
        sampler_T, trainer_T: nats, the log-probs of the response's tokens as logged: NaN, ±inf and numbers above 0 are
            kept, for they are findings.
        token_T: token ids. recomputed_T: the trainer's log-probs when the update began, where `trainer_T` is of a
            later point of it. advantage_T: one number a token.
        again_T: the trainer's log-probs of the same weights computed once more, packed in another way: the noise floor.
        trainer_top_T, sampler_top_T: nats, the largest log-prob of each side's distribution at the token's position.
        rank_T: the sampled token's place in the trainer's distribution; 0: the most probable.
        trainer_set_T, sampler_set_T: the number of tokens in each side's safe set at the token's position.
        seen_T: bool, whether the token's id stands earlier in the prompt or in the response; None: not known.
        step, version, reward: of the sequence; NaN: not logged. `version` is that of the sampler's weights.
        prompt: a number that is the same for equal prompts; NaN: not logged.
        text: the response.
        digest: tells a response from any other, for those that several files have.
        labels: other columns with one word or whole number a row, such as the data source.
        whole_T: token ids of prompt and response together, up to the last token that is scored; place_T: the place in
            it of each token of the response. None: the log has no prompt's ids.
        prompt_text: the prompt, where it is logged in words.
    """

    where: str
    sampler_T: FloatArray
    trainer_T: FloatArray
    token_T: IntArray | None = None
    recomputed_T: FloatArray | None = None
    advantage_T: FloatArray | None = None
    again_T: FloatArray | None = None
    trainer_top_T: FloatArray | None = None
    sampler_top_T: FloatArray | None = None
    rank_T: FloatArray | None = None
    trainer_set_T: FloatArray | None = None
    sampler_set_T: FloatArray | None = None
    seen_T: NDArray[np.bool_] | None = None
    step: float = np.nan
    version: float = np.nan
    reward: float = np.nan
    prompt: float = np.nan
    text: str | None = None
    digest: bytes = b""
    labels: Mapping[str, str] = field(default_factory=dict)
    whole_T: IntArray | None = None
    place_T: IntArray | None = None
    prompt_text: str | None = None


@dataclass(frozen=True, slots=True)
class Log:
    """S sequences of T tokens in all.

    Attributes:
        start_S: int64, each sequence's first token; its tokens end where the next one's begin.
        sequence_T, position_T: int64, each token's sequence and its place in the response, from 0.
        sampler_T, trainer_T: float64, nats.
        token_T: int64; −1: not logged.
        recomputed_T, advantage_T, again_T, trainer_top_T, sampler_top_T, rank_T, trainer_set_T, sampler_set_T: float64,
            as in LoggedRow; NaN: not logged.
        seen_T: float64, 1 where the token's id stands earlier in the prompt or the response; NaN: not known.
        step_S, version_S, reward_S, prompt_S: float64, as in LoggedRow; NaN: not logged.
        text_S: None: not logged. labels_S: as in LoggedRow.
        whole_S, place_S, prompt_text_S: each sequence's ids with its prompt, the response's places in them and the
            prompt's text, as in LoggedRow; None: not logged.
    """

    start_S: IntArray
    sequence_T: IntArray
    position_T: IntArray
    sampler_T: FloatArray
    trainer_T: FloatArray
    token_T: IntArray
    recomputed_T: FloatArray
    advantage_T: FloatArray
    again_T: FloatArray
    trainer_top_T: FloatArray
    sampler_top_T: FloatArray
    rank_T: FloatArray
    trainer_set_T: FloatArray
    sampler_set_T: FloatArray
    seen_T: FloatArray
    step_S: FloatArray
    version_S: FloatArray
    reward_S: FloatArray
    prompt_S: FloatArray
    text_S: tuple[str | None, ...]
    labels_S: tuple[Mapping[str, str], ...]
    whole_S: tuple[IntArray | None, ...] = ()
    place_S: tuple[IntArray | None, ...] = ()
    prompt_text_S: tuple[str | None, ...] = ()

    def has(self) -> frozenset[str]:
        """The optional columns that at least one token or sequence has."""
        numbers = {name: getattr(self, f"{name}_S") for name in ("step", "version", "reward")}
        numbers |= {name: getattr(self, f"{name}_T") for name in OPTIONAL_NUMBERS}
        found = {name for name, values in numbers.items() if not np.isnan(values).all()}
        if (self.token_T >= 0).any():
            found.add("token")
        if any(text is not None for text in self.text_S):
            found.add("text")
        return frozenset(found)


def spans(log: Log) -> list[slice]:
    """Each sequence's tokens."""
    ends = [*log.start_S[1:].tolist(), len(log.sequence_T)]
    return [slice(begin, end) for begin, end in zip(log.start_S.tolist(), ends, strict=True)]


def from_end(log: Log) -> IntArray:
    """Each token's place from its response's end, from 0."""
    last_S = np.zeros(len(log.start_S), np.int64)
    np.maximum.at(last_S, log.sequence_T, log.position_T)
    found: IntArray = last_S[log.sequence_T] - log.position_T
    return found


def sound(log: Log) -> NDArray[np.bool_]:
    """Which tokens have two log-probs: finite, and not above 0."""
    both_T: NDArray[np.bool_] = np.isfinite(log.trainer_T) & np.isfinite(log.sampler_T)
    return both_T & (log.trainer_T <= LOGPROB_ROUNDING) & (log.sampler_T <= LOGPROB_ROUNDING)


def seen_before(token_T: IntArray) -> NDArray[np.bool_]:
    """Whether each id stands earlier in the row."""
    _, first_U, place_T = np.unique(token_T, return_index=True, return_inverse=True)
    found: NDArray[np.bool_] = first_U[place_T] < np.arange(len(token_T))
    return found


def pack(rows: Sequence[LoggedRow]) -> Log:
    """The rows as one log, in their order. Where a row does not say which tokens were seen, its own ids do."""
    rows = [
        row if row.seen_T is not None or row.token_T is None else replace(row, seen_T=seen_before(row.token_T))
        for row in rows
    ]
    lengths_S = np.array([len(row.sampler_T) for row in rows], np.int64)
    start_S = np.concatenate([[0], np.cumsum(lengths_S)[:-1]]).astype(np.int64)

    def tokens(name: str, fill: float, dtype: type) -> NDArray[Any]:
        values = [getattr(row, name) for row in rows]
        parts = [np.full(n, fill) if part is None else part for part, n in zip(values, lengths_S, strict=True)]
        found: NDArray[Any] = np.concatenate(parts).astype(dtype)
        return found

    def each(name: str) -> FloatArray:
        return np.array([getattr(row, name) for row in rows], np.float64)

    return Log(
        start_S=start_S,
        sequence_T=np.repeat(np.arange(len(rows)), lengths_S),
        position_T=np.arange(lengths_S.sum()) - np.repeat(start_S, lengths_S),
        sampler_T=tokens("sampler_T", np.nan, np.float64),
        trainer_T=tokens("trainer_T", np.nan, np.float64),
        token_T=tokens("token_T", -1, np.int64),
        **{f"{name}_T": tokens(f"{name}_T", np.nan, np.float64) for name in OPTIONAL_NUMBERS},
        seen_T=tokens("seen_T", np.nan, np.float64),
        step_S=each("step"),
        version_S=each("version"),
        reward_S=each("reward"),
        prompt_S=each("prompt"),
        text_S=tuple(row.text for row in rows),
        labels_S=tuple(row.labels for row in rows),
        whole_S=tuple(row.whole_T for row in rows),
        place_S=tuple(row.place_T for row in rows),
        prompt_text_S=tuple(row.prompt_text for row in rows),
    )

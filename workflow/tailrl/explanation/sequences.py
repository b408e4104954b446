"""The responses of a log that are worth computing: typical and worst ones, early and late, each with its prompt."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tailrl.artifacts.metrics import FloatArray
from tailrl.diagnosis.log import IntArray, Log, spans
from tailrl.explanation.inputs import Inputs
from tailrl.runtime.errors import DataError

MOST_KEPT = 4096  # responses to choose from; of a longer log every second, fourth, ... one is kept
MOST_OF_A_RESPONSE = 128  # tokens of one response that are scored
CAPPED = 5.0  # nats; one token adds no more to how bad a response is
LONGEST = 16_384  # tokens; a longer sequence is left out


@dataclass(frozen=True, slots=True)
class Response:
    """One response of the log.

    Attributes:
        number: its row, counted from 0.
        sampler_T, trainer_T: nats, as logged.
        token_T: its token ids; None: not logged.
        whole_T, place_T: ids with the prompt and the places of the logged tokens; None: the log has no prompt's ids.
        text, prompt: the texts, where they are logged.
        step: NaN: not logged.
    """

    number: int
    sampler_T: FloatArray
    trainer_T: FloatArray
    token_T: IntArray | None
    whole_T: IntArray | None
    place_T: IntArray | None
    text: str | None
    prompt: str | None
    step: float

    @property
    def badness(self) -> float:
        """Mean absolute difference of the sides, nats; each token's is capped."""
        difference_T = np.abs(self.sampler_T - self.trainer_T)
        return float(np.mean(np.minimum(np.nan_to_num(difference_T, nan=0.0, posinf=CAPPED), CAPPED)))


@dataclass(frozen=True, slots=True)
class Read:
    """What was read of a log.

    Attributes:
        title: of its format.
        responses: kept to choose from, in the log's order.
        rows: responses in the log.
        notes: sentences on what was left out or made anew.
    """

    title: str
    responses: tuple[Response, ...]
    rows: int
    notes: tuple[str, ...] = ()


def read(parts: Iterable[tuple[str, Log]]) -> Read:
    """The responses of a log in parts. Of a long one every n-th is kept: memory is bounded."""
    title, kept, every, rows = "", [], 1, 0
    for title, log in parts:  # noqa: B007 - all parts of a log have one title
        for place, tokens in enumerate(spans(log)):
            if (rows + place) % every == 0:
                kept.append(_response(log, place, tokens, rows + place))
            if len(kept) > MOST_KEPT:
                every *= 2
                kept = [one for one in kept if one.number % every == 0]
        rows += len(log.start_S)
    return Read(title, tuple(kept), rows)


def _response(log: Log, place: int, tokens: slice, number: int) -> Response:
    token_T = log.token_T[tokens]
    return Response(
        number=number,
        sampler_T=log.sampler_T[tokens],
        trainer_T=log.trainer_T[tokens],
        token_T=token_T if (token_T >= 0).all() else None,
        whole_T=log.whole_S[place] if log.whole_S else None,
        place_T=log.place_S[place] if log.place_S else None,
        text=log.text_S[place] if log.text_S else None,
        prompt=log.prompt_text_S[place] if log.prompt_text_S else None,
        step=float(log.step_S[place]),
    )


@dataclass(frozen=True, slots=True)
class Scored:
    """A response that is computed: its inputs, and the logged numbers of its scored tokens.

    Attributes:
        response: of the log.
        inputs: what the model reads.
        position_T: int64, places in the response of the scored tokens.
        sampler_T, trainer_T: nats.
    """

    response: Response
    inputs: Inputs
    position_T: IntArray
    sampler_T: FloatArray
    trainer_T: FloatArray


def scored(response: Response, neighbours: dict[int, Response]) -> Scored:
    """The response with its scored tokens: all, or of a long one the first, the last, the worst and some between."""
    assert response.whole_T is not None and response.place_T is not None
    finite_T = np.isfinite(response.sampler_T) & np.isfinite(response.trainer_T)
    position_T = _chosen_positions(response, finite_T)
    place_T = response.place_T[position_T]

    def ids_of(number: int) -> tuple[int, ...]:
        other = neighbours.get(number)
        return () if other is None or other.whole_T is None else tuple(other.whole_T.tolist())

    inputs = Inputs(
        ids=tuple(response.whole_T[: int(place_T[-1]) + 1].tolist()),
        place_T=place_T,
        first=int(response.place_T[0]),
        previous=ids_of(response.number - 1),
        following=ids_of(response.number + 1),
    )
    return Scored(response, inputs, position_T, response.sampler_T[position_T], response.trainer_T[position_T])


def _chosen_positions(response: Response, finite_T: np.ndarray) -> IntArray:
    position_N = np.flatnonzero(finite_T)
    if len(position_N) <= MOST_OF_A_RESPONSE:
        return position_N
    share = MOST_OF_A_RESPONSE // 4
    difference_N = np.abs(response.sampler_T - response.trainer_T)[position_N]
    between_N = position_N[:: max(1, len(position_N) // share)]
    worst_N = position_N[np.argsort(-difference_N, kind="stable")[:share]]
    return np.unique(np.concatenate([position_N[:share], position_N[-share:], between_N, worst_N]))


def by_what_they_tell(responses: Sequence[Response]) -> list[Response]:
    """The responses in an order by what they may tell: typical and worst ones in turn, from each quarter of the log."""
    quarters = [part.tolist() for part in np.array_split(np.arange(len(responses)), min(4, max(1, len(responses))))]
    badness = np.array([one.badness for one in responses])
    typical, worst = [], []
    for part in quarters:
        order = sorted(part, key=badness.__getitem__)
        middle_out = sorted(
            range(len(order)), key=[abs(rank - len(order) // 2) for rank in range(len(order))].__getitem__
        )
        typical.append([order[rank] for rank in middle_out])
        worst.append(order[::-1])
    chosen: dict[int, None] = {}
    for rank in range(len(responses)):
        for quarter in range(len(quarters)):
            for listed in (typical, worst):
                if rank < len(listed[quarter]):
                    chosen.setdefault(listed[quarter][rank])
    return [responses[i] for i in chosen]


def with_prompts(read_log: Read, tokenizer: Any) -> tuple[list[Response], list[str]]:
    """The responses that have ids of prompt and response, or texts that the tokenizer encodes to as many tokens."""
    found, notes = [], []
    encoded = misfit = 0
    for response in read_log.responses:
        if response.whole_T is not None:
            found.append(response)
            continue
        if response.prompt is None or tokenizer is None:
            continue
        prompt = encode(tokenizer, response.prompt)
        ids = response.token_T.tolist() if response.token_T is not None else None
        if ids is None and response.text is not None:
            ids = tokenizer.encode(response.text, add_special_tokens=False)
        if ids is None or len(ids) != len(response.sampler_T) or not prompt:
            misfit += 1
            continue
        encoded += 1
        found.append(joined(response, prompt, ids))
    if encoded:
        notes.append(f"The prompts of {encoded:,} responses are texts; they were encoded with the model's tokenizer.")
    if misfit:
        notes.append(f"{misfit:,} responses do not encode to as many tokens as they have log-probs; they are left out.")
    return found, notes


def encode(tokenizer: Any, prompt: str) -> list[int]:
    """A prompt's ids: as it is if it has special tokens, else through the chat template."""
    plain: list[int] = tokenizer.encode(prompt, add_special_tokens=False)
    if not tokenizer.chat_template or set(plain) & set(tokenizer.all_special_ids):
        return plain
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    templated: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return templated


def joined(response: Response, prompt: Sequence[int], ids: Sequence[int]) -> Response:
    """The response after a prompt."""
    return replace(
        response,
        token_T=np.asarray(ids, np.int64),
        whole_T=np.array([*prompt, *ids], np.int64),
        place_T=len(prompt) + np.arange(len(ids)),
    )


def require(responses: Sequence[Response], where: str) -> None:
    """Raises StudyError where no response has what the model must read."""
    if not responses:
        raise DataError(
            f"{where}: has no prompts: a response is computed after its prompt. Log the prompt's ids "
            "(docs/how-to/log-schema.md), or give --prompts FILE, with the prompts of the rows or a set of prompts"
        )

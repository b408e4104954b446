"""What a log's columns say of themselves, exactly: copies, fills and padding. No model is asked."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tailrl.explanation.sequences import Response

FILLS = (0.0, -100.0, 1.0, -1.0, -9999.0)  # numbers that programs write in place of a log-prob
LEAST = 4  # a shorter response may hold one number by chance
MANY_ZEROS = 0.25  # with more zeros elsewhere, zeros are log-probs: truncation left one token


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that a column itself shows.

    Attributes:
        name: of its kind: copy, filled, padding.
        side: sampler, trainer or both.
        words: one sentence.
        share: of the responses.
        is_fault: whether it explains a mismatch or hides one.
    """

    name: str
    side: str
    words: str
    share: float
    is_fault: bool = True


def inspect(responses: Sequence[Response], ends: Sequence[int]) -> tuple[list[Response], list[Finding]]:
    """The responses without what is no log-prob, and what was found.

    Args:
        responses: of the log.
        ends: the model's end tokens: what follows one is padding.
    """
    found = []
    responses, padded = _without_padding(responses, ends)
    if padded:
        found.append(padded)
    if (copied := _copied(responses)) is not None:
        found.append(copied)
    for side in ("sampler", "trainer"):
        responses, filled = _without_filled(responses, side)
        if filled:
            found.append(filled)
    return responses, found


def _without_padding(responses: Sequence[Response], ends: Sequence[int]) -> tuple[list[Response], Finding | None]:
    kept, cut = [], 0
    for response in responses:
        length = len(response.sampler_T)
        if response.token_T is not None and ends:
            end_N = np.flatnonzero(np.isin(response.token_T, ends))
            stop = int(end_N[0]) + 1 if len(end_N) else length
            rest = np.concatenate([response.sampler_T[stop:], response.trainer_T[stop:]])
            if stop < length and np.isin(rest, FILLS).all():
                cut += 1
                response = _cut(response, stop)
        kept.append(response)
    share = cut / max(1, len(responses))
    words = (
        f"{share:.0%} of the responses have padding after their end token, filled on both sides. It is left out. "
        "Log the mask of the responses."
    )
    return kept, Finding("padding", "both", words, share, is_fault=False) if cut else None


def _cut(response: Response, stop: int) -> Response:
    columns = {name: getattr(response, name) for name in ("sampler_T", "trainer_T", "token_T", "place_T")}
    cut = {name: values_T[:stop] for name, values_T in columns.items() if values_T is not None}
    if response.whole_T is not None and response.place_T is not None:
        cut["whole_T"] = response.whole_T[: int(response.place_T[stop - 1]) + 1]
    return replace(response, **cut)


def _copied(responses: Sequence[Response]) -> Finding | None:
    equal = [np.array_equal(one.sampler_T, one.trainer_T, equal_nan=True) for one in responses]
    share = float(np.mean(equal))
    if share < 0.9:
        return None
    words = (
        "The two columns are equal to the last digit: one is a copy of the other, unless both sides compute the same "
        "bits. The mismatch of this run is not in this log. Log the trainer's own log-probs (in verl: no bypass mode)."
    )
    return Finding("copy", "both", words, share)


def _without_filled(responses: Sequence[Response], side: str) -> tuple[list[Response], Finding | None]:
    """Without responses whose numbers are all one and the same fill, while the other side's are not."""
    other = {"sampler": "trainer", "trainer": "sampler"}[side]
    kept, fills = [], []
    for response in responses:
        column_T, other_T = getattr(response, f"{side}_T"), getattr(response, f"{other}_T")
        same = len(column_T) >= LEAST and (column_T == column_T[0]).all() and column_T[0] in FILLS
        if same and not np.allclose(other_T, column_T[0], atol=1e-3):
            fills.append(float(column_T[0]))
        else:
            kept.append(response)
    zeros = [getattr(response, f"{side}_T") == 0 for response in kept]
    is_truncated = set(fills) == {0.0} and bool(kept) and np.concatenate(zeros).mean() > MANY_ZEROS
    if not fills or not kept or is_truncated:
        return list(responses), None
    share = len(fills) / len(responses)
    words = (
        f"The {side}'s log-probs of {share:.0%} of the responses are all {fills[0]:g}: they were missing, and filled. "
        f"Where the {side} returns none, such as after an abort or a cache hit, drop the response."
    )
    return kept, Finding("filled", side, words, share)

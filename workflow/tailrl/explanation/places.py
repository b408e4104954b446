"""Where in responses a column is far from the model, if everywhere else it is near: the last tokens, or the first."""

from collections.abc import Sequence

import numpy as np

from tailrl.artifacts.metrics import FloatArray
from tailrl.explanation.columns import Finding
from tailrl.explanation.sequences import Scored

MOST_TOKENS = 16  # a place is at most so many tokens at one end of a response
FAR = 5.0  # times what rounding explains: the mean difference there must be larger
FEWEST_RESPONSES = 6  # one clean sample of a single response in eleven has such a place, of six one in 400
LARGEST_SHARE = 0.5  # of all tokens; a larger place is the whole log


def at_an_end(side: str, chosen: Sequence[Scored], far_T: FloatArray, limit: float) -> Finding | None:
    """The fewest first or last tokens that are far from the model where all others are near it; None for no such place.

    Args:
        side: sampler or trainer.
        chosen: the responses.
        far_T: nats, each scored token's difference from the model.
        limit: nats, the mean difference that rounding explains.
    """
    if len(chosen) < FEWEST_RESPONSES:
        return None
    length_S = np.array([len(one.response.sampler_T) for one in chosen])
    count_S = [len(one.position_T) for one in chosen]
    position_T = np.concatenate([one.position_T for one in chosen])
    length_T = np.repeat(length_S, count_S)
    from_end_T = length_T - 1 - position_T
    groups = {"": np.ones(len(far_T), bool)}
    if (length_S == length_S.max()).mean() < 1:
        groups[f", of responses with {length_S.max()} tokens, the longest"] = length_T == length_S.max()
    for count in range(1, MOST_TOKENS + 1):
        found = []
        for name, place_T in (("last", from_end_T), ("first", position_T)):
            for which, group_T in groups.items():
                inside_T = (place_T < count) & group_T
                if not 0 < inside_T.mean() <= LARGEST_SHARE:
                    continue
                inside, outside = float(far_T[inside_T].mean()), float(far_T[~inside_T].mean())
                if outside <= limit and inside >= FAR * limit:
                    found.append((inside, _finding(side, name, count, which, inside, outside)))
        if found:
            return max(found, key=lambda one: one[0])[1]
    return None


def _finding(side: str, end: str, count: int, which: str, inside: float, outside: float) -> Finding:
    tokens = f"{end} {count} tokens" if count > 1 else f"{end} token"
    words = (
        f"The {side}'s numbers are this model's but for the {tokens}{which}: {inside:.3g} nats there, {outside:.2g} "
        "elsewhere, what rounding leaves. Look at what this side does at that place: speculative or asynchronous "
        "decoding, a limit of tokens, the end token, an off-by-one of the slice."
    )
    return Finding(f"{end}_tokens", side, words, 1.0)

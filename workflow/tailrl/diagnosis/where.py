"""Where the mismatch is: the steps, responses, places, words of a column or tokens that hold most of it.

One mechanism serves every grouping. Noise on the logits gives a token a k3 in proportion to (1 − p)². So the tokens
of a group are expected to hold their share of Σ(1 − p)². The groups that hold more than this are the place. A place
counts if it has most of the mismatch, at a rate far above that of the other tokens, and if chance does not give as
much:

- groups of whole responses (steps, words of a column): the labels are shuffled among the responses, and most of the
  group's responses have a higher rate than the others;
- places within a response: in nearly all blocks of responses the rate there is the higher one, by a sign test;
- many small groups (responses, token ids): the groups are chosen on one half of the tokens and judged on the other, and
  the sign test is over blocks too.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from tailrl.artifacts.files import Record
from tailrl.artifacts.metrics import FloatArray
from tailrl.diagnosis.log import IntArray, Log, from_end
from tailrl.objective.kl_estimates import k3
from tailrl.runtime.data_files import models_beside
from tailrl.stats.intervals import Interval, ratio_interval

MOST = 2 / 3  # of the mismatch, that a place holds
FACTOR = 5.0  # its rate over that of the other tokens
LARGEST = 1 / 3  # of the responses, or of the words of a column with many: more are no place
LARGEST_PART = 0.5  # of the tokens, for a part of each response
SHUFFLES = 199  # none of which may give as much
PAIRS_ABOVE = 0.75  # of the pairs of a response of the group and another one, where the first has the higher rate
BLOCKS = 64  # of responses, for the sign test
PLACES = 16  # blocks of a response's tokens, for the same
CHANCE = 1e-3  # of the sign test
TIMES = 2.0  # by which a block's rate there must be above that elsewhere: one token may hold most, but of one block
SIDES_APART = 0.5  # difference of the shares of tokens with Δ above 0 that is worth a word
NEARLY_ALL = 0.9  # of k3: so much in few tokens is told where no other place is found
FEW_TOKENS = 1e-3  # of all
LARGEST_RATIO = 20.0  # nats, as verl clamps log-ratios
FEW_GROUPS = 5  # of token ids: more are no place
MOST_CUTS = 200  # places where a response is cut into before and after
FROM_THE_END = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
LEAST_RESPONSES = 10
MOST_PLACES = 3  # that are told
WITHOUT_A_NAME = ("responses", "ids")  # groupings by the mismatch itself: another one that has as much says more

Bools = NDArray[np.bool_]


class WhereWords(Record):
    """What is said of a place: `says` after "It is ...", and what to look at.

    `cause`: a key of `causes.yaml` that the place tells. `named`: a regular expression that the column's name must
    match for it.
    """

    says: str
    look: str
    cause: str = ""
    named: str = ""


@cache
def where_words() -> dict[str, WhereWords]:
    """The words of each grouping, by its name."""
    return models_beside(__file__, "where.yaml", WhereWords)


@dataclass(frozen=True, slots=True)
class Place:
    """A part of the tokens that holds most of the mismatch.

    Attributes:
        grouping: a key of `where.yaml`. words: the place in words, such as "in 1 of 20 steps (12)".
        share: of the mismatch that is there, with its interval over responses. tokens: the share of the tokens.
        above, above_elsewhere: shares of tokens with Δ above 0, there and elsewhere.
        whole: whether it is made of whole responses. cause: a key of `causes.yaml` that the place tells, or empty.
        chosen_T: which tokens of the sample are there.
    """

    grouping: str
    words: str
    share: Interval
    tokens: float
    above: float
    above_elsewhere: float
    whole: bool
    chosen_T: Bools
    cause: str = ""

    @property
    def look(self) -> str:
        """What to look at."""
        return where_words()[self.grouping].look

    @property
    def sides(self) -> str:
        """A sentence on the signs of Δ; empty where they are alike."""
        if abs(self.above - self.above_elsewhere) < SIDES_APART:
            return ""
        there, elsewhere = f"{self.above:.0%}", f"{self.above_elsewhere:.0%}"
        which = "that did" if self.grouping == "sides" else "there"
        return (
            f"The trainer gives more than the sampler to {there} of the tokens {which}, and to {elsewhere} elsewhere."
        )

    def sentence(self) -> str:
        """The place in a sentence."""
        if self.grouping == "sides":
            return f"It depends on whether a token already occurred in the prompt or the response. {self.sides}"
        held = f"{percent(self.share.mean)} of the mismatch is {self.words}, with {percent(self.tokens)} of the tokens."
        return f"{held} {self.sides}".strip()


def percent(share: float) -> str:
    """A share in percent; near 100 with the digits that tell it from all."""
    return f"{100 * share:.3g} %" if share < 0.995 or share == 1 else f"{100 * min(share, 0.9999):.4g} %"


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Sound tokens: amount_T, each one's mismatch; law_T, (1 − p)²; above_T, sided_T: whether Δ is above 0, is not 0.

    The rest is as in a log.
    """

    log: Log
    amount_T: FloatArray
    law_T: FloatArray
    above_T: Bools
    sided_T: Bools
    sequence_T: IntArray
    position_T: IntArray
    length_S: IntArray

    @property
    def responses(self) -> int:
        return len(self.length_S)


def _amount(delta_T: FloatArray) -> FloatArray:
    """k3, with a log-ratio above 1 nat counted linearly: one token of ratio e^9 would else be all of a log."""
    cut_T = np.minimum(delta_T, 1.0)
    found: FloatArray = k3(cut_T) + (math.e - 1) * (delta_T - cut_T)
    return found


def find_places(log: Log) -> tuple[Place, ...]:
    """Where the mismatch is, the place with the fewest tokens first, and last those without a name of their own.

    `log`: sound tokens alone.
    """
    if len(log.start_S) < LEAST_RESPONSES:
        return ()
    trainer_T, sampler_T = np.minimum(log.trainer_T, 0.0), np.minimum(log.sampler_T, 0.0)
    delta_T = trainer_T - sampler_T
    law_T = np.expm1((trainer_T + sampler_T) / 2) ** 2
    length_S = np.bincount(log.sequence_T, minlength=len(log.start_S))
    tokens = _Tokens(log, _amount(delta_T), law_T, delta_T > 0, delta_T != 0, log.sequence_T, log.position_T, length_S)
    if not (tokens.amount_T.sum() > 0 and law_T.sum() > 0):
        return ()
    found = [place for grouping in GROUPINGS for place in grouping(tokens)]
    found = sorted(found or _single_tokens(tokens), key=lambda place: (place.grouping in WITHOUT_A_NAME, place.tokens))
    return tuple(place for i, place in enumerate(found) if not _is_same(place, found[:i]))[:MOST_PLACES]


def _is_same(place: Place, others: list[Place]) -> bool:
    """Whether another place has nearly the same tokens, or is a part of it that holds nearly as much."""
    for other in others:
        both = float((place.chosen_T & other.chosen_T).sum())
        if both >= 0.9 * other.chosen_T.sum() and other.share.mean >= place.share.mean - 0.1:
            return True
    return False


# --- groupings -----------------------------------------------------------------------------------------


def _labelled(tokens: _Tokens) -> Iterator[Place]:
    """Steps, ages of the weights, words of the log's own columns, and responses of the greatest length."""
    log = tokens.log
    numbers = {"step": log.step_S, "age": log.step_S - log.version_S, "reward": log.reward_S}
    for name, value_S in numbers.items():
        if np.isfinite(value_S).all():
            values, code_S = np.unique(value_S, return_inverse=True)
            yield from _of_labels(tokens, name, code_S, [f"{value:g}" for value in values])
    columns = dict.fromkeys(name for labels in log.labels_S for name in labels)
    for name in columns:
        words, code_S = np.unique([labels.get(name, "") for labels in log.labels_S], return_inverse=True)
        yield from _of_labels(tokens, "column", code_S, words.tolist(), name)
    longest = int(tokens.length_S.max())
    code_S = (tokens.length_S == longest).astype(np.int64)
    if code_S.sum() >= 3:
        places = _of_labels(tokens, "longest", code_S, ["other", f"{longest}"])
        yield from (place for place in places if place.chosen_T[code_S[tokens.sequence_T] == 1].any())


def _of_labels(tokens: _Tokens, grouping: str, code_S: IntArray, words: list[str], name: str = "") -> Iterator[Place]:
    """The groups of whole responses that hold more than their share, if shuffled labels never give as much."""
    if not 2 <= len(words) <= max(4, tokens.responses // 2):
        return
    amount_S = _sums(tokens.sequence_T, tokens.amount_T, tokens.responses)
    law_S = _sums(tokens.sequence_T, tokens.law_T, tokens.responses)
    chosen_G = _above_share(_sums(code_S, amount_S, len(words)), _sums(code_S, law_S, len(words)))
    chosen_T = chosen_G[code_S][tokens.sequence_T]
    groups = int(chosen_G.sum())
    if groups > max(1, LARGEST * len(words)) or not _is_most(tokens, chosen_T):
        return
    if not _most_are_above(amount_S, law_S, chosen_G[code_S]):
        return
    random = np.random.default_rng(0)
    gap = _gap(amount_S, law_S, code_S)
    if any(_gap(amount_S, law_S, random.permutation(code_S)) >= gap for _ in range(SHUFFLES)):
        return
    chosen = [word for word, is_chosen in zip(words, chosen_G, strict=True) if is_chosen]
    some = ", ".join(chosen[:4]) + (", ..." if len(chosen) > 4 else "")
    yield _place(tokens, grouping, chosen_T, True, n=groups, of=len(words), some=some, name=name)


def _sums(code_T: IntArray, of_T: FloatArray, groups: int) -> FloatArray:
    """The sum of each group."""
    return np.bincount(code_T, of_T, groups).astype(np.float64)


def _most_are_above(amount_S: FloatArray, law_S: FloatArray, chosen_S: Bools) -> bool:
    """Whether a chosen response nearly always has a higher rate than another one: a few responses make no group."""
    rate_S = amount_S / np.maximum(law_S, 1e-300)
    rank_S = np.empty(len(rate_S))
    rank_S[np.argsort(rate_S)] = np.arange(len(rate_S))
    inside = int(chosen_S.sum())
    pairs = inside * (len(rate_S) - inside)
    return float(rank_S[chosen_S].sum()) - inside * (inside - 1) / 2 >= PAIRS_ABOVE * pairs > 0


def _above_share(amount_G: FloatArray, law_G: FloatArray) -> Bools:
    """The groups whose share of the mismatch is above their share of what noise would give."""
    found: Bools = amount_G * law_G.sum() > law_G * amount_G.sum()
    return found


def _gap(amount_S: FloatArray, law_S: FloatArray, code_S: IntArray) -> float:
    """By how much the groups above their share exceed it, as a share of the whole."""
    groups = int(code_S.max()) + 1
    amount_G, law_G = (_sums(code_S, of_S, groups) / of_S.sum() for of_S in (amount_S, law_S))
    return float(np.maximum(amount_G - law_G, 0.0).sum())


def _within(tokens: _Tokens) -> Iterator[Place]:
    """First, last and later tokens of a response, and tokens that already occurred."""
    position_T = tokens.position_T
    from_end_T = from_end(tokens.log)
    longest, top = int(tokens.length_S.max()), int(position_T.max())
    at_limit_T = (tokens.length_S == longest)[tokens.sequence_T]
    cuts = np.unique(np.geomspace(1, top, MOST_CUTS).astype(np.int64)).tolist() if top else []
    parts: tuple[tuple[str, Sequence[int], Callable[[int], Bools]], ...] = (
        ("limit", () if at_limit_T.all() else FROM_THE_END, lambda number: at_limit_T & (from_end_T < number)),
        ("last", FROM_THE_END, lambda number: from_end_T < number),
        ("first", cuts, lambda cut: position_T < cut),
        ("after", cuts, lambda cut: position_T >= cut),
    )
    for grouping, numbers, part in parts:
        best = _best_cut(tokens, [part(number) for number in numbers])
        if best is not None:
            yield _place(tokens, grouping, part(numbers[best]), False, n=numbers[best], of=longest)
    seen_T = tokens.log.seen_T
    if np.isfinite(seen_T).all():
        for name, chosen_T in (("seen", seen_T == 1), ("new", seen_T == 0)):
            if _is_most(tokens, chosen_T) and _rates_differ(tokens, chosen_T):
                yield _place(tokens, name, chosen_T, False)
            elif name == "seen" and _sides_differ(tokens, chosen_T):
                yield _place(tokens, "sides", chosen_T, False)


def _best_cut(tokens: _Tokens, parts: list[Bools]) -> int | None:
    """The part that most exceeds its share, if it is a place."""
    amount, law = tokens.amount_T / tokens.amount_T.sum(), tokens.law_T / tokens.law_T.sum()
    gaps = [float(amount[part_T].sum() - law[part_T].sum()) for part_T in parts]
    if not gaps:
        return None
    best = int(np.argmax(gaps))
    is_place = parts[best].mean() <= LARGEST_PART and _is_most(tokens, parts[best])
    return best if is_place and _rates_differ(tokens, parts[best]) else None


def _is_most(tokens: _Tokens, chosen_T: Bools) -> bool:
    """Whether the chosen tokens hold most of the mismatch, at a rate far above that of the others."""
    inside, whole = float(tokens.amount_T[chosen_T].sum()), float(tokens.amount_T.sum())
    law, laws = float(tokens.law_T[chosen_T].sum()), float(tokens.law_T.sum())
    return inside >= MOST * whole and inside * (laws - law) >= FACTOR * law * (whole - inside)


def _rates_differ(tokens: _Tokens, chosen_T: Bools) -> bool:
    """Whether the rate of the mismatch is higher at the chosen tokens in nearly all blocks of responses."""
    return _in_most_blocks(tokens.sequence_T % BLOCKS, chosen_T, tokens.amount_T, tokens.law_T)


def _in_most_blocks(
    block_T: IntArray, chosen_T: Bools, above_T: FloatArray, below_T: FloatArray, times: float = TIMES
) -> bool:
    """Whether Σabove/Σbelow is `times` higher among the chosen tokens in nearly all blocks, by a sign test."""
    inside, outside = (
        [np.bincount(block_T[part_T], of[part_T], BLOCKS) for of in (above_T, below_T)]
        for part_T in (chosen_T, ~chosen_T)
    )
    both_B = (inside[1] > 0) & (outside[1] > 0)
    wins = int((inside[0] * outside[1] > times * outside[0] * inside[1])[both_B].sum())
    blocks = int(both_B.sum())
    return bool(sum(math.comb(blocks, n) for n in range(wins, blocks + 1)) <= CHANCE * 2**blocks)


def _sides_differ(tokens: _Tokens, chosen_T: Bools) -> bool:
    """Whether Δ is above 0 at most of the chosen tokens and at few of the others, or the other way round."""
    there_T, elsewhere_T = chosen_T & tokens.sided_T, ~chosen_T & tokens.sided_T
    if not (there_T.any() and elsewhere_T.any()):
        return False
    apart = float(tokens.above_T[there_T].mean() - tokens.above_T[elsewhere_T].mean())
    above_T = (tokens.above_T if apart > 0 else ~tokens.above_T) & tokens.sided_T
    ones_T = tokens.sided_T.astype(np.float64)
    block_T = tokens.sequence_T % BLOCKS
    return abs(apart) >= SIDES_APART and _in_most_blocks(block_T, chosen_T, above_T.astype(np.float64), ones_T, 1.0)


def _of_responses(tokens: _Tokens) -> Iterator[Place]:
    """Responses that hold more than their share in both halves of their tokens."""
    chosen_S = _in_both_halves(tokens, tokens.sequence_T, tokens.position_T % 2 == 0)
    if chosen_S is None or chosen_S.sum() > LARGEST * tokens.responses:
        return
    chosen_T = chosen_S[tokens.sequence_T]
    if not _in_most_blocks(tokens.position_T % PLACES, chosen_T, tokens.amount_T, tokens.law_T):
        return
    yield _place(
        tokens, "responses", chosen_T, True, n=int(chosen_S.sum()), of=tokens.responses,
        some=percent(float(chosen_S.mean())),
    )  # fmt: skip


def _of_ids(tokens: _Tokens) -> Iterator[Place]:
    """Token ids that hold more than their share in both halves of the responses."""
    if (tokens.log.token_T < 0).any():
        return
    ids, code_T = np.unique(tokens.log.token_T, return_inverse=True)
    chosen_G = _in_both_halves(tokens, code_T, tokens.sequence_T % 2 == 0)
    if chosen_G is None or chosen_G.sum() > FEW_GROUPS or not _rates_differ(tokens, chosen_G[code_T]):
        return
    some = ", ".join(str(number) for number in ids[chosen_G].tolist())
    yield _place(tokens, "ids", chosen_G[code_T], False, n=int(chosen_G.sum()), some=some)


def _single_tokens(tokens: _Tokens) -> list[Place]:
    """The few tokens that hold nearly all of k3, where nothing else is told of them."""
    delta_T = np.minimum(tokens.log.trainer_T, 0.0) - np.minimum(tokens.log.sampler_T, 0.0)
    k3_T = k3(np.minimum(delta_T, LARGEST_RATIO))
    order_T = np.argsort(-k3_T, kind="stable")
    number = int(np.searchsorted(np.cumsum(k3_T[order_T]), NEARLY_ALL * k3_T.sum())) + 1
    if number > max(1.0, FEW_TOKENS * len(k3_T)):
        return []
    chosen_T = np.zeros(len(k3_T), bool)
    chosen_T[order_T[:number]] = True
    of_k3 = replace(tokens, amount_T=k3_T)
    return [_place(of_k3, "tokens", chosen_T, False, n=number, of=len(k3_T))]


def _in_both_halves(tokens: _Tokens, code_T: IntArray, first_T: Bools) -> Bools | None:
    """The groups above their share, if those chosen on either half of the tokens hold most of the other half."""
    groups = int(code_T.max()) + 1

    def above_share(part_T: Bools) -> Bools:
        amount_G = _sums(code_T[part_T], tokens.amount_T[part_T], groups)
        return _above_share(amount_G, _sums(code_T[part_T], tokens.law_T[part_T], groups))

    judged_T = np.zeros(len(code_T), bool)
    for part_T in (first_T, ~first_T):
        if not part_T.any() or not tokens.amount_T[part_T].sum():
            return None
        judged_T |= ~part_T & above_share(part_T)[code_T]
    chosen_G = above_share(np.ones(len(code_T), bool))
    return chosen_G if _is_most(tokens, judged_T) and _is_most(tokens, chosen_G[code_T]) else None


GROUPINGS: tuple[Callable[[_Tokens], Iterator[Place]], ...] = (_labelled, _within, _of_responses, _of_ids)


def _place(tokens: _Tokens, grouping: str, chosen_T: Bools, whole: bool, **words: object) -> Place:
    inside_T = np.where(chosen_T, tokens.amount_T, 0.0)
    share = ratio_interval(inside_T, tokens.amount_T, tokens.sequence_T)
    share = Interval(share.mean, max(0.0, share.low), min(1.0, share.high), share.n)
    parts = (chosen_T & tokens.sided_T, ~chosen_T & tokens.sided_T)
    above, elsewhere = (float(tokens.above_T[part_T].mean()) if part_T.any() else 0.0 for part_T in parts)
    known = where_words()[grouping]
    cause = known.cause if re.search(known.named, str(words.get("name", "")), re.IGNORECASE) else ""
    said = known.says.format(**words)
    return Place(grouping, said, share, float(chosen_T.mean()), above, elsewhere, whole, chosen_T, cause)

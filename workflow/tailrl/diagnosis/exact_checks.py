"""Faults of a log that can be told exactly, before any cause is guessed: each one is a sentence with what to do.

A check asks for something that no mismatch of two engines makes: equal columns, a constant, numbers above 0 everywhere,
one factor between all log-probs, a grid, filled places. So a check that finds nothing hides nothing, and one that finds
something says it beside the other findings.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from tailrl.artifacts.files import Record
from tailrl.artifacts.metrics import FloatArray
from tailrl.diagnosis.log import SIDES, IntArray, Log
from tailrl.runtime.data_files import models_beside

FEWEST = 20  # tokens that a check needs
NEARLY_ALL = 0.99  # of the tokens: a few may have been made in another way
PADDED_SEQUENCES = 0.2  # the share of the sequences that are filled up with one value
ONE_WIDTH = 0.9  # the share of them with a neighbour of the same length, as the rows of a batch have
LONGER_RUNS = 4  # times as long as the runs of that value within the sequences
FINEST_GRID = 8  # a grid of 2^-8 nats
OFF_ZERO = 0.3  # nats: log-probs nearer to 0 lie on finer grids
BASE_TOLERANCE = 0.02  # of the factor between the two sides
BASE_FIT = 0.999  # the share of the sampler's variance that the factor explains
SURE, RARE = math.log(0.6), math.log(0.05)  # of the trainer's probability: its first choice, and a rare token
IMPOSSIBLE = 1e3  # nats: no softmax of logits in 16 bits gives one so far from 0
SOME_CERTAIN = 0.9  # the largest probability of a log is no smaller
FILLED = 0.01  # nats, the mean of a response that nobody finds certain throughout

Bools = NDArray[np.bool_]


class FaultWords(Record):
    """What is said of a fault, with places for numbers; `do` is what to do."""

    says: str
    do: str


@cache
def fault_words() -> dict[str, FaultWords]:
    """The words for each fault, by its name."""
    return models_beside(__file__, "exact_checks.yaml", FaultWords)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that was found: its name in `exact_checks.yaml`, a sentence with its numbers, and what to do."""

    name: str
    says: str
    do: str


def _fault(name: str, **numbers: object) -> Fault:
    words = fault_words()[name]
    return Fault(name, words.says.format(**numbers), words.do.format(**numbers))


def _whose(sides: list[str]) -> str:
    return "Both sides'" if len(sides) == 2 else f"The {sides[0]}'s"


@dataclass
class ExactChecks:
    """Sums over the parts of a log that the checks need; `faults` says what they found."""

    tokens: int = 0
    equal: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    ends: dict[str, tuple[float, float]] = field(default_factory=dict)
    products: FloatArray = field(default_factory=lambda: np.zeros(5))  # Σs, Σt, Σss, Σtt, Σst
    fills: dict[tuple[str, complex], IntArray] = field(default_factory=dict)
    within: dict[complex, IntArray] = field(default_factory=dict)

    @np.errstate(over="ignore", invalid="ignore")  # a log-prob of -1e300 is a finding of its own
    def add(self, log: Log) -> None:
        """Adds a part of a log."""
        sampler_T, trainer_T = log.sampler_T, log.trainer_T
        both_T = np.isfinite(sampler_T) & np.isfinite(trainer_T)
        self._padding(log)
        self._whole_responses(log, both_T)
        self._versions(log)
        if not both_T.any():
            return
        sampler_T, trainer_T = sampler_T[both_T], trainer_T[both_T]
        self.tokens += len(sampler_T)
        self.equal += int((sampler_T == trainer_T).sum())
        products = (sampler_T, trainer_T, sampler_T**2, trainer_T**2, sampler_T * trainer_T)
        self.products += [float(values_T.sum()) for values_T in products]
        self._first_choice(sampler_T, trainer_T)
        for side, values_T in zip(SIDES, (sampler_T, trainer_T), strict=True):
            low, high = self.ends.get(side, (math.inf, -math.inf))
            self.ends[side] = min(low, float(values_T.min())), max(high, float(values_T.max()))
            self.counts[f"{side} above 0"] += int((values_T > 1e-5).sum())
            self.counts[f"{side} fill"] += int((np.abs(values_T) >= IMPOSSIBLE).sum())
            self._grids(side, values_T[values_T < -OFF_ZERO])

    def _padding(self, log: Log) -> None:
        """Runs of one pair of values, and of one token id, at the beginnings and the ends of rows, and within them.

        `fills`: by side of the row and pair, the rows with such a run, its tokens, and the rows of which a neighbour is
        as long. `within`: by pair, the runs elsewhere and their tokens.
        """
        length_S = np.diff(np.append(log.start_S, len(log.sampler_T)))
        self.counts["sequences"] += len(length_S)
        if not len(log.sampler_T):
            return
        pair_T = np.empty(len(log.sampler_T), complex)
        pair_T.real, pair_T.imag = log.sampler_T + 0.0, log.trainer_T + 0.0  # -0 is 0
        changes_T = np.ones(len(pair_T), bool)
        changes_T[1:] = (np.diff(log.sequence_T) != 0) | (np.diff(log.token_T) != 0) | (pair_T[1:] != pair_T[:-1])
        start_R = np.flatnonzero(changes_T)
        length_R = np.diff(np.append(start_R, len(pair_T)))
        pair_R, sequence_R = pair_T[start_R], log.sequence_T[start_R]
        starts_R = np.concatenate([[True], np.diff(sequence_R) != 0])
        ends_R = np.append(starts_R[1:], True)
        same_S = np.append(length_S[1:] == length_S[:-1], False)
        same_S[1:] |= same_S[:-1].copy()
        for edge, edge_R in (("begin", starts_R & ~ends_R), ("end", ends_R)):
            for run in np.flatnonzero(edge_R & (length_R >= 2)):
                sums = self.fills.setdefault((edge, complex(pair_R[run])), np.zeros(3, np.int64))
                sums += [1, length_R[run], same_S[sequence_R[run]]]
        inside_R = ~(starts_R | ends_R) & np.isin(pair_R, [pair for _, pair in self.fills])
        for pair in np.unique(pair_R[inside_R]):
            sums = self.within.setdefault(complex(pair), np.zeros(2, np.int64))
            sums += [(inside_R & (pair_R == pair)).sum(), length_R[inside_R & (pair_R == pair)].sum()]

    def _whole_responses(self, log: Log, both_T: Bools) -> None:
        """Responses of which one side has exactly 0 at every token, and the other side has not."""
        count = len(log.start_S)
        tokens_S = np.bincount(log.sequence_T[both_T], minlength=count)
        for side, values_T, other_T in (
            ("sampler", log.sampler_T, log.trainer_T),
            ("trainer", log.trainer_T, log.sampler_T),
        ):
            zeros_S = np.bincount(log.sequence_T[both_T & (values_T == 0)], minlength=count)
            other_S = np.bincount(log.sequence_T[both_T], -other_T[both_T], count)
            filled_S = (tokens_S > 0) & (zeros_S == tokens_S) & (other_S > FILLED * tokens_S)
            self.counts[f"{side} filled"] += int(filled_S.sum())

    def _versions(self, log: Log) -> None:
        ahead_S = log.version_S > log.step_S
        self.counts["ahead"] += int(ahead_S.sum())
        self.counts["versions"] += int((np.isfinite(log.version_S) & np.isfinite(log.step_S)).sum())

    def _first_choice(self, sampler_T: FloatArray, trainer_T: FloatArray) -> None:
        """Where a side finds a token rare, the most likely one's log-prob lies far above; elsewhere they agree."""
        delta_T = trainer_T - sampler_T
        sure_T = trainer_T > SURE
        self.counts["sure"] += int(sure_T.sum())
        self.counts["sure agree"] += int((sure_T & (np.abs(delta_T) < 0.25)).sum())
        for side, gap_T in (("sampler", -delta_T), ("trainer", delta_T)):
            rare_T = (trainer_T if side == "sampler" else sampler_T) < RARE
            self.counts[f"{side} rare"] += int(rare_T.sum())
            self.counts[f"{side} rare above"] += int((rare_T & (gap_T > 1)).sum())

    def _grids(self, side: str, values_T: FloatArray) -> None:
        self.counts[f"{side} off zero"] += len(values_T)
        for power in range(FINEST_GRID + 1):
            scaled_T = values_T * 2.0**power
            self.counts[f"{side} grid {power}"] += int((scaled_T == np.round(scaled_T)).sum())
        single_T = values_T.astype(np.float32)
        half_T = single_T.astype(np.float16)
        low_bits_T = single_T.view(np.uint32) & 0xFFFF  # those that bfloat16 lacks
        self.counts[f"{side} bfloat16"] += int((low_bits_T == 0).sum())
        self.counts[f"{side} float16"] += int((half_T.astype(np.float32) == single_T).sum())

    def faults(self) -> tuple[Fault, ...]:
        """What was found, the most certain first."""
        checks: tuple[Callable[[], Iterator[Fault]], ...] = (
            self._of_copies,
            self._of_constants,
            self._of_probabilities,
            self._of_signs,
            self._of_fill_values,
            self._of_bases,
            self._of_padding,
            self._of_filled,
            self._of_first_choices,
            self._of_grids,
            self._of_versions,
        )
        return tuple(fault for check in checks for fault in check())

    def _of_copies(self) -> Iterator[Fault]:
        if self.tokens >= FEWEST and self.equal == self.tokens and not self._constant():
            yield _fault("copy", tokens=f"{self.tokens:,}")

    def _constant(self) -> list[str]:
        return [side for side, (low, high) in self.ends.items() if low == high and self.tokens >= FEWEST]

    def _of_constants(self) -> Iterator[Fault]:
        for side in self._constant():
            yield _fault("constant", side=side, value=f"{self.ends[side][0]:g}")

    def _positive(self) -> list[str]:
        """The sides with numbers above 0 nearly everywhere."""
        sides = [side for side in SIDES if self.counts[f"{side} above 0"] >= NEARLY_ALL * self.tokens]
        return [side for side in sides if self.tokens >= FEWEST and side not in self._constant()]

    def _are_probabilities(self, side: str) -> bool:
        low, high = self.ends[side]
        return low >= 0 and SOME_CERTAIN <= high <= 1 + 1e-5

    def _of_probabilities(self) -> Iterator[Fault]:
        """Some token is nearly certain; the largest negative log-likelihood is hardly ever just below 1."""
        if sides := [side for side in self._positive() if self._are_probabilities(side)]:
            yield _fault("probabilities", whose=_whose(sides))

    def _of_signs(self) -> Iterator[Fault]:
        if sides := [side for side in self._positive() if not self._are_probabilities(side)]:
            yield _fault("negative", whose=_whose(sides))

    def _of_fill_values(self) -> Iterator[Fault]:
        for side in SIDES:
            if (tokens := self.counts[f"{side} fill"]) and side not in self._constant():
                value = max(self.ends[side], key=abs)
                yield _fault("fill_value", side=side, value=f"{value:g}", tokens=f"{tokens:,}")

    def _of_bases(self) -> Iterator[Fault]:
        """One factor between the two sides, which is that of another base: s = c t for every token."""
        _, _, squared_s, squared_t, both = self.products
        if self.tokens < FEWEST or squared_s * squared_t == 0 or both <= 0:
            return
        factor, explained = both / squared_t, both**2 / (squared_s * squared_t)
        for base in (2, 10):
            for side, expected in (("sampler", 1 / math.log(base)), ("trainer", math.log(base))):
                if explained >= BASE_FIT and abs(factor / expected - 1) <= BASE_TOLERANCE:
                    yield _fault("base", side=side, base=base, factor=f"{math.log(base):.4g}")
                    return

    def _of_padding(self) -> Iterator[Fault]:
        """Rows of one width in each batch, filled up with runs that are longer than any policy's repetitions."""
        for (edge, pair), (rows, tokens, same) in self.fills.items():
            runs, tokens_within = self.within.get(pair, (1, 1))
            is_padding = rows > max(1, PADDED_SEQUENCES * self.counts["sequences"]) and same >= ONE_WIDTH * rows
            if is_padding and tokens / rows >= LONGER_RUNS * tokens_within / runs:
                value = f"{pair.real:g}" if pair.real == pair.imag else f"{pair.real:g} and {pair.imag:g}"
                yield _fault("padding", edge=edge, value=value, tokens=f"{tokens:,}")

    def _of_filled(self) -> Iterator[Fault]:
        for side in SIDES:
            if (responses := self.counts[f"{side} filled"]) and side not in self._constant():
                yield _fault("filled", side=side, responses=responses, of=self.counts["sequences"])

    def _of_first_choices(self) -> Iterator[Fault]:
        sure = self.counts["sure"]
        if sure < FEWEST or self.counts["sure agree"] < 0.9 * sure:
            return
        for side in SIDES:
            rare, above = self.counts[f"{side} rare"], self.counts[f"{side} rare above"]
            if rare >= FEWEST and above >= 0.95 * rare:
                yield _fault("first_choice", side=side, share=f"{100 * above / rare:.3g}")

    def _of_grids(self) -> Iterator[Fault]:
        for side in SIDES:
            count = self.counts[f"{side} off zero"]
            if count < FEWEST or side in self._constant():
                continue
            powers = [n for n in range(FINEST_GRID + 1) if self.counts[f"{side} grid {n}"] >= NEARLY_ALL * count]
            formats = [name for name in ("bfloat16", "float16") if self.counts[f"{side} {name}"] >= NEARLY_ALL * count]
            if powers:
                yield _fault("grid", side=side, step=f"1/{2 ** powers[0]}" if powers[0] else "1")
            elif formats:
                yield _fault("sixteen_bits", side=side, format=formats[0])

    def _of_versions(self) -> Iterator[Fault]:
        ahead, known = self.counts["ahead"], self.counts["versions"]
        if ahead:
            yield _fault("ahead", responses=ahead, of=known)

"""The search: what each hypothesis predicts, how far that is from a column, and the greedy combination of several."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from tailrl.artifacts.metrics import FloatArray
from tailrl.explanation import record
from tailrl.explanation.catalogue import KINDS, Choice, Hypothesis, catalogue
from tailrl.explanation.record import Predicted
from tailrl.explanation.rows import Rows
from tailrl.explanation.scorer import Scorer
from tailrl.explanation.sequences import Scored

World = tuple[Choice, ...]
"""Changes of the model, in the order in which they are made; empty: the model as it is."""

AS_IT_IS: World = ()

# "Clear" counts in standard errors over responses: by how many a hypothesis's mean loss is below the other's.
HOPEFUL = 1.0  # a hypothesis must be so clear on the screen's few tokens
HOPELESS = -3.0  # below it on the screen's first response, over its tokens, the others are not computed
MOST_HOPEFUL = 6  # so many hypotheses that need a forward pass the screen
CLEAR = 4.0  # a hypothesis must be so clear
CLEAR_IF_LEFT = 3.0  # enough where more than rounding is left, since something is missing then
WORSE = -4.0  # no number is fitted where the best value of the catalogue is below this

# A hypothesis must also be large enough.
LEAST_GAIN = 0.08  # it explains at least this share of the mean absolute difference
LEAST_DROP = 2e-5  # nats that it explains; fitted numbers and a log's decimals explain less
LEAST_SHARE = 0.5  # it predicts at least this share of the tokens
LEAST_SCALE = 2e-4  # nats; no column is taken to be more exact
ENOUGH = 1.6  # times bfloat16's rounding: where less is left, no further forward is run

# A coarse number format is found by its direction, since its own noise hides single tokens.
FOLLOWED = 0.4  # the column has at least this share of the predicted change
LEAST_SIZE = 0.25  # the predicted change is at least this share of the column's difference
MOST_FOLLOWED = 3  # so many formats are held against all tokens
MOST_MOVED = 8.0  # times rounding: one token counts for no more

# Limits of the search.
MOST_FITS = 28  # evaluations to fit one number
MOST_FORWARDS = 8  # evaluations to fit a number that needs a forward each time
MOST_CHANGES = 5  # hypotheses that are combined
MOST_REFITTED = 4  # combinations whose numbers are all fitted again before they are compared
JOINT_ROUNDS = 4  # turns through all settings of a sampler
FITTED_ROUNDS = 8  # turns through all numbers of a combination
TOO_NEAR = 0.1  # a catalogued value nearer than this share of the interval does not bound the fit
KEPT_ROWS = 12  # forwards whose reduced rows stay in memory: all roundings and some more; 13 MB each at 1,000 tokens
BLOCK = 256  # predictions that share an array


def ordered(choices: Iterable[Choice]) -> World:
    """Choices in the order in which they act."""
    return tuple(
        sorted(
            choices, key=lambda c: (KINDS.index(c.hypothesis.entry.kind), c.hypothesis.entry.order, c.hypothesis.name)
        )
    )


def of_kind(world: World, *kinds: str) -> World:
    return tuple(choice for choice in world if choice.hypothesis.entry.kind in kinds)


@dataclass
class Laboratory:
    """Computes what worlds predict for a set of responses.

    Attributes:
        scorer: the model.
        chosen: the responses.
        parts: laboratories for some of the responses of a log, which its samples and both sides share.
    """

    scorer: Scorer
    chosen: Sequence[Scored]
    seen: Callable[[int], object] = int
    parts: dict[Hashable, "Laboratory"] = field(default_factory=dict)
    _rows: dict[World, Rows | None] = field(default_factory=dict)
    _predicted: dict[World, FloatArray | None] = field(default_factory=dict)
    pinned: set[World] = field(default_factory=lambda: {AS_IT_IS})

    def __post_init__(self) -> None:
        self.start_S = np.cumsum([0, *(len(one.position_T) for one in self.chosen)])
        self.sequence_T = np.repeat(np.arange(len(self.chosen)), np.diff(self.start_S))
        self._block: FloatArray = np.empty((0, 0))
        self._free = 0  # the block's first free row

    def part(self, chosen: Sequence[Scored]) -> "Laboratory":
        """A laboratory for some of the responses, with the forwards that it has run already."""
        key = tuple((one.response.number, one.inputs.elsewhere) for one in chosen)
        return self.parts.setdefault(key, Laboratory(self.scorer, chosen, self.seen, self.parts))

    def column(self, side: str) -> FloatArray:
        """The logged numbers of a side, nats [T]."""
        return np.concatenate([getattr(one, f"{side}_T") for one in self.chosen])

    @property
    def plain_logprobs(self) -> FloatArray:
        """The model's own log-probs, nats [T]."""
        logprob_T = self.predicted(AS_IT_IS)
        assert logprob_T is not None
        return logprob_T

    def rounding(self, world: World, value: str = "bfloat16") -> float:
        """What bfloat16 makes of a world's predictions: mean absolute difference, nats."""
        choice = Choice(next(one for one in catalogue() if one.name == "bfloat16"), value)
        plain_T, rounded_T = self.predicted(world), self.predicted(ordered([*world, choice]))
        return 0.0 if plain_T is None or rounded_T is None else float(np.nanmean(np.abs(plain_T - rounded_T)))

    def scale(self) -> FloatArray:
        """The size of rounding for each token, nats: nearly proportional to 1 minus its probability."""
        rest_T = np.maximum(-np.expm1(self.plain_logprobs), 0.02)
        scale_T: FloatArray = np.maximum(self.rounding(AS_IT_IS) / rest_T.mean() * rest_T, LEAST_SCALE)
        return scale_T

    def rows(self, world: World) -> Rows | None:
        """Reduced rows of the world's forward; None where its changes apply nowhere."""
        forward = of_kind(world, "inputs", "model")
        if forward not in self._rows:
            self._rows[forward] = self.scorer.rows(
                [one.inputs for one in self.chosen], of_kind(forward, "model"), of_kind(forward, "inputs"), self.seen
            )
        self._rows[forward] = self._rows.pop(forward)  # the last used one is the last to go
        kept = [key for key in self._rows if key not in self.pinned]
        for key in kept[: -KEPT_ROWS or None]:
            del self._rows[key]
        return self._rows[forward]

    def forget_rows(self) -> None:
        """Frees the memory of all rows; what was predicted stays."""
        self._rows.clear()

    def predicted(self, world: World) -> FloatArray | None:
        """What the column would hold, nats [T], NaN where the world says nothing; None where it does not apply."""
        if world not in self._predicted:
            found_T = self._predict(world)
            self._predicted[world] = None if found_T is None else self._stored(found_T)
        return self._predicted[world]

    def _stored(self, values_T: FloatArray) -> FloatArray:
        """A copy, in a block of many predictions.

        A small array of its own would take a part of the place that a large array has just left. The next large array
        would need a new place, and memory would grow with each world.
        """
        if self._free == len(self._block):
            self._block, self._free = np.empty((BLOCK, len(values_T))), 0
        stored_T: FloatArray = self._block[self._free]
        stored_T[:] = values_T
        self._free += 1
        return stored_T

    def _predict(self, world: World) -> FloatArray | None:
        rows = self.rows(world)
        if rows is None:
            return None
        for choice in of_kind(world, "logits"):
            rows = choice.hypothesis.apply(rows, choice.value)
        logprob_T = rows.logprobs().numpy()
        written = of_kind(world, "record")
        if not written:
            return logprob_T
        top_T = rows.top_logprobs().numpy()
        parts = []
        for (begin, end), one in zip(pairwise(self.start_S), self.chosen, strict=True):
            own = Predicted(logprob_T[begin:end], top_T[begin:end], one.position_T, len(one.response.sampler_T))
            found_T = record.as_it_is(own, 0.0)
            for choice in written:
                found_T = choice.hypothesis.apply(own, choice.value)
            parts.append(found_T)
        return np.concatenate(parts)


@dataclass(frozen=True)
class Judged:
    """How a world stands against a column.

    Attributes:
        world: its changes.
        loss: mean over tokens of log(1 + (difference / rounding)²) / 2: how many tokens are reproduced.
        residual: mean absolute difference, nats.
        clear: standard errors by which its loss is below that of the world that it was held against.
    """

    world: World
    loss: float
    residual: float
    clear: float = 0.0


class Court:
    """Holds worlds against one column of a laboratory."""

    def __init__(
        self,
        laboratory: Laboratory,
        side: str,
        scale_T: FloatArray | None = None,
        screen: "Court | None" = None,
    ) -> None:
        """`scale_T`: what each token's difference is measured by, nats; None: the size of rounding.

        `screen`: a court over few tokens, which spares forwards under hypotheses that fail there.
        """
        self.laboratory, self.side, self.screen = laboratory, side, screen
        self.column_T = laboratory.column(side)
        self.scale_T = laboratory.scale() if scale_T is None else scale_T
        self.sequences = int(laboratory.sequence_T.max()) + 1

    def losses(self, world: World) -> FloatArray | None:
        """The loss of each token; NaN where the world says nothing; None where it does not apply."""
        predicted_T = self.laboratory.predicted(world)
        if predicted_T is None:
            return None
        difference_T = np.clip(np.abs(self.column_T - predicted_T), 0, 1e3)
        return np.log1p((difference_T / self.scale_T) ** 2) / 2

    def judge(self, world: World, against: World = AS_IT_IS) -> Judged | None:
        """How the world stands; None where it does not apply or says too little."""
        loss_T, other_T = self.losses(world), self.losses(against)
        if loss_T is None or other_T is None:
            return None
        both_T = np.isfinite(loss_T) & np.isfinite(other_T)
        if both_T.mean() < LEAST_SHARE:
            return None
        gain_T = (other_T - loss_T)[both_T]
        # Tokens of a response are alike: the error is that of sums over responses.
        sums_S = np.bincount(self.laboratory.sequence_T[both_T], gain_T - gain_T.mean(), self.sequences)
        error = max(np.sqrt((sums_S**2).sum()), np.sqrt(len(gain_T)) * 1e-9) / len(gain_T)
        return Judged(world, float(loss_T[both_T].mean()), self.residual(world), float(gain_T.mean() / error))

    def loss(self, world: World) -> float:
        """The mean loss of a world, by which numbers are fitted; infinite where it does not apply."""
        judged = self.judge(world)
        return judged.loss if judged else np.inf

    def hopeful(self, worlds: Sequence[World], against: World) -> list[World]:
        """The worlds that do best on the few tokens of the screen; all where there is none."""
        if self.screen is None:
            return list(worlds)
        judged = [
            found
            for world in worlds
            if self.screen.is_plausible(world, against) and (found := self.screen.judge(world, against))
        ]
        better = sorted((one for one in judged if one.clear >= HOPEFUL), key=lambda one: one.loss)
        return [one.world for one in better[:MOST_HOPEFUL]]

    def is_plausible(self, world: World, against: World) -> bool:
        """Whether the first response alone does not speak clearly against a world: it spares the other responses."""
        if len(self.laboratory.chosen) == 1:
            return True
        first = self.laboratory.part(self.laboratory.chosen[:1])
        tokens = len(first.sequence_T)
        alone = Court(first, self.side, self.scale_T[:tokens])
        loss_T, other_T = alone.losses(world), alone.losses(against)
        if loss_T is None or other_T is None:
            return True  # its changes may apply to other responses
        gain_T = (other_T - loss_T)[np.isfinite(loss_T) & np.isfinite(other_T)]
        if len(gain_T) < 2:
            return True
        error = float(gain_T.std()) / np.sqrt(len(gain_T))
        return bool(gain_T.mean() >= HOPELESS * max(error, 1e-9))

    def followed(self, world: World, choice: Choice, benign: Sequence[Hypothesis]) -> tuple[float, float]:
        """How much of the change that a choice predicts is in the column: its share, and that in standard errors.

        What the benign hypotheses predict is taken out of both first. A coarse format's own noise hides most of its
        prediction token by token; a sum over all tokens shows it.
        """
        plain_T, changed_T = self.laboratory.predicted(world), self.laboratory.predicted(ordered([*world, choice]))
        if plain_T is None or changed_T is None:
            return 0.0, 0.0
        rounded = [
            predicted_T
            for one in benign
            for value in one.entry.values
            if (predicted_T := self.laboratory.predicted(ordered([*world, Choice(one, value)]))) is not None
        ]

        def moved(numbers_T: FloatArray) -> FloatArray:
            return np.nan_to_num(np.clip((numbers_T - plain_T) / self.scale_T, -MOST_MOVED, MOST_MOVED))

        basis_TB = np.stack([moved(one_T) for one_T in rounded], 1)
        column_T, change_T = moved(self.column_T), moved(changed_T)
        if np.abs(changed_T - plain_T).mean() < LEAST_SIZE * self.residual(world):
            return 0.0, 0.0
        column_T = column_T - basis_TB @ np.linalg.lstsq(basis_TB, column_T)[0]
        change_T = change_T - basis_TB @ np.linalg.lstsq(basis_TB, change_T)[0]
        square = float((change_T**2).sum())
        if not square:
            return 0.0, 0.0
        share = float((change_T * column_T).sum()) / square
        sums_S = np.bincount(self.laboratory.sequence_T, change_T * (column_T - share * change_T), self.sequences)
        return share, share * square / max(float(np.sqrt((sums_S**2).sum())), 1e-9)

    def residual(self, world: World) -> float:
        """Mean absolute difference of the column and the world's prediction, nats."""
        predicted_T = self.laboratory.predicted(world)
        assert predicted_T is not None
        return float(np.nanmean(np.clip(np.abs(self.column_T - predicted_T), 0, 50)))

    def fitted(self, world: World, choice: Choice, most: int) -> Choice:
        """The choice with its number fitted, the rest of the world as it is."""
        entry = choice.hypothesis.entry
        if entry.fit is None or not isinstance(choice.value, float):
            return choice
        numbers = sorted(value for value in entry.values if isinstance(value, float))
        low, high = _neighbours(numbers, choice.value)

        def loss(value: float) -> float:
            return self.loss(ordered([*world, Choice(choice.hypothesis, value)]))

        best = (
            _whole(loss, choice.value, low, high, most)
            if entry.fit == "whole"
            else _golden(loss, choice.value, low, high, most)
        )
        return Choice(choice.hypothesis, best)


def _neighbours(numbers: Sequence[float], value: float) -> tuple[float, float]:
    """The catalogue's numbers around a value. One that is too near is skipped: the best value may lie beyond it."""
    below = [one for one in numbers if one < value]
    above = [one for one in numbers if one > value]
    least, most = (value / 2, value * 2) if value > 0 else (value * 2, value / 2)
    low, high = below[-1] if below else least, above[0] if above else most
    near = TOO_NEAR * (high - low)
    if value - low < near:
        low = below[-2] if len(below) > 1 else least
    if high - value < near:
        high = above[1] if len(above) > 1 else most
    return low, high


def _golden(loss: Callable[[float], float], start: float, low: float, high: float, most: int) -> float:
    """The number between the neighbours with the least loss, by golden sections; rounded where that loses nothing."""
    share = (5**0.5 - 1) / 2
    a, b = low, high
    tried = {start: loss(start)}
    c, d = b - share * (b - a), a + share * (b - a)
    for _ in range(most):
        for place in (c, d):
            if place not in tried:
                tried[place] = loss(place)
        if tried[c] < tried[d]:
            b, d = d, c
            c = b - share * (b - a)
        else:
            a, c = c, d
            d = a + share * (b - a)
        if b - a < 1e-4 * max(1e-3, abs(a)) or len(tried) >= most:
            break
    best = min(tried, key=lambda value: tried[value])
    rounds = {float(f"{best:.{digits}g}") for digits in (1, 2, 3)}
    near = {value: loss(value) for value in rounds if value and abs(value - best) <= 0.02 * abs(best)}
    near = {value: found for value, found in near.items() if found <= tried[best] * 1.001 + 1e-6}
    return min(near, key=lambda value: len(f"{value:g}")) if near else best


def _whole(loss: Callable[[float], float], start: float, low: float, high: float, most: int) -> float:
    """The whole number between the neighbours with the least loss: steps that halve."""
    tried = {start: loss(start)}
    step = max(1, round(max(high - start, start - low) / 2))
    while len(tried) < most:
        best = min(tried, key=lambda value: tried[value])
        around = [v for v in (best - step, best + step) if low <= v <= high and v not in tried and (v > 0 or low < 0)]
        for value in around[: most - len(tried)]:
            tried[value] = loss(value)
        if min(tried, key=lambda value: tried[value]) == best:
            if step == 1:
                break
            step = max(1, step // 2)
    return min(tried, key=lambda value: tried[value])


@dataclass(frozen=True)
class Found:
    """The explanation of one column.

    Attributes:
        world: the changes that reproduce it, without benign ones.
        benign: the benign change that is nearest, if any.
        others: the next best single hypotheses, the best first.
    """

    world: World
    benign: World
    others: tuple[Judged, ...]


def search(court: Court, hypotheses: Sequence[Hypothesis]) -> Found:
    """The greedy combination of hypotheses that reproduces a column.

    A hypothesis is taken where it is clearly better than the best without it, a benign one included. Those that need
    another forward are tried where the others leave more than rounding; without any cause, always once.
    """
    rounding = court.laboratory.rounding
    benign = [h for h in hypotheses if h.entry.benign]
    others = [h for h in hypotheses if not h.entry.benign]
    world, reference = AS_IT_IS, _best_benign(court, AS_IT_IS, benign)
    singles: list[Judged] = []
    while len(world) < MOST_CHANGES:
        against = ordered([*world, *reference])
        tried = list(_tried(court, world, reference, [h for h in others if not h.entry.needs_forward]))
        if not world and (joint := _joint(court, others)):
            tried += [found for found in [court.judge(_pruned(court, refitted(court, joint)), against)] if found]
        if world and court.residual(against) > ENOUGH * rounding(world):
            # Numbers that were fitted alone make up for what is missing: the best are judged with all numbers fitted.
            best_first = sorted(tried, key=lambda one: one.loss)[:MOST_REFITTED]
            again = [court.judge(refitted(court, one.world), against) for one in best_first]
            tried = [one for one in again if one is not None]
        clear = CLEAR if court.residual(against) <= ENOUGH * rounding(world) or not world else CLEAR_IF_LEFT
        good = [one for one in tried if _is_better(court, one, against, clear)]
        left = min((one.residual for one in good), default=np.inf)
        if (not world and not left <= ENOUGH * rounding(world)) or (
            not good and court.residual(against) > ENOUGH * rounding(world)
        ):
            tried += _tried(court, world, reference, [h for h in others if h.entry.needs_forward])
            good = [one for one in tried if _is_better(court, one, against, clear)]
        if not world:
            singles = sorted((one for one in tried if len(one.world) == 1), key=lambda one: one.loss)
        if not good:
            break
        best = min(good, key=lambda one: one.loss)
        world = refitted(court, best.world)
        court.laboratory.pinned.add(of_kind(world, "inputs", "model"))
        reference = _best_benign(court, world, benign)
    world = _pruned(court, _swapped(court, world, others))
    return Found(world, _best_benign(court, world, benign), tuple(singles))


def followed_format(court: Court, screen: Court, world: World, hypotheses: Sequence[Hypothesis]) -> World:
    """The coarse format whose prediction the column follows, where its own noise hides it from `search`; or none.

    Only the formats that do best on the few tokens of the screen are computed for all tokens.
    """
    benign = [h for h in hypotheses if h.entry.benign]
    formats = [Choice(h, value) for h in hypotheses if h.entry.coarse for value in h.entry.values]
    hopeful = sorted(formats, key=lambda one: -screen.followed(world, one, benign)[1])[:MOST_FOLLOWED]
    best, most = AS_IT_IS, CLEAR
    for choice in hopeful:
        share, clear = court.followed(world, choice, benign)
        if share >= FOLLOWED and clear >= most:
            best, most = (choice,), clear
    return best


def nearest_rounding(court: Court, hypotheses: Sequence[Hypothesis]) -> World:
    """The benign change that reproduces the column best, if one does so clearly; judged on the scale of the column."""
    scale_T = court.scale_T * court.residual(AS_IT_IS) / court.scale_T.mean()
    finer = Court(court.laboratory, court.side, scale_T)
    return _best_benign(finer, AS_IT_IS, [one for one in hypotheses if one.entry.benign])


def _is_better(court: Court, judged: Judged, than: World, clear: float = CLEAR) -> bool:
    residual, before = judged.residual, court.residual(than)
    return judged.clear >= clear and before - residual >= max(LEAST_GAIN * before, LEAST_DROP)


def _best_benign(court: Court, world: World, benign: Sequence[Hypothesis]) -> World:
    """The benign change with which the world reproduces the column clearly better; empty if none does."""
    found = [court.judge(ordered([*world, Choice(h, v)]), world) for h in benign for v in h.entry.values]
    clear = [one for one in found if one is not None and one.clear >= 2]
    if not clear:
        return AS_IT_IS
    best = min(clear, key=lambda one: one.loss)
    return tuple(choice for choice in best.world if choice not in world)


def _tried(court: Court, world: World, reference: World, hypotheses: Sequence[Hypothesis]) -> Iterator[Judged]:
    """Each hypothesis on top of the world at its best number, held against the best without it."""
    taken = {choice.hypothesis.name for choice in world}
    against = ordered([*world, *reference])
    free = [h for h in hypotheses if h.name not in taken and not (h.entry.kind == "record" and world)]
    worlds = {h.name: [ordered([*world, Choice(h, value)]) for value in h.entry.values] for h in free}
    running = [one for h in free if h.entry.needs_forward for one in worlds[h.name]]
    hopeful = set(court.hopeful(running, against)) if running else set()
    for hypothesis in free:
        entry = hypothesis.entry
        tested = [one for one in worlds[hypothesis.name] if not entry.needs_forward or one in hopeful]
        judged = [found for one in tested if (found := court.judge(one, against))]
        if not judged:
            continue
        best = min(judged, key=lambda one: one.loss)
        choice = next(choice for choice in best.world if choice.hypothesis.name == hypothesis.name)
        if entry.fit and (best.clear > WORSE if not entry.needs_forward else _is_better(court, best, against)):
            fitted = court.fitted(world, choice, MOST_FORWARDS if entry.needs_forward else MOST_FITS)
            best = court.judge(ordered([*world, fitted]), against) or best
        yield best


def _joint(court: Court, hypotheses: Sequence[Hypothesis]) -> World:
    """Several settings of a sampler at once, by the mean absolute difference; none if fewer than two help.

    A single one of several settings reproduces no token, so that the loss, which counts reproduced tokens, may lead
    elsewhere. Each setting in turn takes the value, or none, that is best beside the others.
    """
    settings = [h for h in hypotheses if h.entry.joint]
    world, best = AS_IT_IS, court.residual(AS_IT_IS)
    for _ in range(JOINT_ROUNDS):
        before = world
        for hypothesis in settings:
            rest = tuple(choice for choice in world if choice.hypothesis.name != hypothesis.name)
            worlds = [rest, *(ordered([*rest, Choice(hypothesis, value)]) for value in hypothesis.entry.values)]
            left = [court.residual(one) for one in worlds]
            # Nothing is better than a setting that hardly helps.
            least = min(range(len(worlds)), key=lambda place: left[place] if place else 0.98 * left[place])
            world, best = worlds[least], left[least]
        if world == before:
            break
    return world if len(world) > 1 and best < court.residual(AS_IT_IS) else AS_IT_IS


def refitted(court: Court, world: World) -> World:
    """The world with all of its numbers fitted together.

    Each number is fitted in turn while the others stay. Numbers that make up for one another, such as a temperature and
    a penalty, would take many turns: a turn is followed by larger steps in its direction. A whole number moves by one
    while the others are fitted again.
    """
    if len(world) < 2:
        return _in_turn(court, world)
    for _ in range(FITTED_ROUNDS):
        before = world
        world = _further(court, before, _in_turn(court, world))
        for choice in world:
            if choice.hypothesis.entry.fit == "whole":
                world = _stepped(court, world, choice)
        if world == before:
            break
    return world


def _in_turn(court: Court, world: World, fixed: Choice | None = None) -> World:
    """The world with each number fitted while the others stay; `fixed` keeps its number."""
    for choice in of_kind(world, "logits", "record"):
        if choice != fixed:
            rest = tuple(one for one in world if one != choice)
            world = ordered([*rest, court.fitted(rest, choice, MOST_FITS)])
    return world


def _further(court: Court, before: World, after: World) -> World:
    """A world on the line from one to another and beyond it: steps that double while they help."""
    best, step = after, 1.0
    while after != before and court.loss(moved := _moved(before, after, step)) < court.loss(best):
        best, step = moved, 2 * step
    return best


def _moved(before: World, after: World, step: float) -> World:
    """The second world with its numbers moved on by so many times their difference from the first."""
    moved = []
    for old, new in zip(before, after, strict=True):
        entry, value = new.hypothesis.entry, new.value
        if entry.fit == "real" and isinstance(value, float) and isinstance(old.value, float):
            beyond = value + step * (value - old.value)
            new = Choice(new.hypothesis, beyond) if beyond * value > 0 else new
        moved.append(new)
    return tuple(moved)


def _stepped(court: Court, world: World, choice: Choice) -> World:
    """The world with a whole number one larger or smaller and the others fitted to it, where that is better."""
    rest = tuple(one for one in world if one != choice)
    for step in (-1, 1):
        value = float(choice.value) + step
        if value * float(choice.value) > 0:
            other = Choice(choice.hypothesis, value)
            moved = _in_turn(court, ordered([*rest, other]), other)
            world = moved if court.loss(moved) < court.loss(world) else world
    return world


def _swapped(court: Court, world: World, hypotheses: Sequence[Hypothesis]) -> World:
    """The world with one setting of a sampler in place of another, where that reproduces the column better.

    Settings are alike, such as min-p and top-k: the one that was tried first may have taken the other's place.
    """
    settings = [h for h in hypotheses if h.entry.joint]
    taken = {choice.hypothesis.name for choice in world}
    swaps = [
        ordered([*(one for one in world if one != choice), Choice(other, value)])
        for choice in world
        if choice.hypothesis.entry.joint
        for other in settings
        if other.name not in taken
        for value in other.entry.values
    ]
    if len(world) < 2 or not swaps:
        return world
    swapped = refitted(court, min(swaps, key=court.loss))
    return swapped if court.loss(swapped) < court.loss(world) else world


def _pruned(court: Court, world: World) -> World:
    """The world without changes that others made superfluous."""
    for choice in world if len(world) > 1 else ():
        rest = tuple(one for one in world if one != choice)
        judged = court.judge(world, rest)
        if judged is not None and not _is_better(court, judged, rest, CLEAR_IF_LEFT):
            world = rest
    return world

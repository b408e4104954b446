"""Explains a log: the referee, the search for each side, and the verdict."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from tailrl.diagnosis.diagnosis import Table
from tailrl.diagnosis.log import SIDES, Log, LoggedRow, pack
from tailrl.diagnosis.tables import read_table
from tailrl.explanation.catalogue import Choice, Hypothesis, catalogue, imported
from tailrl.explanation.columns import Finding, inspect
from tailrl.explanation.layers import Engine, Stage, vllm_outputs
from tailrl.explanation.layers import compare as compare_layers
from tailrl.explanation.places import FEWEST_RESPONSES, at_an_end
from tailrl.explanation.prompts import match, read_prompts, with_other_prompts
from tailrl.explanation.scorer import Scorer
from tailrl.explanation.search import (
    AS_IT_IS,
    ENOUGH,
    LEAST_SCALE,
    MOST_HOPEFUL,
    Court,
    Found,
    Laboratory,
    World,
    followed_format,
    nearest_rounding,
    of_kind,
    ordered,
    refitted,
    search,
)
from tailrl.explanation.sequences import (
    LONGEST,
    Response,
    Scored,
    by_what_they_tell,
    read,
    require,
    scored,
    with_prompts,
)
from tailrl.explanation.train_mode import TRAIN_MODE, left_on, probabilities
from tailrl.runtime.errors import ConfigurationError, DataError, say

TOKENS = 1000  # computed at most, unless the caller says otherwise
FIRST_TOKENS = 250  # in the first sample; each later sample has twice as many
SEARCHED_TOKENS = 500  # the search tries all hypotheses on so many tokens of a sample
SCREENED_TOKENS = 90  # hypotheses that need a forward must be hopeful on so many tokens first
BIASED_TOKENS = 8  # a bias is tried on so many probable tokens, and on so many frequent ones
SAME = 0.02  # relative difference up to which the numbers of two samples agree
BAD, GOOD = 4.0, 2.0  # times bfloat16's rounding: a response is far from the model above BAD, near it below GOOD

# Limits of a side without a fault, in shares of the rounding that bfloat16 makes.
EXACT = 0.01  # below it the side has the model's own bits
SMALL = 0.1  # below it no fault is searched for
MOST_LEFT = 0.5  # share of the difference that a named cause may leave
MOST_LEFT_WRITTEN = 0.1  # and that a way to write numbers down may leave
WITHIN_ROUNDING = 1.5  # above it the side is not clean; below it, two programs may round so differently
NEARLY = 0.8  # share of that limit, above which more tokens are computed
LEAST_ROUNDING = 5e-4  # nats; a log's decimals and the order of sums make as much


@dataclass(frozen=True, slots=True)
class Side:
    """What was found of one column.

    Attributes:
        side: sampler or trainer.
        before: mean absolute difference from the model in float32, nats.
        after: from what the explanation predicts.
        rounding: what bfloat16, logits too, makes of the explanation's prediction, nats.
        world: the changes that reproduce it; empty: the model as it is.
        benign: the rounding that is nearest, if any.
        others: the next best single hypotheses: words and residuals, nats.
        share: of the responses that the explanation is about.
        follows: whether the world has a coarse number format by its direction: the rest is that format's noise.
        is_placed: whether a finding says at which tokens it differs, and it does not elsewhere.
    """

    side: str
    before: float
    after: float
    rounding: float
    world: World
    benign: World
    others: tuple[tuple[str, float], ...]
    share: float = 1.0
    follows: bool = False
    is_placed: bool = False

    @property
    def is_clean(self) -> bool:
        """Whether it is this model's, up to rounding in 16 bits."""
        return not self.world and self.before <= self.limit

    @property
    def is_explained(self) -> bool:
        """Whether no more than rounding is left, or a named cause explains most.

        A way to write numbers down, such as the most probable token's, leaves nothing but another cause's rest. And it
        takes half of a large difference away by chance: of another model's numbers, say.
        """
        most_left = MOST_LEFT_WRITTEN if of_kind(self.world, "record") else MOST_LEFT
        return (
            self.is_placed
            or self.follows
            or self.after <= self.limit
            or (bool(self.world) and self.after <= most_left * self.before)
        )

    @property
    def is_doubtful(self) -> bool:
        """Whether it is this model's by little: more tokens may show a cause."""
        return not self.world and not self.is_placed and self.before > NEARLY * self.limit

    @property
    def limit(self) -> float:
        return _limit(self.rounding)

    @property
    def explained(self) -> float:
        """The share of the mean absolute difference that the explanation takes away."""
        return max(0.0, 1 - self.after / self.before) if self.before else 0.0


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a log's recomputation tells.

    Attributes:
        model: the folder.
        title: of the log's format.
        sampler, trainer: what was found of each column.
        findings: what the columns show without a model.
        steps: of each step its number, responses, and both sides' mean absolute difference from the model, nats.
        tried: hypotheses that were computed.
        untried: the others, by name, with the reason.
        tokens, responses, rows: that were scored; responses of the log.
        notes: on prompts and tokens.
        layers: places of the model in their order, where an engine was compared; empty: none was.
        samples: tokens of each sample, in order. stable: whether the last two samples gave the same answer.
    """

    model: str
    title: str
    sampler: Side
    trainer: Side
    findings: tuple[Finding, ...]
    steps: tuple[tuple[float, int, float, float], ...]
    tried: int
    untried: tuple[tuple[str, str], ...]
    tokens: int
    responses: int
    rows: int
    notes: tuple[str, ...]
    layers: tuple[Stage, ...] = ()
    samples: tuple[int, ...] = ()
    stable: bool = False

    @property
    def sides(self) -> dict[str, Side]:
        """Both, by their names."""
        return {"sampler": self.sampler, "trainer": self.trainer}

    @property
    def shared(self) -> World:
        """Changes that both sides have: settings of the run, or a log whose prompts are not those that were read."""
        return tuple(one for one in self.sampler.world if any(_same(one, other) for other in self.trainer.world))

    def own(self, side: str) -> World:
        """Changes that one side has and the other has not."""
        other = self.trainer if side == "sampler" else self.sampler
        return tuple(one for one in self.sides[side].world if not any(_same(one, two) for two in other.world))

    @property
    def pinned_side(self) -> str:
        """The side that stays at this model while the other moves away with the steps; empty: neither."""
        return _pinned(self.steps, self.sampler.rounding)

    @property
    def faults(self) -> tuple[str, ...]:
        """The sides with a cause of their own or a difference that nothing explains."""
        return tuple(side for side in SIDES if self.own(side) or not self.sides[side].is_explained)

    @property
    def code(self) -> int:
        """0: nothing but rounding; 1: a cause is named; 2: there is a difference that no hypothesis reproduces."""
        written = [one for one in self.shared if one.hypothesis.entry.kind == "record"]
        if self.pinned_side or written or any(self.named(side) for side in SIDES):
            return 1
        if any(one.is_fault for one in self.findings):
            return 1
        return 0 if all(side.is_explained for side in self.sides.values()) else 2

    def named(self, side: str) -> World:
        """Changes that one side has and that explain it: none where most of the difference is left."""
        return self.own(side) if self.sides[side].is_explained else AS_IT_IS


def _limit(rounding: float) -> float:
    """The mean difference up to which rounding explains a side, nats, where bfloat16's makes so much."""
    return WITHIN_ROUNDING * max(rounding, LEAST_ROUNDING)


def _same(one: Choice, other: Choice, within: float = 0.03) -> bool:
    if one.hypothesis.name != other.hypothesis.name:
        return False
    if isinstance(one.value, float) and isinstance(other.value, float):
        return abs(one.value - other.value) <= within * max(abs(one.value), abs(other.value))
    return one.value == other.value


def _pinned(steps: Sequence[tuple[float, int, float, float]], rounding: float) -> str:
    """The side whose numbers are this model's at every step, while the other's move away; empty: neither."""
    if len(steps) < 3:
        return ""
    far = {"sampler": np.array([one[2] for one in steps]), "trainer": np.array([one[3] for one in steps])}
    limit = _limit(rounding)
    for side, other in (SIDES, SIDES[::-1]):
        moves = far[other][-1] > 2 * far[other][0] and far[other][-1] > 2 * limit
        if (far[side] <= limit).all() and moves and np.corrcoef(np.arange(len(steps)), far[other])[0, 1] > 0.7:
            return side
    return ""


def explain(
    log: Table,
    model: str | Path,
    *,
    prompts: str | Path | None = None,
    others: Sequence[str | Path] = (),
    adapters: Sequence[str | Path] = (),
    hypotheses: Sequence[str] = (),
    compare: str | None = None,
    tokens: int = TOKENS,
    columns: dict[str, str] | None = None,
) -> Explanation:
    """What reproduces the numbers of a log: `tailrl explain`, from Python.

    The model computes a share of the log's responses in float32, alone, and under each hypothesis of the catalogue:
    other sampling settings, inputs, weights, number formats. The hypothesis that reproduces a column is the cause.

    Args:
        log: whatever `tailrl.diagnose` reads; it needs token ids.
        model: the policy's folder or its name on the hub.
        prompts: a file with the prompts, if the log has none: one a row, or a set.
        others: further folders of weights that a side may have: of a step ago, of the base model.
        adapters: folders of LoRA adapters.
        hypotheses: one's own, each `package.module:name` of a `catalogue.Hypothesis`.
        compare: "vllm", or "vllm=FOLDER" with a checkpoint of its own: where nothing reproduces the log, its hidden
            states are compared with the model's, layer by layer.
        tokens: that are computed at most: a sample grows until two samples give the same answer.
        columns: the log's names of columns, by ours, as `tailrl.diagnose` takes them.

    Raises:
        StudyError: one sentence on what is missing or wrong, and where.
    """
    parts = read_table(log, columns=columns)
    return explain_parts(
        parts,
        str(model),
        prompts=Path(prompts) if prompts else None,
        others=[str(one) for one in others],
        adapters=[str(one) for one in adapters],
        hypotheses=hypotheses,
        compare=compare,
        tokens=tokens,
    )


def explain_parts(
    parts: Iterable[tuple[str, Log]],
    model: str,
    *,
    prompts: Path | None = None,
    others: Sequence[str] = (),
    adapters: Sequence[str] = (),
    hypotheses: Sequence[str] = (),
    compare: str | None = None,
    tokens: int = TOKENS,
) -> Explanation:
    """The explanation of a log that comes in parts, each with the title of its format."""
    engine = _engine(compare, model)
    tested = (*catalogue(), *imported(hypotheses))
    log = read(parts)
    scorer = Scorer(model, others, adapters)
    notes = list(log.notes)
    kept, findings = inspect(log.responses, scorer.ends)
    log = replace(log, responses=tuple(kept))
    with _progress() as bar:
        responses, more = with_prompts(log, scorer.context.tokenizer)
        notes += more
        if not responses and prompts is not None:
            candidates = read_prompts(prompts, scorer.context.tokenizer)
            few = by_what_they_tell(log.responses)[: 2 * max(FEWEST_RESPONSES, tokens // 48)]
            few.sort(key=lambda one: one.number)
            responses, sentence = match(scorer, few, candidates, log.rows, bar.seen)
            notes.append(sentence)
        require(responses, model if not log.title else f"the log ({log.title})")
        bench = _Bench(scorer, responses, tested, bar)
        answer = _explained(bench, findings, tokens)
    if engine and answer.code == 2:
        say(f"runs {compare} beside the model, layer by layer")
        answer = replace(answer, layers=compare_layers(model, engine, bench.sample(FIRST_TOKENS).chosen))
    return replace(answer, model=model, title=log.title, rows=log.rows, notes=tuple(notes))


def _engine(compare: str | None, model: str) -> Engine | None:
    """The engine of `--compare`; raises StudyError for another name than vllm."""
    if compare is None:
        return None
    name, _, folder = compare.partition("=")
    if name != "vllm":
        raise ConfigurationError(
            f"--compare {compare}: write vllm, or vllm=FOLDER for an engine with another checkpoint"
        )
    return vllm_outputs(folder or model)


def explain_mismatch(title: str, rows: Sequence[LoggedRow], model: str) -> Explanation | None:
    """The explanation of rows whose sides differ by more than rounding in bfloat16 makes; None where they do not.

    The model computes a first sample twice, in float32 and in bfloat16. Hypotheses are tried only after that.
    """
    say("compares the difference with what rounding in bfloat16 makes")
    log = read([(title, pack(rows))])
    scorer = Scorer(model)
    with _progress() as bar:
        bench = _Bench(scorer, with_prompts(log, scorer.context.tokenizer)[0], catalogue(), bar)
        sample = bench.sample(FIRST_TOKENS)
        apart = np.abs(sample.column("sampler") - sample.column("trainer")).mean()
        if apart <= _limit(sample.rounding(AS_IT_IS, "bfloat16_logits")):
            return None
        say("recomputes the log under each hypothesis")
        answer = _explained(bench, [], TOKENS)
    return replace(answer, model=model, title=log.title, rows=log.rows)


class _Bench:
    """The responses of a log, the model and the hypotheses: samples of any size are drawn from it."""

    def __init__(
        self,
        scorer: Scorer,
        responses: Sequence[Response],
        tested: Sequence[Hypothesis],
        bar: "_Bar",
    ) -> None:
        self.scorer, self.tested, self.bar = scorer, tested, bar
        self.parts: dict[Hashable, Laboratory] = {}
        self.by_number = {one.number: one for one in responses}
        usable = [one for one in responses if one.whole_T is not None and len(one.whole_T) <= LONGEST]
        self.order = by_what_they_tell(usable)
        # A bias raises the tokens that are sampled often: each has an entry in all rows.
        self.frequent = _frequent(responses)
        self.prompts = tuple(
            dict.fromkeys(
                tuple(one.whole_T[: int(one.place_T[0])].tolist())
                for one in responses
                if one.whole_T is not None and one.place_T is not None
            )
        )
        scorer.watched |= {*self.frequent}

    def sample(self, tokens: int) -> Laboratory:
        """The first responses by what they may tell, with so many tokens; raises StudyError where there is none."""
        chosen = _first(_distinct(self.order, self.by_number), tokens)
        if not chosen:
            raise DataError("the log has no response with finite log-probs of both sides")
        for part in self.parts.values():
            part.forget_rows()  # the larger sample has rows of its own
        self.bar.begin(f"{sum(len(one.position_T) for one in chosen)} tokens", self._reading(chosen))
        return Laboratory(self.scorer, chosen, self.bar.seen, self.parts)

    def _reading(self, chosen: Sequence[Scored]) -> int:
        """Tokens that the model will read for a sample: few under each hypothesis, all under the hopeful ones."""
        forwards = sum(len(one.entry.values) for one in self.tested if one.entry.needs_forward)
        few = sum(len(one.inputs.ids) for one in _first(chosen, SCREENED_TOKENS, 2))
        return forwards * few + 2 * MOST_HOPEFUL * sum(len(one.inputs.ids) for one in chosen)

    def untried(self) -> dict[str, str]:
        """The hypotheses that cannot be tried, each with the reason."""
        context = self.scorer.context
        given = {"--other FOLDER": context.others, "--adapter FOLDER": context.adapters}
        found = {one.name: one.entry.needs for one in self.tested if one.entry.needs and not given[one.entry.needs]}
        if not any(probabilities(self.scorer.model)):
            found["train_mode"] = "the model has no dropout"
        if any(type(module).__name__.endswith("Router") for module in self.scorer.model.modules()):
            found["experts of the other side"] = "no format of logs has each token's experts"
        else:
            found |= {one.name: "the model has no experts" for one in self.tested if one.entry.reads == "experts"}
        if context.tokenizer is None:
            texts = [one for one in self.tested if one.entry.reads in ("text", "template")]
            found |= {one.name: "the model's folder has no tokenizer" for one in texts}
        elif context.template is None:
            templates = [one for one in self.tested if one.entry.reads == "template"]
            found |= {one.name: "the tokenizer has no chat template" for one in templates}
        return found


def _explained(bench: _Bench, findings: Sequence[Finding], tokens: int) -> Explanation:
    """The answer of a sample; samples grow until two give the same answer, which is more than "unexplained"."""
    answer: Explanation | None = None
    size = min(FIRST_TOKENS, tokens)
    samples: list[int] = []
    while True:
        sample = bench.sample(size)
        if answer is not None and len(sample.sequence_T) == answer.tokens:
            break  # the log has no more
        later = _of_sample(bench, sample, findings)
        samples.append(later.tokens)
        stable = answer is not None and _agree(answer, later)
        answer = replace(later, stable=stable, samples=tuple(samples))
        is_doubtful = later.code == 2 or any(side.is_doubtful for side in later.sides.values())
        if size >= tokens or (stable and not is_doubtful):
            break
        size = min(2 * size, tokens)
    return answer


def _agree(one: Explanation, two: Explanation) -> bool:
    """Whether two samples name the same causes with the same numbers, and leave the same unexplained."""
    if {finding.name for finding in one.findings} != {finding.name for finding in two.findings}:
        return False
    if (one.code, one.pinned_side) != (two.code, two.pinned_side):
        return False
    return all(_same_world(one.sides[side].world, two.sides[side].world) for side in SIDES)


def _same_world(one: World, two: World) -> bool:
    return len(one) == len(two) and all(any(_same(choice, other, SAME) for other in two) for choice in one)


def _of_sample(bench: _Bench, sample: Laboratory, findings: Sequence[Finding]) -> Explanation:
    """What one sample of the log says."""
    untried = bench.untried()
    given = [one for one in bench.tested if one.name not in untried]
    tested = tuple(_expanded(given, sample, bench.frequent))
    steps = _by_step(sample)
    found = list(findings)
    sides: dict[str, Side] = {}
    for side in SIDES:
        place = _place(side, sample)
        found += [place] if place else []
        if sides and np.array_equal(sample.column("sampler"), sample.column("trainer")):
            sides[side] = replace(sides["sampler"], side=side)  # a copy has the same answer
            continue
        sides[side] = _explain_side(side, sample, tested, bench.prompts, steps, bool(place))
        if not sides[side].is_explained and any(probabilities(bench.scorer.model)) and (noise := left_on(side, sample)):
            found.append(noise)
            sides[side] = replace(sides[side], world=AS_IT_IS, is_placed=True)
    sides = _without_chance(sides)
    return Explanation(
        model="",
        title="",
        sampler=sides["sampler"],
        trainer=sides["trainer"],
        findings=tuple(found),
        steps=steps,
        tried=len({*(one.name for one in bench.tested), TRAIN_MODE.name} - untried.keys()),
        untried=tuple(untried.items()),
        tokens=len(sample.sequence_T),
        responses=len(sample.chosen),
        rows=0,
        notes=(),
    )


def _without_chance(sides: dict[str, Side]) -> dict[str, Side]:
    """The sides, without changes that both have and that reproduce neither.

    Both columns are then another model's. A temperature or the most probable tokens may take most of a large difference
    away, and none of them is what happened.
    """
    first, second = ({choice.hypothesis.name for choice in side.world} for side in sides.values())
    if not first & second or any(side.after <= side.limit for side in sides.values()):
        return sides
    return {
        name: replace(
            side,
            world=AS_IT_IS,
            after=side.before,
            follows=False,
            others=((_words(side.world), side.after), *side.others)[:5],
        )
        for name, side in sides.items()
    }


def _expanded(tested: Iterable[Hypothesis], sample: Laboratory, frequent: Sequence[int]) -> Iterator[Hypothesis]:
    """The hypotheses; one on a token becomes one for each token that it could concern."""
    for hypothesis in tested:
        if hypothesis.entry.each is None:
            yield hypothesis
            continue
        for token in _biased_tokens(sample, frequent):
            text = sample.scorer.context.tokenizer.decode([token]) if sample.scorer.context.tokenizer else ""
            named = f"{token} {text!r}".strip().replace("{", "{{").replace("}", "}}")
            entry = hypothesis.entry.model_copy(
                update={"words": hypothesis.entry.words.format(value="{value}", token=named), "each": None}
            )
            yield Hypothesis(f"{hypothesis.name}_{token}", entry, hypothesis.apply(token))


def _biased_tokens(sample: Laboratory, frequent: Sequence[int]) -> list[int]:
    """The end tokens, those with the most probability, and the frequent ones."""
    rows = sample.rows(AS_IT_IS)
    assert rows is not None
    probability_TE = (rows.value_TE + rows.weight_TE).softmax(-1)
    is_token_TE = rows.id_TE >= 0
    mass_V = rows.id_TE[is_token_TE].bincount(probability_TE[is_token_TE])
    likely = mass_V.argsort(descending=True)[:BIASED_TOKENS].tolist()
    return list(dict.fromkeys([*rows.ends, *likely, *frequent]))


def _frequent(responses: Sequence[Response]) -> list[int]:
    """The tokens that responses have most often."""
    counted: Counter[int] = Counter()
    for response in responses:
        assert response.whole_T is not None and response.place_T is not None
        counted.update(response.whole_T[response.place_T].tolist())
    return [token for token, _ in counted.most_common(BIASED_TOKENS)]


def _distinct(order: Iterable[Response], by_number: dict[int, Response]) -> Iterator[Scored]:
    """The responses with finite numbers.

    The same tokens with the same numbers count once: again they tell nothing new, and would make the error smaller.
    """
    seen: set[tuple[bytes, ...]] = set()
    for response in order:
        columns = (response.whole_T, response.sampler_T, response.trainer_T)
        content = tuple(np.asarray(column).tobytes() for column in columns)
        if content not in seen and np.isfinite(response.sampler_T + response.trainer_T).any():
            yield scored(response, by_number)
        seen.add(content)


def _by_step(laboratory: Laboratory) -> tuple[tuple[float, int, float, float], ...]:
    """Of each logged step: responses and both sides' distance from the model."""
    step_S = np.array([one.response.step for one in laboratory.chosen])
    found = []
    for step in np.unique(step_S[np.isfinite(step_S)]):
        own_T = step_S[laboratory.sequence_T] == step
        far = [float(np.mean(np.abs(laboratory.column(side) - laboratory.plain_logprobs)[own_T])) for side in SIDES]
        found.append((float(step), int((step_S == step).sum()), far[0], far[1]))
    return tuple(found)


def _explain_side(
    side: str,
    whole: Laboratory,
    tested: Sequence[Hypothesis],
    prompts: Sequence[tuple[int, ...]],
    steps: Sequence[Any],
    is_placed: bool,
) -> Side:
    court = Court(whole, side)
    before, size = court.residual(AS_IT_IS), whole.rounding(AS_IT_IS)
    if before <= max(SMALL * size, LEAST_SCALE) or is_placed or _pinned(steps, size):
        largest = whole.rounding(AS_IT_IS, "bfloat16_logits")
        is_rounded = before > max(EXACT * size, LEAST_SCALE) and not is_placed
        nearest = nearest_rounding(court, tested) if is_rounded else AS_IT_IS
        return Side(side, before, before, largest, AS_IT_IS, nearest, (), is_placed=is_placed)
    chosen, share = _bad_ones(whole, court, size)
    small = whole.part(_first(chosen, SEARCHED_TOKENS))
    screen = Court(whole.part(_first(chosen, SCREENED_TOKENS, 2)), side)
    found = search(Court(small, side, screen=screen), tested)
    if share < 1:
        whole = whole.part(chosen)
        court = Court(whole, side)
        before = court.residual(AS_IT_IS)
    left = court.residual(ordered([*found.world, *found.benign]))
    if len(whole.sequence_T) > len(small.sequence_T) and left > _limit(whole.rounding(found.world)):
        # More than rounding, and few tokens do not tell by what: all of them may.
        found = search(Court(whole, side, court.scale_T, screen), tested)
    if court.residual(ordered([*found.world, *found.benign])) > _limit(whole.rounding(found.world)):
        moved = _of_another_request(side, whole, prompts)
        if moved is not None:
            moved_court = Court(moved, side)
            rest = [h for h in tested if h.name == "prompt_of_other" or h.entry.benign or not h.entry.needs_forward]
            other = search(moved_court, rest)
            if other.world and moved_court.residual(other.world) < court.residual(found.world):
                whole, court, found = moved, moved_court, other
                before = court.residual(AS_IT_IS)
    world, benign = _confirmed(court, found)
    coarse = AS_IT_IS
    if court.residual(ordered([*world, *benign])) > ENOUGH * max(whole.rounding(world), LEAST_ROUNDING):
        coarse = followed_format(court, screen, world, tested)
        world = ordered([*world, *coarse])
    named = {choice.hypothesis.name for choice in world}
    # The answer's own hypotheses, with numbers from fewer tokens, are no others.
    others = tuple(
        (_words(one.world), one.residual)
        for one in found.others
        if not {choice.hypothesis.name for choice in one.world} <= named
    )[:5]
    after = min(court.residual(world), court.residual(ordered([*world, *benign])))
    largest = whole.rounding(world, "bfloat16_logits")
    return Side(side, before, after, largest, world, benign, others, share, follows=bool(coarse))


def _of_another_request(side: str, whole: Laboratory, prompts: Sequence[tuple[int, ...]]) -> Laboratory | None:
    """The first responses, each with its best prompt among those of the log; None where its own is the best."""
    chosen = sorted(_first(whole.chosen, SEARCHED_TOKENS), key=lambda one: -one.response.badness)
    few = len(_first(chosen, SCREENED_TOKENS, 2))
    moved = with_other_prompts(whole.scorer, chosen, side, prompts, few) if len(prompts) > 1 else []
    return whole.part(moved) if moved else None


def _place(side: str, whole: Laboratory) -> Finding | None:
    far_T = np.minimum(np.abs(whole.column(side) - whole.plain_logprobs), 50)
    return at_an_end(side, whole.chosen, far_T, _limit(whole.rounding(AS_IT_IS)))


def _bad_ones(whole: Laboratory, court: Court, size: float) -> tuple[list[Scored], float]:
    """The responses that are far from the model, where others are near it, and their share; else all."""
    far_T = np.minimum(np.abs(court.column_T - whole.plain_logprobs), 5)
    far_S = np.bincount(whole.sequence_T, far_T) / np.bincount(whole.sequence_T)
    bad_S, good_S = far_S > BAD * max(size, LEAST_ROUNDING), far_S < GOOD * max(size, LEAST_ROUNDING)
    if bad_S.sum() < 3 or good_S.sum() < 3 or (bad_S | good_S).mean() < 0.8:
        return list(whole.chosen), 1.0
    return [one for one, bad in zip(whole.chosen, bad_S, strict=True) if bad], float(bad_S.mean())


def _first(chosen: Iterable[Scored], tokens: int, fewest: int = FEWEST_RESPONSES) -> list[Scored]:
    """The first responses with so many tokens, and no fewer responses than are needed for an error."""
    found: list[Scored] = []
    for one in chosen:
        found.append(one)
        if sum(len(two.position_T) for two in found) >= tokens and len(found) >= fewest:
            break
    return found


def _confirmed(court: Court, found: Found) -> tuple[World, World]:
    """The explanation, its numbers fitted once more on all tokens; without what these do not confirm."""
    world = refitted(court, found.world)
    if world:
        judged = court.judge(world, found.benign if court.judge(found.benign) else AS_IT_IS)
        if judged is None or judged.clear < 2:
            return AS_IT_IS, found.benign
    return world, found.benign


def _words(world: World) -> str:
    return ", ".join(choice.words for choice in world)


class _Bar:
    """A bar over the tokens that the model reads; a guess of their number, since hopeless hypotheses are dropped."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.task = progress.add_task("reading the log", total=None)

    def begin(self, words: str, tokens: int) -> None:
        self.progress.reset(self.task, description=words, total=tokens)

    def seen(self, tokens: int) -> None:
        self.progress.advance(self.task, tokens)


@contextmanager
def _progress() -> Iterator[_Bar]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:,.0f} tokens read"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield _Bar(progress)

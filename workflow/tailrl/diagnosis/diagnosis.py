"""The diagnosis of a log: what was measured, what caused it, what each remedy would do, and the worst responses."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Protocol

from tailrl.diagnosis.advice import Advice, advise, framework_of
from tailrl.diagnosis.causes import NAMED, Cause, agrees, find_causes
from tailrl.diagnosis.exact_checks import ExactChecks, Fault
from tailrl.diagnosis.lags import LagsAndDepths, SizeRow
from tailrl.diagnosis.left_out import LeftOut
from tailrl.diagnosis.log import Log, sound
from tailrl.diagnosis.measure import Measured, measure
from tailrl.diagnosis.parts import Sample, part_of
from tailrl.diagnosis.replay import Replay, Replayed
from tailrl.diagnosis.responses import Response, Worst
from tailrl.diagnosis.sure import settled
from tailrl.diagnosis.tables import read_table
from tailrl.diagnosis.where import NEARLY_ALL, Place, find_places


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a log tells.

    Attributes:
        measured: the numbers.
        causes: the most probable first; empty if there is no mismatch to explain, or if none can be told. Where whole
            responses hold most of the mismatch, they are the causes there.
        remedies: each remedy at each threshold, replayed on the log's tokens.
        responses: the worst responses, for the token explorer.
        faults: what the log itself has wrong, told exactly.
        notes: a sentence on each kind of row and file that was left out.
        lags, depths: the sizes by lag and by depth: see `lags.py`.
        places: where the mismatch is, if it is concentrated.
        elsewhere: the causes at the other tokens, outside of `focus`.
        sample: the sound tokens of the log, or of every n-th response of a large one.
        chosen_framework: the reader's choice, as `replay.yaml` names it; empty: none.
    """

    measured: Measured
    causes: tuple[Cause, ...]
    remedies: tuple[Replayed, ...]
    responses: tuple[Response, ...]
    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()
    lags: tuple[SizeRow, ...] = ()
    depths: tuple[SizeRow, ...] = ()
    places: tuple[Place, ...] = ()
    elsewhere: tuple[Cause, ...] = ()
    chosen_framework: str = ""
    sample: Log | None = None

    @property
    def framework(self) -> str:
        """The framework whose lines come first: the chosen one, or else the log's."""
        return self.chosen_framework or framework_of(self.measured)

    @property
    def focus(self) -> Place | None:
        """The place whose causes are told apart from those elsewhere; None: the whole log is one."""
        return focus_of(self.places)

    @property
    def advice(self) -> Advice:
        """What to do."""
        return advise(self.measured, self.causes, self.remedies, self.faults, self.focus, self.framework)


def diagnose_parts(parts: Iterable[tuple[str, Log]], left_out: LeftOut | None = None) -> Diagnosis:
    """The diagnosis of a log that comes in parts, each with the title of its format. One pass, bounded memory.

    `left_out` is what the reader of the parts leaves out.
    """
    measured, replay, worst = Measured(), Replay(), Worst()
    checks, sizes, sample = ExactChecks(), LagsAndDepths(), Sample()
    for title, log in parts:
        measured.add(title, log)
        replay.add(log)
        worst.add(log)
        checks.add(log)
        sizes.add(log)
        sample.add(log)
    chosen = sample.log()
    chosen = None if chosen is None else part_of(chosen, sound(chosen))
    places, causes, elsewhere = _by_place(measured, chosen)
    return Diagnosis(
        measured=measured,
        causes=causes,
        remedies=replay.table(),
        responses=worst.responses(),
        faults=checks.faults(),
        lags=sizes.lags(),
        depths=sizes.depths(),
        notes=left_out.sentences() if left_out else (),
        places=places,
        elsewhere=elsewhere,
        sample=chosen,
    )


class HasBatches(Protocol):
    """A table or a dataset of pyarrow; a table of pandas is an iterable."""

    def to_batches(self) -> Iterable[object]:
        """Its rows, in parts."""


Table = str | PathLike[str] | Mapping[str, object] | Iterable[object] | HasBatches


def focus_of(places: Sequence[Place]) -> Place | None:
    """The first place of whole responses, or of tokens that hold nearly all of the mismatch.

    Tokens that already occurred are none: a penalty on them moves all others too.
    """
    apart = [place for place in places if place.grouping not in ("seen", "new", "sides")]
    return next((place for place in apart if place.whole or place.share.mean >= NEARLY_ALL), None)


def _by_place(measured: Measured, log: Log | None) -> tuple[tuple[Place, ...], tuple[Cause, ...], tuple[Cause, ...]]:
    """The places, the causes there or of the whole log, and those elsewhere."""
    if log is None or agrees(measured.signals):
        return (), find_causes(measured), ()
    places = find_places(log)
    focus = focus_of(places)
    if focus is None:
        return places, find_causes(measured), ()
    there, elsewhere = (measure([("", part_of(log, chosen_T))]) for chosen_T in (focus.chosen_T, ~focus.chosen_T))
    faults = tuple(cause for cause in find_causes(measured) if cause.words.fault)
    shaped = [cause for cause in find_causes(there if focus.whole else measured) if not cause.words.fault]
    if focus.cause and "mask" not in [fault.name for fault in faults]:  # a filling has a place of its own
        shaped = _of_place(focus, shaped)
    elif not focus.whole:
        shaped = []
    return places, (*faults, *shaped), find_causes(elsewhere)


def _of_place(place: Place, shaped: Sequence[Cause]) -> list[Cause]:
    """The cause that the place tells; those that the shape of the mismatch tells share what is left."""
    told = settled().places[place.cause]
    looks = [f"There it looks like {one.title} ({one.sure:.0%})." for one in shaped[:1]]
    same = sum(one.sure for one in shaped if one.name == place.cause)
    first = Cause(place.cause, told + (1 - told) * same, (place.sentence(), *looks))
    rest = [replace(one, sure=(1 - told) * one.sure) for one in shaped if one.name != place.cause]
    return sorted([first, *(one for one in rest if one.sure >= NAMED)], key=lambda one: -one.sure)


def diagnose(table: Table, columns: Mapping[str, str] | None = None) -> Diagnosis:
    """What a run's log of sampled tokens tells of its training-inference mismatch: `tailrl diagnose`, from Python.

    Args:
        table: one response a row. A table of pandas or pyarrow, a dictionary of columns, an iterable of
            dictionaries, or the path of a file or folder, or several. Needed are each token's log-probs in nats as
            lists, `sampler_logprobs` and `trainer_logprobs`; docs/how-to/log-schema.md has the optional columns. A
            framework's own names are known too. Columns may be rectangles [B, T] with a `mask`, arrays or tensors.
        columns: other names, ours to the table's, such as `{"sampler": "lp_vllm", "trainer": "lp_fsdp"}`.

    Returns:
        `measured` (numbers with intervals: `tailrl.diagnosis.metrics.named_metrics`), `causes`, `remedies` (one
        `Replayed` for each threshold), `responses` (the worst), `advice` and `notes` (what was left out).

    Raises:
        StudyError: one sentence on what is missing or wrong, and where. Odd log-probs (NaN, above 0) are no error but
            findings: `measured.odd`.

    Example:
        >>> found = diagnose({"sampler_logprobs": [[-1.0, -0.1]], "trainer_logprobs": [[-1.01, -0.1]]})
        >>> found.measured.tokens, found.advice.kind
        (2, 'none')
    """
    left_out = LeftOut()
    return diagnose_parts(read_table(table, left_out, columns), left_out)

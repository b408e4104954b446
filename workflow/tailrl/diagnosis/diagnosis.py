"""The diagnosis of a log: what was measured, what caused it, what each remedy would do, and the worst responses."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Protocol

from tailrl.diagnosis.advice import Advice, advise
from tailrl.diagnosis.causes import Cause, find_causes
from tailrl.diagnosis.exact_checks import ExactChecks, Fault
from tailrl.diagnosis.lags import LagsAndDepths, SizeRow
from tailrl.diagnosis.left_out import LeftOut
from tailrl.diagnosis.log import Log
from tailrl.diagnosis.measure import Measured
from tailrl.diagnosis.replay import Replay, Replayed
from tailrl.diagnosis.responses import Response, Worst
from tailrl.diagnosis.tables import read_table


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a log tells.

    Attributes:
        measured: the numbers.
        causes: the most probable first; empty if there is no mismatch to explain.
        remedies: each remedy at each threshold, replayed on the log's tokens.
        responses: the worst responses, for the token explorer.
        faults: what the log itself has wrong, told exactly.
        notes: a sentence on each kind of row and file that was left out.
        lags, depths: the sizes by lag and by depth: see `lags.py`.
    """

    measured: Measured
    causes: tuple[Cause, ...]
    remedies: tuple[Replayed, ...]
    responses: tuple[Response, ...]
    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()
    lags: tuple[SizeRow, ...] = ()
    depths: tuple[SizeRow, ...] = ()

    @property
    def advice(self) -> Advice:
        """Which remedy to use, if any."""
        return advise(self.measured, self.causes, self.remedies)


def diagnose_parts(parts: Iterable[tuple[str, Log]], left_out: LeftOut | None = None) -> Diagnosis:
    """The diagnosis of a log that comes in parts, each with the title of its format. One pass, bounded memory.

    `left_out` is what the reader of the parts leaves out.
    """
    measured, replay, worst = Measured(), Replay(), Worst()
    checks, sizes = ExactChecks(), LagsAndDepths()
    for title, log in parts:
        measured.add(title, log)
        replay.add(log)
        worst.add(log)
        checks.add(log)
        sizes.add(log)
    return Diagnosis(
        measured=measured,
        causes=find_causes(measured),
        remedies=replay.table(),
        responses=worst.responses(),
        faults=checks.faults(),
        lags=sizes.lags(),
        depths=sizes.depths(),
        notes=left_out.sentences() if left_out else (),
    )


class HasColumns(Protocol):
    """A table of pandas or pyarrow."""

    @property
    def columns(self) -> object:
        """Its columns or their names."""


class HasBatches(Protocol):
    """A dataset of pyarrow."""

    def to_batches(self) -> Iterable[object]:
        """Its rows, in parts."""


Table = str | PathLike[str] | Mapping[str, object] | Iterable[object] | HasColumns | HasBatches


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

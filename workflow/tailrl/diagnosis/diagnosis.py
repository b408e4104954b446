"""The diagnosis of a log: what was measured, what caused it, what each remedy would do, and the worst responses."""

from collections.abc import Iterable
from dataclasses import dataclass

from tailrl.diagnosis.advice import Advice, advise
from tailrl.diagnosis.causes import Cause, find_causes
from tailrl.diagnosis.log import Log
from tailrl.diagnosis.measure import Measured
from tailrl.diagnosis.replay import Replay, Replayed
from tailrl.diagnosis.responses import Response, Worst


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a log tells.

    Attributes:
        measured: the numbers.
        causes: the most probable first; empty if there is no mismatch to explain.
        remedies: each remedy at each threshold, replayed on the log's tokens.
        responses: the worst responses, for the token explorer.
    """

    measured: Measured
    causes: tuple[Cause, ...]
    remedies: tuple[Replayed, ...]
    responses: tuple[Response, ...]

    @property
    def advice(self) -> Advice:
        """Which remedy to use, if any."""
        return advise(self.measured, self.causes, self.remedies)


def diagnose_parts(parts: Iterable[tuple[str, Log]]) -> Diagnosis:
    """The diagnosis of a log that comes in parts, each with the title of its format. One pass, bounded memory."""
    measured, replay, worst = Measured(), Replay(), Worst()
    for title, log in parts:
        measured.add(title, log)
        replay.add(log)
        worst.add(log)
    return Diagnosis(measured, find_causes(measured), replay.table(), worst.responses())

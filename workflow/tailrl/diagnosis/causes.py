"""What caused a mismatch: rules on what was measured, each with its evidence and how sure it is."""

from dataclasses import dataclass

from tailrl.diagnosis.measure import Measured


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause of a mismatch.

    Attributes:
        name: its key in `causes.yaml`, which has its words and what to do.
        sure: the probability that it is the cause, calibrated on logs of known cause.
        evidence: sentences with the numbers that speak for it.
    """

    name: str
    sure: float
    evidence: tuple[str, ...]


def find_causes(measured: Measured) -> tuple[Cause, ...]:
    """The causes that fit, the most probable first."""
    del measured
    return ()

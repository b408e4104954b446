"""A study in parts, each with a warm start of its own, which is the unit of repetition."""

from collections.abc import Mapping, Sequence

import numpy as np

Numbers = Mapping[str, Sequence[float]]
"""A number of each arm's runs in one part, one for each seed."""

NAIVE, CONTROL = "naive", "control"
"""What an arm's name ends with: <cause>_naive, <cause>_control."""


def differences(parts: Sequence[Numbers], arm: str, reference: str) -> dict[int, float]:
    """The arm's mean over seeds less the reference's, of each part that has both, by the part's place."""
    both = {place: part for place, part in enumerate(parts) if {arm, reference} <= part.keys()}
    return {place: float(np.mean(part[arm]) - np.mean(part[reference])) for place, part in both.items()}

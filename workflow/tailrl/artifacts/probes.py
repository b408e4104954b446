"""What the probes' run.json hold; `records` reads and writes them. No run depends on what is said here."""

from tailrl.artifacts.records import Count, JobRecord
from tailrl.config.distributions import Distributions
from tailrl.config.gradients import Gradients


class DistributionsRecord(JobRecord):
    """A comparison of an engine's distributions with the trainer's; `tailrl.probes.distributions` says what its numbers
    are."""

    kind = Distributions

    vocabulary: Count
    tokens: Count
    edges: list[float]
    head_below: float
    tail_from: float
    sampler_self_test: float | None


class GradientsRecord(JobRecord):
    """A probe of the arms' gradient estimators."""

    kind = Gradients

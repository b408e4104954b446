"""The weights on their way from the trainer to the engine: as they are, or as old and as coarse as the dial says."""

from collections import deque
from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from tailrl.disturbance import round_weights
from tailrl.policy import named_weights
from tailrl.rollout import Sampler
from tailrl.settings import Disturbance


class Handover:
    """Hands a sampler the policy's weights of `staleness` calls ago, or of the first call where there were fewer."""

    def __init__(self, sampler: Sampler, disturbance: Disturbance) -> None:
        self.sampler = sampler
        self.disturbance = disturbance
        self.past: deque[list[tuple[str, Tensor]]] = deque(maxlen=disturbance.staleness + 1)

    def __call__(self, model: PreTrainedModel) -> None:
        """Once before the first step and once after every step; raises StudyError for weights beyond the dtype."""
        weights = round_weights(named_weights(model), self.disturbance.weights)
        if self.disturbance.staleness:
            # Copies: the optimizer changes the tensors in place.
            self.past.append([(name, weight.clone()) for name, weight in weights])
            weights = iter(self.past[0])
        self.sampler.load_weights(weights)

    @property
    def delayed(self) -> Sequence[tuple[str, Tensor]] | None:
        """The engine's old weights, where the trainer takes its gradient at them too; None where it does not."""
        return self.past[0] if self.disturbance.staleness and self.disturbance.side == "both" else None

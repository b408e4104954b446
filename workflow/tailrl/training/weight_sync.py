"""The weights on their way from the trainer to the engine: as they are, or as old and as coarse as the dial says."""

from collections import deque
from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from tailrl.config.sampler import Disturbance
from tailrl.model.policy import named_weights
from tailrl.objective.disturbance import round_weights
from tailrl.rollout import Sampler

Weights = list[tuple[str, Tensor]]


class Handover:
    """Hands a sampler the policy's weights of `staleness` calls ago, or of the first call where there were fewer.

    Attributes:
        past: copies of the weights of the last calls, the oldest first; nothing where the weights are fresh.
    """

    def __init__(self, sampler: Sampler, disturbance: Disturbance) -> None:
        self.sampler = sampler
        self.disturbance = disturbance
        self.past: deque[Weights] = deque(maxlen=disturbance.staleness + 1)

    def __call__(self, model: PreTrainedModel) -> None:
        """Once before the first step and once after every step; raises StudyError for weights beyond the dtype."""
        if self.disturbance.staleness:
            # Copies: the optimizer changes the tensors in place.
            rounded = round_weights(named_weights(model), self.disturbance.weights)
            self.past.append([(name, weight.clone()) for name, weight in rounded])
        self.again(model)

    def again(self, model: PreTrainedModel) -> None:
        """What the last call handed over, once more: for an engine that was started anew."""
        fresh = round_weights(named_weights(model), self.disturbance.weights)
        self.sampler.load_weights(iter(self.past[0]) if self.past else fresh)

    @property
    def delayed(self) -> Sequence[tuple[str, Tensor]] | None:
        """The engine's old weights, where the trainer takes its gradient at them too; None where it does not."""
        return self.past[0] if self.disturbance.staleness and self.disturbance.side == "both" else None

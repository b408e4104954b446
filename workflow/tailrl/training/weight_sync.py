"""The weights from the trainer to the engine: unchanged, or as stale and as rounded as the disturbance says."""

from collections import deque
from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from tailrl.config.sampler import Disturbance
from tailrl.model.policy import named_weights
from tailrl.objective.disturbance import round_weights
from tailrl.rollout import Sampler


class WeightSync:
    """Loads the policy's weights of `staleness` calls ago into a sampler, or the first call's if there were fewer."""

    def __init__(self, sampler: Sampler, disturbance: Disturbance) -> None:
        self.sampler = sampler
        self.disturbance = disturbance
        # Copies of the last calls' weights, oldest first; empty without staleness.
        self.past: deque[list[tuple[str, Tensor]]] = deque(maxlen=disturbance.staleness + 1)

    def __call__(self, model: PreTrainedModel) -> None:
        """Call once before the first step and once after every step; raises StudyError for weights beyond the dtype."""
        if self.disturbance.staleness:
            # Copies, since the optimizer changes the tensors in place; not on a GPU, which has no room for policies.
            rounded = round_weights(named_weights(model), self.disturbance.weights)
            self.past.append([(name, weight.to("cpu", copy=True)) for name, weight in rounded])
        self.again(model)

    def again(self, model: PreTrainedModel) -> None:
        """Load the last call's weights once more, into a restarted engine."""
        fresh = round_weights(named_weights(model), self.disturbance.weights)
        self.sampler.load_weights(iter(self.past[0]) if self.past else fresh)

    @property
    def delayed(self) -> Sequence[tuple[str, Tensor]] | None:
        """The engine's stale weights where the trainer's gradient is taken at them too (`side: both`), else None."""
        return self.past[0] if self.disturbance.staleness and self.disturbance.side == "both" else None

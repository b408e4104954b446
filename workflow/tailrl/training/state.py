"""The state of a run: everything that a step changes, as one thing that can be written down and taken up to the bit.

No random state is among it: the order of the problems and every random stream are functions of the seed, the step and
the place in the batch (`seed_libraries` makes the generators of the libraries so too).
"""

import random
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tailrl.objective.adaptive_rho import Thresholds
from tailrl.runtime import distributed
from tailrl.runtime.distributed import sharded_like
from tailrl.training.kept_data import KeptMetrics, KeptTokens
from tailrl.training.weight_sync import Handover

NUMBERS = ("step", "skipped_in_a_row", "resumed", "startup_seconds", "wall_seconds")


@dataclass(slots=True)
class RunState:
    """Attributes:
    model: the policy that is trained.
    optimizer: its optimizer; the rate is a function of the step.
    hand_over: the weights that a stale engine still waits for.
    thresholds: the adapted thresholds.
    metrics: those of every step.
    tokens: the per-token records of the steps that are kept.
    step: steps done, and the number of the next one.
    skipped_in_a_row: steps until now, without a break, whose update was skipped.
    resumed: the steps at which the run went on after an interruption.
    startup_seconds, wall_seconds: spent until now, in earlier processes too; what an interruption lost is not in.
    """

    model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    hand_over: Handover
    thresholds: Thresholds
    metrics: KeptMetrics
    tokens: KeptTokens
    step: int = 0
    skipped_in_a_row: int = 0
    resumed: list[int] = field(default_factory=list)
    startup_seconds: float = 0.0
    wall_seconds: float = 0.0

    def tensors(self) -> dict[str, Tensor]:
        """The large part, by name, whole, on the first rank; every rank must ask. The live tensors where they need no
        copy."""
        found = {f"model.{name}": tensor.detach() for name, tensor in _of_model(self.model).items()}
        for index, values in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{index}.{name}": tensor for name, tensor in values.items()}
        for age, weights in enumerate(self.hand_over.past):
            found |= {f"past.{age}.{name}": tensor for name, tensor in weights}
        return {name: tensor.contiguous() for name, tensor in distributed.on_first(found.items()).items()}

    def numbers(self) -> dict[str, Any]:
        """The small part, ready for JSON; brings what was kept to the disk, since it is named in it."""
        small = {name: getattr(self, name) for name in NUMBERS}
        kept = {"metrics": self.metrics.settle(), "tokens": self.tokens.state()}
        return small | kept | {"thresholds": self.thresholds.state()}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Take up what `tensors` and `numbers` gave, in a run of the same settings; adds the step to `resumed`.

        How many ranks there were, and how many there are, is all the same.

        Raises:
            StudyError: metrics or tokens that were kept are not there any more; nothing is changed.
            KeyError, RuntimeError, TypeError, ValueError: it is the state of another kind of run; likewise.
        """
        groups: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "past": {}}
        for name, tensor in tensors.items():
            group, _, rest = name.partition(".")
            groups[group][rest] = tensor
        own, given = _of_model(self.model), groups["model"]
        # Before anything is changed: a state is taken up whole or not at all.
        if {n: t.shape for n, t in own.items()} != {n: t.shape for n, t in given.items()}:
            raise ValueError("its policy has other weights")
        state, past = _by_number(groups["optimizer"]), _by_number(groups["past"])
        parameters = dict(enumerate(parameter for g in self.optimizer.param_groups for parameter in g["params"]))
        for index, values in state.items():
            # The count of steps is a single number, and no share of anything.
            state[index] = {n: sharded_like(t, parameters[index]) if t.ndim else t for n, t in values.items()}
        small = {name: numbers[name] for name in NUMBERS}
        lines, kept = self.metrics.check(numbers["metrics"]), self.tokens.check(numbers["tokens"])
        copy(self.thresholds).restore(numbers["thresholds"])
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state})
        for name, tensor in own.items():
            tensor.copy_(sharded_like(given[name], tensor))
        self.hand_over.past.clear()
        self.hand_over.past.extend(list(past[age].items()) for age in sorted(past))
        self.thresholds.restore(numbers["thresholds"])
        self.metrics.restore(lines)
        self.tokens.checksums = kept
        for name, number in small.items():
            setattr(self, name, number)
        self.resumed = [*self.resumed, self.step]


def seed_libraries(seed: int) -> None:
    """Seeds the generators that a library might draw from by itself: a dropout in the policy, for one."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def _of_model(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters and buffers, each once, whatever is tied."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _by_number(tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """`3.name` in the third group, by what follows the point."""
    groups: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        number, _, rest = name.partition(".")
        groups.setdefault(int(number), {})[rest] = tensor
    return groups

"""The state of a run: everything that a step changes, saved and restored to the bit.

It holds no random state. The order of the problems and every random stream are functions of the seed, the step and the
index in the batch; `seed_libraries` seeds the libraries' generators the same way.
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
from tailrl.training.checkpoint_files import Sizes
from tailrl.training.kept_data import KeptMetrics, KeptTokens
from tailrl.training.weight_sync import WeightSync

SCALARS = ("step", "skipped_in_a_row", "resumed", "startup_seconds", "wall_seconds")


@dataclass(slots=True)
class RunState:
    """Everything that a step changes."""

    model: PreTrainedModel  # the trained policy
    optimizer: torch.optim.Optimizer  # its optimizer; the learning rate is a function of the step
    weight_sync: WeightSync  # has the weights that a stale engine still waits for
    thresholds: Thresholds  # the adapted thresholds
    metrics: KeptMetrics  # of every step
    tokens: KeptTokens  # the per-token records of the kept steps
    step: int = 0  # steps done, which is the number of the next step
    skipped_in_a_row: int = 0  # the last steps in a row whose update was skipped
    resumed: list[int] = field(default_factory=list)  # the steps at which the run resumed after an interruption
    # So far, earlier processes included, but not what an interruption lost.
    startup_seconds: float = 0.0
    wall_seconds: float = 0.0

    def tensors(self) -> dict[str, Tensor]:
        """The state's tensors by name, uncopied where possible, sharded where the run's own are."""
        found = {f"model.{name}": tensor.detach() for name, tensor in _of_model(self.model).items()}
        for index, values in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{index}.{name}": tensor for name, tensor in values.items()}
        for age, weights in enumerate(self.weight_sync.past):
            found |= {f"past.{age}.{name}": tensor for name, tensor in weights}
        return {name: tensor.contiguous() for name, tensor in found.items()}

    def blank(self, sizes: Sizes) -> dict[str, Tensor]:
        """Empty tensors for a saved state of these sizes, sharded as this run's own are.

        Raises:
            IndexError, ValueError: the state is of another kind of run.
        """
        own = _of_model(self.model)
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        given = {name.removeprefix("model."): size for name, (size, _) in sizes.items() if name.startswith("model.")}
        if {name: tensor.shape for name, tensor in own.items()} != given:
            raise ValueError("its policy has other weights")
        found = {}
        for name, (size, dtype) in sizes.items():
            like: Tensor | None = None
            match name.split("."):
                case ["model", *rest]:
                    like = own[".".join(rest)]
                case ["optimizer", index, _]:
                    like = parameters[int(index)]
                case ["past", *_]:
                    pass  # whole on every rank
                case _:
                    raise ValueError(f"{name} is no tensor of a run")
            # The count of the optimizer's steps is a single number, which is not sharded.
            if like is None or like.shape != size:
                found[name] = torch.empty(size, dtype=dtype)
            else:
                found[name] = torch.empty_like(like, dtype=dtype)
        return found

    def numbers(self) -> dict[str, Any]:
        """The state's numbers, for JSON; flushes the kept metrics, to which they refer, to the disk."""
        small = {name: getattr(self, name) for name in SCALARS}
        kept_data = {"metrics": self.metrics.settle(), "tokens": self.tokens.state()}
        return small | kept_data | {"thresholds": self.thresholds.state()}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Restore what `tensors` and `numbers` returned, in a run of the same settings; adds the step to `resumed`.

        The tensors are sharded as this run's own are: their places are from `blank`.

        Raises:
            StudyError: kept metrics or tokens are missing; nothing is changed.
            KeyError, TypeError, ValueError: the state is of another kind of run; nothing is changed.
        """
        groups: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "past": {}}
        for name, tensor in tensors.items():
            group, _, rest = name.partition(".")
            groups[group][rest] = tensor
        state, past = _by_number(groups["optimizer"]), _by_number(groups["past"])
        # Checks come before any change: a state is restored whole or not at all.
        small = {name: numbers[name] for name in SCALARS}
        lines, checksums = self.metrics.check(numbers["metrics"]), self.tokens.check(numbers["tokens"])
        copy(self.thresholds).restore(numbers["thresholds"])
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state})
        for name, tensor in _of_model(self.model).items():
            tensor.copy_(groups["model"][name])
        self.weight_sync.past.clear()
        self.weight_sync.past.extend(list(past[age].items()) for age in sorted(past))
        self.thresholds.restore(numbers["thresholds"])
        self.metrics.restore(lines)
        self.tokens.checksums = checksums
        for name, number in small.items():
            setattr(self, name, number)
        self.resumed = [*self.resumed, self.step]


def seed_libraries(seed: int) -> None:
    """Seed the generators that a library may draw from, such as a dropout in the policy."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def _of_model(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters and buffers, tied ones once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _by_number(tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Tensors by number, then name: `3.name` becomes `name` of group 3."""
    groups: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        number, _, rest = name.partition(".")
        groups.setdefault(int(number), {})[rest] = tensor
    return groups

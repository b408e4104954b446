"""Where an engine's hidden states first part from the model's: layer by layer, by hooks in both."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tailrl.explanation.attention import ALONE
from tailrl.explanation.sequences import Scored
from tailrl.model.layer_outputs import Outputs, recorded
from tailrl.model.policy import load_policy, local_folder
from tailrl.runtime import distributed
from tailrl.runtime.errors import ModelError

SEQUENCES = 3  # of the worst ones, that both sides run
MOST_TOKENS = 512  # of a sequence, from its beginning
# Hidden states part where they differ by more than both of these.
LEAST_PARTING = 1e-3  # of their size; another order of float32 sums makes less
TIMES_ROUNDING = 5.0  # times what the engine's number format makes at the same place


Engine = Callable[[Sequence[Sequence[int]], str], list[Outputs]]
"""What an engine's layers give for sequences of ids, in a number format."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One place in the model.

    Attributes:
        name: such as "layer 3, attention".
        difference: of the two sides, root mean square, as a share of the model's own size.
        rounding: what the engine's number format makes of the model there, likewise.
    """

    name: str
    difference: float
    rounding: float

    @property
    def parts(self) -> bool:
        return self.difference > max(LEAST_PARTING, TIMES_ROUNDING * self.rounding)


def compare(model: str, engine: Engine, chosen: Sequence[Scored]) -> tuple[Stage, ...]:
    """All places of a model in their order, with the difference of an engine's hidden states.

    Args:
        model: the folder of the policy.
        engine: gives what its layers give for sequences of ids, in a number format.
        chosen: responses of the log, of which the worst are run.

    Raises:
        StudyError: the two sides have no layer of the same name.
    """
    worst = sorted(chosen, key=lambda one: one.response.badness, reverse=True)[:SEQUENCES]
    sequences = [one.inputs.ids[:MOST_TOKENS] for one in worst]
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    policy = load_policy(model).to(distributed.device()).eval().requires_grad_(False)
    policy.set_attn_implementation(ALONE)
    right = [_outputs(policy, ids) for ids in sequences]
    policy = policy.to(getattr(torch, dtype))
    format_alone = [_outputs(policy, ids) for ids in sequences]
    del policy  # the engine needs the memory
    other = engine(sequences, dtype)
    names = [name for name in right[0] if name in other[0]]
    if not names:
        raise ModelError(f"{model}: the engine's model has no layer that is named as the model's")
    return tuple(Stage(name, _difference(right, other, name), _difference(right, format_alone, name)) for name in names)


def vllm_outputs(folder: str) -> Engine:
    """The engine of `compare` that is a vLLM of this folder."""

    def engine(sequences: Sequence[Sequence[int]], dtype: str) -> list[Outputs]:
        from tailrl.rollout.vllm.layers import engine_outputs

        return engine_outputs(Path(local_folder(folder)), sequences, dtype)

    return engine


@torch.no_grad()
def _outputs(policy: PreTrainedModel, ids: Sequence[int]) -> Outputs:
    with recorded(policy.base_model) as found:
        policy.base_model(input_ids=torch.tensor([list(ids)], device=policy.device), use_cache=False)
    return dict(found)


def _difference(right: Sequence[Outputs], other: Sequence[Outputs], name: str) -> float:
    """Root mean square over all sequences, as a share of that of the right ones; infinite where shapes differ."""
    pairs: list[tuple[Tensor, Tensor]] = [(one[name], two[name]) for one, two in zip(right, other, strict=True)]
    if any(one.shape != two.shape for one, two in pairs):
        return float("inf")
    far = sum(float((one - two).square().sum()) for one, two in pairs)
    size = sum(float(one.square().sum()) for one, _ in pairs)
    return float((far / max(size, 1e-30)) ** 0.5)

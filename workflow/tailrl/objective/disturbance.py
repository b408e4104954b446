"""The mismatch dial: causes of a mismatch between sampler and trainer, each of a known size, on distributions.

They act in the order in which an engine would meet them:

1. staleness (`training.handover`) and rounding (`round_weights`), on the weights;
2. bias, z + s b with one b ~ N(0, 1) per token of the vocabulary: a systematic error, the same in every state;
3. noise, z + σ ε with an ε ~ N(0, 1) per state and token: the model of arXiv 2512.23087, Prop. 4.3;
4. floor, (1 − η) π + η/V, of the distribution that the others leave: no probability is below η/V, whatever they do.

The last three are on the logits after the temperature, and before the safe set is chosen. The sampler and, for a
matched control, the trainer call the same functions with the same numbers. b belongs to the vocabulary, so that every
run has the same; ε to the response's seed, the position and the token, so that it does not depend on the batch.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tailrl.config.sampler import Disturbance
from tailrl.objective.noise import normal
from tailrl.runtime.distributed import sharded_like
from tailrl.runtime.errors import StudyError

UNDISTURBED = Disturbance()
LARGEST_FLOAT8 = 448.0
"""Of float8_e4m3."""


def disturb(logits_TV: Tensor, seeds: Sequence[int], positions: Sequence[int], settings: Disturbance) -> Tensor:
    """Logits of the disturbed distribution; nothing in them depends on other rows, and the gradient flows through.

    Args:
        logits_TV: float [T, V], after the temperature, before any mask.
        seeds: T seeds, of the response that each row belongs to.
        positions: T positions in the response, from 0.
        settings: how large each cause is; those on weights have no effect here.

    Returns:
        Float [T, V]; log-probabilities where there is a floor; the same tensor where no cause is on.
    """
    size = logits_TV.shape[-1]
    if settings.bias:
        logits_TV = logits_TV + settings.bias * normal([0], [0], size, "disturbance.bias").to(logits_TV)
    if settings.noise:
        logits_TV = logits_TV + settings.noise * normal(seeds, positions, size, "disturbance.noise").to(logits_TV)
    if settings.floor:
        scaled_TV = logits_TV.log_softmax(-1) + math.log1p(-settings.floor)
        logits_TV = torch.logaddexp(scaled_TV, scaled_TV.new_tensor(math.log(settings.floor) - math.log(size)))
    return logits_TV


def round_weights(weights: Iterable[tuple[str, Tensor]], dtype: str | None) -> Iterator[tuple[str, Tensor]]:
    """Named weights rounded to a dtype, in the dtype that they had; as they are for None.

    float16 and bfloat16 round every weight. float8_e4m3, which has 3 bits and a narrow range, does as engines do:
    matrices alone, each divided by a scale that puts its largest weight at 448; norms and biases stay as they are.

    Raises:
        StudyError: a weight is too large for the dtype.
    """
    if dtype is None:
        yield from weights
        return
    for name, weight in weights:
        rounded = _rounded(weight, dtype)
        if rounded.isinf().any() and not weight.isinf().any():
            raise StudyError(f"disturbance.weights: {name} holds weights too large for {dtype}")
        yield name, rounded


def _rounded(weight: Tensor, dtype: str) -> Tensor:
    if dtype != "float8_e4m3":
        return weight.to(getattr(torch, dtype)).to(weight.dtype)
    if weight.ndim < 2:
        return weight
    scale = (weight.abs().amax() / LARGEST_FLOAT8).clamp(min=torch.finfo(weight.dtype).tiny)
    return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale


@contextmanager
def computing_with(module: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> Iterator[None]:
    """Within it the module computes with these named weights; afterwards its parameters are as before.

    A gradient that is taken within is that at the given weights, and is left on the parameters themselves: straight
    through where the weights are the parameters rounded, a delayed gradient where they are those of an earlier step.
    Names that the module has no parameter for, such as a tied head's, are passed over. The given weights are whole,
    also where the module is sharded; then every rank must be here.
    """
    parameters = {name: parameter.data for name, parameter in module.named_parameters()}
    own: dict[str, Tensor] = {}
    try:
        for name, weight in weights:
            if name in parameters:
                # In place, for a sharded module gathers what lies there.
                own[name] = parameters[name].clone()
                parameters[name].copy_(sharded_like(weight, parameters[name]))
        yield
    finally:
        for name, weight in own.items():
            parameters[name].copy_(weight)

"""The mismatch dial: disturbances of known size (the dose) that set the sampler's distribution off the trainer's.

They act in the order in which an engine would meet them:

1. staleness (`training.weight_sync`) and rounding (`round_weights`), on the weights;
2. bias, z + s b with b ~ N(0, 1) per token of the vocabulary: a systematic error, the same in every state;
3. noise, z + σ ε with ε ~ N(0, 1) per state and token: the model of arXiv 2512.23087, Prop. 4.3;
4. floor, (1 − η) π + η/V, last: no probability ends below η/V.

The last three act on the logits after the temperature and before the safe set is chosen. The sampler and, for a
matched control, the trainer call the same functions with the same numbers. b depends on the vocabulary alone, so every
run has the same b. ε depends on the response's seed, the position and the token, and so not on the batch.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn

from tailrl.config.sampler import Disturbance
from tailrl.objective.noise import normal
from tailrl.runtime.distributed import sharded_like
from tailrl.runtime.errors import DataError, ModelError

UNDISTURBED = Disturbance()
LARGEST_FLOAT8 = 448.0
"""The largest number of float8_e4m3."""


def disturb(logits_TV: Tensor, seeds: Sequence[int], positions: Sequence[int], settings: Disturbance) -> Tensor:
    """Logits of the disturbed distribution, row by row; the gradient flows through.

    Args:
        logits_TV: float [T, V], after the temperature, before any mask.
        seeds: the seed of each row's response: T.
        positions: T positions in the response, from 0.
        settings: the size of each disturbance; those of weights have no effect here.

    Returns:
        Float [T, V]; log-probabilities with a floor; the same tensor with no disturbance of logits.

    Raises:
        StudyError: noise without one seed and position a row.
    """
    if settings.noise and not len(seeds) == len(positions) == len(logits_TV):
        raise DataError(f"{len(logits_TV)} rows have {len(seeds)} seeds and {len(positions)} positions")
    size, device = logits_TV.shape[-1], logits_TV.device
    if settings.bias:
        # The CPU's numbers on every machine, since this error is one and the same in all runs.
        logits_TV = logits_TV + settings.bias * _constant(size, device).to(logits_TV.dtype)
    if settings.noise:
        noise_TV = normal(seeds, positions, size, "disturbance.noise", device)
        logits_TV = logits_TV + settings.noise * noise_TV.to(logits_TV)
    if settings.floor:
        scaled_TV = logits_TV.log_softmax(-1) + math.log1p(-settings.floor)
        logits_TV = torch.logaddexp(scaled_TV, scaled_TV.new_tensor(math.log(settings.floor) - math.log(size)))
    return logits_TV


@cache
def _constant(size: int, device: torch.device) -> Tensor:
    """The bias, of standard deviation 1: drawn once, since every step of an engine adds it."""
    with torch.inference_mode(False):  # an engine may be the first to ask, and a trainer's gradient passes later
        return normal([0], [0], size, "disturbance.bias").to(device)


def round_weights(weights: Iterable[tuple[str, Tensor]], dtype: str | None) -> Iterator[tuple[str, Tensor]]:
    """Named weights rounded to `dtype` and returned in their own dtype; unchanged for None.

    float16 and bfloat16 round every weight. float8_e4m3 has 3 bits and a narrow range, so it rounds as engines do:
    only matrices, each with a scale that puts its largest weight at 448. Norms and biases stay unchanged.

    Raises:
        StudyError: a weight is too large for the dtype.
    """
    if dtype is None:
        yield from weights
        return
    for name, weight in weights:
        rounded = _rounded(weight, dtype)
        if rounded.isinf().any() and not weight.isinf().any():
            raise ModelError(f"disturbance.weights: {name} holds weights too large for {dtype}")
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
    """The module computes with these named weights within the block; its own parameters come back afterwards.

    A gradient taken within is the gradient at the given weights, left on the parameters. With rounded parameters it is
    a straight-through gradient; with an earlier step's it is a delayed gradient. Names without a parameter, such as a
    tied head's, are skipped. The given weights are whole; where the module is sharded, every rank must call.
    """
    parameters = {name: parameter.data for name, parameter in module.named_parameters()}
    own: dict[str, Tensor] = {}
    try:
        for name, weight in weights:
            if name in parameters:
                # In place, since a sharded module gathers from this memory.
                own[name] = parameters[name].clone()
                parameters[name].copy_(sharded_like(weight, parameters[name]))
        yield
    finally:
        for name, weight in own.items():
            parameters[name].copy_(weight)

"""Random numbers that depend only on a seed, a position and a token (common random numbers).

A generator's state makes a draw depend on all draws before it: another batch, order or engine sees other noise. Here
each number is a hash instead. Sampler and trainer draw the same noise for the same token of the same response, in any
batch.

The hash is 32-bit and not cryptographic. A uniform has 31 bits and full relative precision towards 0. The tail of an
exponential race, where rare tokens win, is correct down to probabilities of about 1e-9.

A CUDA device hashes to the CPU's bits (`noise_kernel`) and makes the same uniforms of them: these are integer and
exactly rounded operations. Logarithms and the normal's quantile are not: libraries round them differently, a CPU's by
its kind. A device computes each of them in float64 and rounds it to float32. Of 6e7 Gumbel numbers 9 % then differed
from a CPU's, by 9.6e-7 at most, one rounding of the largest. A draw differs only where two scores are as near as that.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrl.runtime.seeding import derive_seed

_GOLDEN = 0x9E3779B97F4A7C15

DRAWN_AT_ONCE = 2**18
"""Numbers drawn at a time, so that two dozen operations on them stay in a core's cache."""
DRAWN_AT_ONCE_ON_GPU = 2**24
"""Likewise on a device, where they take 128 MiB in float64."""


def gumbel(seeds: Sequence[int], positions: Sequence[int], count: int, device: torch.device | str = "cpu") -> Tensor:
    """Standard Gumbel numbers, float32 [T, count]: argmax(log p + g) is a sample from p.

    Args:
        seeds: T integers of up to 64 bits, one for each row's response.
        positions: T positions in the response, from 0.
        count: numbers per position, one for each token of the vocabulary.
        device: where they are made and stay.
    """
    return _drawn(seeds, positions, count, "gumbel", _gumbel, device)


def normal(
    seeds: Sequence[int],
    positions: Sequence[int],
    count: int,
    stream: str = "normal",
    device: torch.device | str = "cpu",
) -> Tensor:
    """Standard normal numbers, float32 [T, count], likewise; exactly symmetric, with tails to 6.3 on both sides.

    `stream` names the use: different names give independent numbers.
    """
    return _drawn(seeds, positions, count, stream, _normal, device)


def _drawn(
    seeds: Sequence[int],
    positions: Sequence[int],
    count: int,
    stream: str,
    law: Callable[[Tensor], Tensor],
    device: torch.device | str = "cpu",
) -> Tensor:
    """Numbers that `law` makes from 32 random bits each, float32 [T, count]."""
    words_T2 = _placed(_words(seeds, positions, stream), device)
    if words_T2.is_cuda:
        from tailrl.objective.noise_kernel import random_bits

        rows = max(1, DRAWN_AT_ONCE_ON_GPU // max(1, count))
        return torch.cat([law(random_bits(words_B2, count)) for words_B2 in torch.split(words_T2, rows)])
    tokens_V = torch.arange(count, dtype=torch.int32).mul_(_signed(0x9E3779B9))
    drawn_TV = torch.empty(len(seeds), count)
    rows = max(1, DRAWN_AT_ONCE // max(1, count))
    for out_BV, words_B2 in zip(torch.split(drawn_TV, rows), torch.split(words_T2, rows), strict=True):
        out_BV.copy_(law(_bits(tokens_V, words_B2)))
    return drawn_TV


def _placed(words: NDArray[np.int32], device: torch.device | str) -> Tensor:
    return torch.from_numpy(words).to(device)


def _bits(tokens_V: Tensor, words_B2: Tensor) -> Tensor:
    """32 random bits for each token at each position: int32 [B, V]."""
    bits_BV = tokens_V + words_B2[:, :1]
    _mix(bits_BV)
    bits_BV ^= words_B2[:, 1:]
    _mix(bits_BV)
    return bits_BV


def _gumbel(bits_BV: Tensor) -> Tensor:
    # −ln(−ln(1 − u)): the large values decide, and they come from small u, which floats resolve well.
    exponential_BV = _rounded(torch.log1p, _uniform(bits_BV).neg_()).neg_()
    return _rounded(torch.log, exponential_BV).neg_()


def _rounded(function: Callable[..., Tensor], values_BV: Tensor) -> Tensor:
    """The function's values, over the given float32 ones; on a device from float64."""
    if values_BV.is_cuda:
        return values_BV.copy_(function(values_BV.double()))
    return function(values_BV, out=values_BV)


def _normal(bits_BV: Tensor) -> Tensor:
    # The bit that the uniform does not use is the sign, so that both tails come from small u, which is resolved well.
    half_BV = _rounded(torch.special.ndtri, _uniform(bits_BV).mul_(0.5))
    return torch.where(bits_BV < 0, half_BV, -half_BV)


def _uniform(bits_BV: Tensor) -> Tensor:
    """The lower 31 bits as a float32 in (0, 1)."""
    # The largest would round to 1, which makes an exponential infinite.
    return bits_BV.bitwise_and(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)


def _words(seeds: Sequence[int], positions: Sequence[int], stream: str) -> NDArray[np.int32]:
    """Two 32-bit words for each row: [T, 2]."""
    state = _mix64(np.array([seed % 2**64 for seed in seeds], dtype=np.uint64))
    # Mixed one after another: with a sum, a neighbouring seed in another stream would get the same numbers.
    state = _mix64(state ^ np.uint64(derive_seed(stream)))
    state = _mix64(state + np.asarray(positions, dtype=np.uint64) * np.uint64(_GOLDEN))
    return state.view(np.int32).reshape(-1, 2)


def _mix64(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64 bits in which every input bit moves about half of the output bits (SplitMix64)."""
    state = state + np.uint64(_GOLDEN)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _mix(bits: Tensor) -> None:
    """`_mix64` for 32 bits, in place."""
    _fold(bits, 16)
    bits *= _signed(0x7FEB352D)
    _fold(bits, 15)
    bits *= _signed(0x846CA68B)
    _fold(bits, 16)


def _fold(bits: Tensor, shift: int) -> None:
    # torch's right shift copies the sign bit in; the mask removes the copies.
    bits ^= (bits >> shift).bitwise_and_((1 << (32 - shift)) - 1)


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word

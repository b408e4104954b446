"""Quantisation as engines do it: weights, activations, keys and values, packed for an engine or rounded in place.

Everything is symmetric: a number is a small integer or a float8, times a scale.

| format | weights | activations |
| --- | --- | --- |
| int8 | a scale an output channel | a scale a token, at run time |
| int4 | a scale a group of inputs, or an output channel; eight numbers in an int32 | not quantised |
| fp8 | float8_e4m3, a scale an output channel | float8_e4m3, a scale a token, at run time |

Packed weights have the names and layouts of vLLM's compressed-tensors. Letters: O output channels, I inputs, G groups
of a channel, W packed words of a channel, R rows.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from tailrl.config.sampler import FewBits

LARGEST_PACKED = {"int8": 127.0, "int4": 7.0, "fp8": 448.0}
"""What the largest number of a scale's share becomes."""

PACKED = 8
"""Numbers of 4 bits in an int32; number i of a word is input 8 j + i, stored with `OFFSET` added."""
OFFSET = 8

CACHES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""The dtype of each format of keys and values."""


def scaled(numbers_RI: Tensor, quantization: str) -> tuple[Tensor, Tensor]:
    """Rows as small numbers and a float32 scale each: [R, I] in int8 or float8_e4m3, and [R, 1].

    A row of zeros has a scale above zero. Works on any number of leading dimensions.
    """
    exact_RI = numbers_RI.float()
    scale_R1 = _scale(exact_RI.abs().amax(-1, keepdim=True), quantization)
    return _small(exact_RI / scale_R1, quantization), scale_R1


def int4_groups(
    weight_OI: Tensor, group_size: int | None, scale_dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """Weights as integers from -8 to 7, int8 [O, I], and their scales [O, G]; None: a group is a whole channel.

    A scale is first rounded to the dtype in which engines store it. The integers are then those of the stored scale.
    """
    group_OGN = weight_OI.float().view(len(weight_OI), -1, group_size or weight_OI.shape[-1])
    scale_OG1 = _scale(group_OGN.abs().amax(-1, keepdim=True), "int4").to(scale_dtype)
    return _small(group_OGN / scale_OG1.float(), "int4").flatten(-2), scale_OG1.squeeze(-1)


def pack_int4(number_OI: Tensor) -> Tensor:
    """Integers from -8 to 7 in int32 words [O, W], eight inputs each; their count is a multiple of 8."""
    place_N = 4 * torch.arange(PACKED, device=number_OI.device)
    nibble_OWN = (number_OI.long() + OFFSET).view(len(number_OI), -1, PACKED) << place_N
    # The last nibble may set the sign, which a conversion of the sum to int32 keeps as a bit.
    return nibble_OWN.sum(-1).to(torch.int32)


def unpack_int4(word_OW: Tensor) -> Tensor:
    """The inverse of `pack_int4`: int8 [O, I]."""
    place_N = 4 * torch.arange(PACKED, device=word_OW.device)
    return (((word_OW.long()[..., None] >> place_N) & 15) - OFFSET).flatten(-2).to(torch.int8)


def packed(name: str, weight_OI: Tensor, settings: FewBits) -> Iterator[tuple[str, Tensor]]:
    """A projection's weight as the tensors of a compressed-tensors checkpoint, by their names."""
    stem = name.removesuffix("weight")
    if settings.quantization == "int4":
        number_OI, scale_OG = int4_groups(weight_OI, settings.group_size)
        yield f"{stem}weight_packed", pack_int4(number_OI)
        yield f"{stem}weight_scale", scale_OG
        yield f"{stem}weight_shape", torch.tensor(weight_OI.shape)
    else:
        small_OI, scale_O1 = scaled(weight_OI, str(settings.quantization))
        yield name, small_OI
        yield f"{stem}weight_scale", scale_O1


def rounded_weight(weight_OI: Tensor, settings: FewBits) -> Tensor:
    """A projection's weight as an engine with this format has it, in its own dtype."""
    if settings.quantization == "int4":
        small_OI, scale_OG = int4_groups(weight_OI, settings.group_size)
        exact_OI = small_OI.float().view(*scale_OG.shape, -1) * scale_OG.float()[..., None]
        return exact_OI.flatten(-2).to(weight_OI.dtype)
    return rounded_rows(weight_OI, str(settings.quantization))


def rounded_rows(numbers_RI: Tensor, quantization: str) -> Tensor:
    """Rows rounded to int8 or float8, each by its own scale, in their own dtype."""
    small_RI, scale_R1 = scaled(numbers_RI, quantization)
    return (small_RI.float() * scale_R1).to(numbers_RI.dtype)


def rounded_cache(numbers: Tensor, dtype: torch.dtype, toward_zero: bool) -> Tensor:
    """Keys or values of any shape rounded to a float8, without a scale; larger ones become its largest.

    GPUs round to nearest. vLLM's kernels for CPUs cut off the bits that do not fit: they round towards zero, and every
    key and value becomes smaller, by half a step on average.
    """
    most = torch.finfo(dtype).max
    exact = numbers.float().clamp(-most, most)
    near = exact.to(dtype)
    if toward_zero:
        # One less is the next smaller float8 of the same sign: the sign is a bit of its own.
        near = (near.view(torch.uint8) - (near.float().abs() > exact.abs()).to(torch.uint8)).view(dtype)
    return near.to(numbers.dtype)


def straight_through(numbers: Tensor, rounded: Tensor) -> Tensor:
    """The rounded numbers, bit for bit, with the gradient of the unrounded ones."""
    return rounded.detach() + (numbers - numbers.detach())


def _scale(largest: Tensor, quantization: str) -> Tensor:
    return (largest / LARGEST_PACKED[quantization]).clamp(min=1e-12)


def _small(numbers: Tensor, quantization: str) -> Tensor:
    if quantization == "fp8":
        return numbers.clamp(-LARGEST_PACKED["fp8"], LARGEST_PACKED["fp8"]).to(torch.float8_e4m3fn)
    most = LARGEST_PACKED[quantization]
    return numbers.round().clamp(-most - 1, most).to(torch.int8)

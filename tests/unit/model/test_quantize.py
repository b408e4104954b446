"""Quantisation against loops over single numbers, in float64 and integers."""

import math
import struct
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from tailrl.config.sampler import SamplerSettings
from tailrl.model.quantize import (
    CACHES,
    int4_groups,
    pack_int4,
    packed,
    rounded_cache,
    rounded_rows,
    rounded_weight,
    scaled,
    straight_through,
    unpack_int4,
)

FLOAT8 = {"fp8_e4m3": (3, 7, 448.0), "fp8_e5m2": (2, 15, 57344.0)}
"""Bits of the mantissa, bias of the exponent, largest number."""


def float8(dtype: str) -> list[float]:
    """Every number of the format that is not negative, by the definition of its bits."""
    bits, bias, largest = FLOAT8[dtype]
    numbers = [m * 2.0 ** (1 - bias - bits) for m in range(2**bits)]
    numbers += [(1 + m / 2**bits) * 2.0 ** (e - bias) for e in range(1, 2 ** (7 - bits)) for m in range(2**bits)]
    return [number for number in numbers if number <= largest]


def nearest(number: float, grid: list[float]) -> float:
    """The grid's number next to it; between two the one with an even place."""
    return math.copysign(min((abs(abs(number) - one), place % 2, one) for place, one in enumerate(grid))[2], number)


def toward_zero(number: float, grid: list[float]) -> float:
    return math.copysign(max(one for one in grid if one <= abs(number)), number)


def weights(outputs: int, inputs: int, seed: int = 0) -> Tensor:
    """Each output channel of another size; one of zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight_OI = torch.randn(outputs, inputs, generator=generator) * torch.logspace(-3, 1, outputs)[:, None]
    weight_OI[1] = 0
    return weight_OI


def test_int8_has_a_scale_a_row() -> None:
    weight_OI = weights(6, 40)
    small_OI, scale_O1 = scaled(weight_OI, "int8")
    assert (small_OI.dtype, scale_O1.dtype, scale_O1.shape) == (torch.int8, torch.float32, (6, 1))
    for row, small, scale in zip(weight_OI.tolist(), small_OI.tolist(), scale_O1[:, 0].tolist(), strict=True):
        step = max(abs(number) for number in row) / 127
        assert scale == pytest.approx(step or 1e-12, rel=1e-6)
        assert small == [round(number / scale) for number in row]
        assert max(map(abs, small)) == (127 if step else 0)


def test_a_tensor_of_tokens_is_quantised_token_by_token() -> None:
    tokens_BRI = weights(6, 40).view(2, 3, 40)
    rounded_BRI = rounded_rows(tokens_BRI, "int8")
    for row_I, own_I in zip(tokens_BRI.flatten(0, 1), rounded_BRI.flatten(0, 1), strict=True):
        assert torch.equal(rounded_rows(row_I[None], "int8")[0], own_I)
        assert (own_I - row_I).abs().max() <= row_I.abs().max() / 254 * (1 + 1e-5)
    assert rounded_rows(tokens_BRI.bfloat16(), "int8").dtype == torch.bfloat16


@pytest.mark.parametrize("group", [32, None])
def test_int4_has_a_scale_a_group(group: int | None) -> None:
    weight_OI = weights(4, 96)
    number_OI, scale_OG = int4_groups(weight_OI, group)
    size = group or 96
    assert scale_OG.shape == (4, 96 // size)
    assert scale_OG.dtype == torch.bfloat16
    for o in range(4):
        for g in range(96 // size):
            part = weight_OI[o, g * size : (g + 1) * size].tolist()
            scale = float(scale_OG[o, g])
            assert scale == pytest.approx(max(map(abs, part)) / 7 or 1e-12, rel=2**-8)
            expected = [min(7, max(-8, round(np.float32(number) / np.float32(scale)))) for number in part]
            assert number_OI[o, g * size : (g + 1) * size].tolist() == expected
    settings = SamplerSettings(quantization="int4", group_size=group)
    exact_OI = number_OI.double().view(4, -1, size) * scale_OG.double()[..., None]
    assert torch.equal(rounded_weight(weight_OI, settings).double(), exact_OI.view(4, 96))


def test_int4_words_hold_eight_inputs_from_the_lowest_bits_on() -> None:
    number_OI = torch.arange(-8, 8, dtype=torch.int8).repeat(3, 2)[:, torch.randperm(32)]
    word_OW = pack_int4(number_OI)
    assert (word_OW.dtype, word_OW.shape) == (torch.int32, (3, 4))
    for numbers, words in zip(number_OI.tolist(), word_OW.tolist(), strict=True):
        for j, word in enumerate(words):
            (unsigned,) = struct.unpack("<I", struct.pack("<i", word))
            assert [(unsigned >> 4 * i & 15) - 8 for i in range(8)] == numbers[8 * j : 8 * j + 8]
    assert torch.equal(unpack_int4(word_OW), number_OI)


def test_fp8_weights_are_the_nearest_float8_of_a_scaled_row() -> None:
    weight_OI, grid = weights(6, 40), float8("fp8_e4m3")
    small_OI, scale_O1 = scaled(weight_OI, "fp8")
    for row, small, scale in zip(weight_OI, small_OI, scale_O1[:, 0], strict=True):
        assert small.float().tolist() == [nearest(float(number), grid) for number in row / scale]
    assert (small_OI.float().abs().amax(1) == torch.tensor([448.0, 0, 448, 448, 448, 448])).all()


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("name", CACHES)
def test_cached_numbers_are_those_of_the_grid(name: str, cuts: bool) -> None:
    grid = float8(name)
    assert max(grid) == FLOAT8[name][2]
    edges = [*grid, *((a + b) / 2 for a, b in pairwise(grid)), 0.0, 1e-9, 1e6]
    numbers = torch.tensor([*edges, *(-edge for edge in edges), *torch.randn(200).tolist()])
    rounding = toward_zero if cuts else nearest
    expected = [rounding(float(number), grid) for number in numbers]
    assert rounded_cache(numbers, CACHES[name], cuts).tolist() == expected


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_packed_tensors_are_the_rounded_weight(kind: str) -> None:
    weight_OI = weights(32, 64)
    settings = SamplerSettings.model_validate({"quantization": kind, "group_size": 32 if kind == "int4" else None})
    found = dict(packed("layers.0.q_proj.weight", weight_OI, settings))
    scale = found["layers.0.q_proj.weight_scale"].double()
    if kind == "int4":
        assert found["layers.0.q_proj.weight_shape"].tolist() == [32, 64]
        number_OI = unpack_int4(found["layers.0.q_proj.weight_packed"]).double()
        exact_OI = (number_OI.view(32, -1, 32) * scale[..., None]).view(32, 64)
    else:
        exact_OI = found["layers.0.q_proj.weight"].double() * scale
    torch.testing.assert_close(rounded_weight(weight_OI, settings).double(), exact_OI, rtol=2**-23, atol=0)


def test_the_gradient_goes_straight_through() -> None:
    numbers = torch.randn(5, requires_grad=True)
    through = straight_through(numbers, numbers.round())
    assert torch.equal(through, numbers.round())
    (through * torch.arange(5.0)).sum().backward()
    assert numbers.grad is not None
    assert torch.equal(numbers.grad, torch.arange(5.0))

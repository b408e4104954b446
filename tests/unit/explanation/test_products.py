"""Products in 16 bits by way of float32, held to the exact products of the rounded numbers."""

import pytest
import torch

from tailrl.explanation.products import RoundedProducts

UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # the largest relative error of one rounding
SUM_ERROR = 2.0**-20  # of float32 sums of 64 products, relative to the sum of their sizes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", ["linear", "linear_with_bias", "batched", "matrix"])
def test_a_product_is_the_exact_one_rounded_once(dtype: torch.dtype, shape: str) -> None:
    torch.manual_seed(1)
    left = torch.randn(3, 5, 64).to(dtype)
    right = torch.randn(7, 64).to(dtype)
    bias = torch.randn(7).to(dtype)
    exact = left.double() @ right.double().T
    size = left.double().abs() @ right.double().abs().T
    with RoundedProducts():
        if shape == "linear":
            product = torch.nn.functional.linear(left, right)
        elif shape == "linear_with_bias":
            product = torch.nn.functional.linear(left, right, bias)
            exact, size = exact + bias.double(), size + bias.double().abs()
        elif shape == "batched":
            product = left @ right.T.expand(3, 64, 7)
        else:
            product, exact, size = left[0] @ right.T, exact[0], size[0]
    assert product.dtype == dtype
    assert ((product.double() - exact).abs() <= exact.abs() * UNIT_ROUNDOFF[dtype] + size * SUM_ERROR).all()


def test_products_in_float32_are_left_alone() -> None:
    left, right = torch.randn(5, 64), torch.randn(64, 7)
    with RoundedProducts():
        product = left @ right
    assert torch.equal(product, left @ right)


def test_a_product_that_keeps_float32_would_be_seen() -> None:
    left, right = torch.randn(5, 64).bfloat16(), torch.randn(64, 7).bfloat16()
    with RoundedProducts():
        product = left @ right
    assert not torch.equal(product.float(), left.float() @ right.float())
    assert torch.equal(product, (left.float() @ right.float()).bfloat16())

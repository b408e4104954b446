"""Muon in float32 against singular values in float64, and against PyTorch's, which rounds to bfloat16."""

import pytest
import torch

from tailrl.training.muon import Muon, orthogonalized


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16), (1, 7)])
def test_singular_vectors_stay_and_values_come_near_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    seen = left.T @ orthogonalized(matrix).double() @ right.T
    torch.testing.assert_close(seen - torch.diag(seen.diagonal()), torch.zeros_like(seen), atol=1e-5, rtol=0)
    expected = values / values.norm()
    for _ in range(5):
        expected = 3.4445 * expected - 4.775 * expected**3 + 2.0315 * expected**5
    torch.testing.assert_close(seen.diagonal(), expected, atol=1e-5, rtol=0)
    assert seen.diagonal().min() > 0.6 and seen.diagonal().max() < 1.3


def test_a_matrix_of_zeros_stays_zero() -> None:
    assert orthogonalized(torch.zeros(3, 5)).equal(torch.zeros(3, 5))


def test_steps_are_those_of_pytorch_within_its_rounding() -> None:
    def trained(optimizer_of) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[no-untyped-def]
        generator = torch.Generator().manual_seed(1)
        matrices = [torch.randn(shape, generator=generator).requires_grad_() for shape in ((12, 20), (20, 12))]
        optimizer = optimizer_of(matrices)
        for _ in range(3):
            for matrix in matrices:
                matrix.grad = torch.randn(matrix.shape, generator=generator)
            optimizer.step()
        return tuple(matrix.detach() for matrix in matrices)

    ours = trained(lambda matrices: Muon(matrices, lr=0.1, momentum=0.9))
    pytorchs = trained(lambda matrices: torch.optim.Muon(matrices, lr=0.1, momentum=0.9, weight_decay=0.0))
    for own, other in zip(ours, pytorchs, strict=True):
        # Three steps of 0.1, each entry at most about 0.6, rounded to 8 bits.
        torch.testing.assert_close(own, other, atol=0.005, rtol=0)
        assert not own.equal(other)

"""Muon, the optimizer of a warm start's matrices, with products in float32."""

from collections.abc import Iterable
from math import sqrt

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""Of the quintic Newton-Schulz iteration: singular values from 0.002 to 1 come near 1 in five steps."""
ITERATIONS = 5


def orthogonalized(matrix_AB: Tensor) -> Tensor:
    """About U Vᵀ of a matrix U S Vᵀ, float32 [A, B]: singular values come to lie between 0.68 and 1.2.

    By five quintic Newton-Schulz iterations (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/). Singular
    values below 0.002 of the matrix's norm stay smaller.
    """
    a, b, c = COEFFICIENTS
    tall = matrix_AB.shape[0] > matrix_AB.shape[1]
    wide = matrix_AB.T if tall else matrix_AB
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if tall else wide


class Muon(torch.optim.Optimizer):
    """Momentum by Nesterov, orthogonalized, without weight decay; every parameter is a matrix.

    As `torch.optim.Muon`, which always computes the products in bfloat16. On a CPU without instructions for that they
    took more than twice as long as all the rest of a warm start.
    """

    def __init__(self, matrices: Iterable[Tensor], lr: float, momentum: float) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Change every matrix by its gradient."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                if not self.state[matrix]:
                    self.state[matrix]["momentum"] = torch.zeros_like(matrix)
                mean = self.state[matrix]["momentum"]
                mean.lerp_(matrix.grad, 1 - group["momentum"])
                change = orthogonalized(matrix.grad.lerp(mean, group["momentum"]))
                taller = max(1.0, matrix.shape[0] / matrix.shape[1])
                matrix.sub_(change, alpha=group["lr"] * sqrt(taller))

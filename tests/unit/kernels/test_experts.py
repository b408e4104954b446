"""Batch-invariant experts against transformers' loop in float64, and against themselves in other company."""

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from tailrl.kernels import experts as module
from tailrl.kernels.experts import exact_experts

SIZES = {"few, wide": (4, 2, 64, 96), "many, narrow": (16, 3, 32, 32), "one each": (8, 1, 96, 160)}


def make(name: str, rows: int, seed: int = 0) -> tuple[Qwen3MoeExperts, Tensor, Tensor, Tensor]:
    """Experts, rows, and for each row its experts and their weights; some experts get most rows, some none."""
    count, chosen, hidden, inner = SIZES[name]
    config = Qwen3MoeConfig(
        hidden_size=hidden, moe_intermediate_size=inner, num_experts=count, experts_implementation="eager"
    )
    generator = torch.Generator().manual_seed(seed)
    made = Qwen3MoeExperts(config)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    tilt_E = torch.linspace(3, -3, count)
    logits_RE = torch.randn(rows, count, generator=generator) + tilt_E
    weight_RK, chosen_RK = logits_RE.softmax(-1).topk(chosen, -1)
    return made, torch.randn(rows, hidden, generator=generator), chosen_RK, weight_RK


@pytest.mark.parametrize("rows", [1, 16, 200])
@pytest.mark.parametrize("name", SIZES)
def test_values_and_gradients_are_those_of_the_loop_over_experts(name: str, rows: int) -> None:
    made, hidden_RH, chosen_RK, weight_RK = make(name, rows)
    found = []
    for compute, dtype in ((exact_experts, torch.float32), (Qwen3MoeExperts.forward, torch.float64)):
        own = made.to(dtype)
        leaves = [tensor.to(dtype).requires_grad_() for tensor in (hidden_RH, weight_RK)]
        out_RH = compute(own, leaves[0], chosen_RK, leaves[1])
        target_RH = torch.sin(torch.arange(out_RH.numel())).view_as(out_RH).to(dtype)
        gradients = torch.autograd.grad((out_RH * target_RH).sum(), [*leaves, *own.parameters()])
        found.append([out_RH, *gradients])
    for ours, oracle in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), oracle, rtol=1e-4, atol=1e-5 * oracle.abs().max().item())


def alone_and_together(name: str) -> bool:
    """Whether 48 rows have the same bits among themselves as among 500 others, in another order."""
    made, hidden_RH, chosen_RK, weight_RK = make(name, 548)
    order_R = torch.randperm(548, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole_RH = torch.empty_like(hidden_RH)
        whole_RH[order_R] = exact_experts(made, *(tensor[order_R] for tensor in (hidden_RH, chosen_RK, weight_RK)))
        few_RH = exact_experts(made, *(tensor[:48] for tensor in (hidden_RH, chosen_RK, weight_RK)))
    return torch.equal(few_RH, whole_RH[:48])


@pytest.mark.parametrize("name", SIZES)
def test_a_row_does_not_depend_on_the_rows_beside_it(name: str) -> None:
    assert alone_and_together(name)


def test_the_library_s_own_grouped_experts_do_depend_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above would show nothing: rows padded by nothing, through the ordinary product."""
    monkeypatch.setattr(module, "FEWEST_ROWS", 1)
    monkeypatch.setattr(module, "product", nn.functional.linear)
    assert not all(alone_and_together(name) for name in SIZES)

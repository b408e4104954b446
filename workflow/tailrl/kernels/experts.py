"""Experts of a mixture, batch-invariant: a token's result does not depend on how many tokens its expert gets.

Each expert multiplies its own tokens in rows padded to a multiple of `FEWEST_ROWS`, at which `batch_invariant.product`
gives a row the same bits. SiLU sees the padded rows of all experts at once, a multiple of `ROWS`. A token's K results
are added one after another: a sum over them may be cut by the number of tokens.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tailrl.kernels.batch_invariant import FEWEST_ROWS, ROWS, product


def exact_experts(experts: Any, hidden_RH: Tensor, chosen_RK: Tensor, weight_RK: Tensor) -> Tensor:
    """The weighted sum of each row's experts, [R, H]: `grouped_mm_experts_forward` of transformers, batch-invariant.

    Args:
        experts: transformers' module, with gate_up_proj [E, 2I, H], down_proj [E, H, I] and act_fn.
        hidden_RH: floating [R, H].
        chosen_RK: int64 [R, K], the experts of each row.
        weight_RK: [R, K], their weights.
    """
    count_E = chosen_RK.flatten().bincount(minlength=experts.num_experts)
    room_E = (count_E + FEWEST_ROWS - 1) // FEWEST_ROWS * FEWEST_ROWS
    order_S = chosen_RK.flatten().argsort(stable=True)  # S = R × K, by expert
    # A row's place: its expert's first place, and its number among the expert's rows.
    shift_E = (room_E.cumsum(0) - room_E) - (count_E.cumsum(0) - count_E)
    place_S = torch.arange(len(order_S), device=order_S.device) + shift_E[chosen_RK.flatten()[order_S]]
    places = int(room_E.sum())
    rows_XH = hidden_RH.new_zeros(places, hidden_RH.shape[1]).index_copy(
        0, place_S, hidden_RH.index_select(0, order_S // chosen_RK.shape[1])
    )
    ends = [0, *room_E.cumsum(0).tolist()]
    runs = [(expert, slice(*run)) for expert, run in enumerate(pairwise(ends)) if run[0] < run[1]]
    # Unbound at once: the gradient of each index would be as large as all experts.
    gate_up, down = experts.gate_up_proj.unbind(0), experts.down_proj.unbind(0)
    # Gate and up apart, so that the elementwise operators see whole rows that lie side by side.
    halves = [torch.cat([product(rows_XH[run], gate_up[e].chunk(2)[half]) for e, run in runs]) for half in (0, 1)]
    gate_XI, up_XI = (pad(half_XI, (0, 0, 0, -places % ROWS)) for half_XI in halves)
    inner_XI = experts.act_fn(gate_XI) * up_XI
    out_XH = torch.cat([product(inner_XI[run], down[e]) for e, run in runs])
    place_RK = torch.empty_like(place_S).index_copy(0, order_S, place_S).view_as(chosen_RK)
    total_RH = torch.zeros_like(hidden_RH)
    for place_R, weight_R in zip(place_RK.unbind(1), weight_RK.unbind(1), strict=True):
        total_RH = total_RH + out_XH.index_select(0, place_R) * weight_R[:, None]
    return total_RH

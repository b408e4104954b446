"""The constrained log-prob on a CUDA device, for the rules full and min_p; `logprobs.constrained_logprobs` calls it.

Its expected cost was estimated before anything ran, in units of one dense product of T rows with a head [V, H]. Three
units are the least: the logits, and a product for either gradient. At T = 16,384, V = 151,936, H = 2,048 in bf16 a unit
is 10.2 TFLOP or 13 to 14 ms of an H100. At 3 TB/s T × V numbers take 3.3 ms as float32 and 1.7 ms as bf16.

With a mask the estimate was 4.15 units: the logits, written as float32 (1.1) and read three times (0.75); their
gradient, written as bf16 (0.15); its two products, times the tokens safe in any row (2.0); copies and casts (0.15).
Without a mask it was 5.0: the logits are read once (0.25), and computed and read again (1.35).

cuBLAS makes the products; Triton's kernels only pass over them. Two alternatives were worse on paper:

- A forward that never writes its logits saves 1 unit of traffic. But it needs the product twice, since the safe sums
  wait for the final maximum, and a product in Triton runs at about three quarters of cuBLAS's speed.
- Tiles without a safe token are rare. Where 32 neighbouring rows keep 44 % of the tokens, nearly every tile of 32 rows
  and 64 tokens has one, however the rows are sorted. So the products leave out single tokens that no row keeps, by
  gathering the other rows of the weight, and rows whose coefficient is zero.

With a mask the third product with the head (the backward's logits) is not needed: the forward keeps the safe entries of
exp(z − max z), four bytes each, up to KEPT_BYTES, and the backward writes them out as a dense gradient. Rows without
room, and all rows without a mask, are computed again. The backward takes stretches of the vocabulary, not of the rows:
one product then finishes a stretch of the weight's gradient, and the running sum is only as large as the hidden states.

Products take bf16 where both inputs are bf16, else float32, and add up in float32. Kept entries and the gradient by the
logits have the products' dtype. The sampled token's own gradient, c (1 − p), is made from its log-prob instead. Every
sum has a fixed order, so results are the same to the bit each time.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tailrl.kernels.cuda_passes import KeptEntries, Pushes, gradients, row_sums
from tailrl.kernels.row_sums import outputs
from tailrl.objective.safe_set import TokenLogprobs


def constrained_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    tokens_T: Tensor,
    log_rho: float | Tensor,
    temperature: float = 1.0,
    paper_fill: bool = False,
) -> TokenLogprobs:
    """`logprobs.constrained_logprobs` of finite inputs, neither float64, with the rule min-p.

    `log_rho` is ln ρ, one for all rows or [T, 1]; −inf is the full vocabulary.
    """
    log_rho_T = torch.as_tensor(log_rho, dtype=torch.float32, device=hidden_TH.device)
    log_rho_T = log_rho_T.reshape(-1).expand(len(hidden_TH)).contiguous()
    keep = torch.is_grad_enabled() and (hidden_TH.requires_grad or weight_VH.requires_grad)
    inputs = (hidden_TH, weight_VH, tokens_T, log_rho_T, temperature, paper_fill, keep)
    return TokenLogprobs(*_ConstrainedLogprobs.apply(*inputs))  # type: ignore[no-untyped-call]


class _ConstrainedLogprobs(torch.autograd.Function):
    """The fields of TokenLogprobs as autograd sees them: the first has a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        tokens_T: Tensor,
        log_rho_T: Tensor,
        temperature: float,
        paper_fill: bool,
        keep: bool,
    ) -> tuple[Tensor, ...]:
        hidden, weight = _operands(hidden_TH, weight_VH)
        sums, kept = row_sums(hidden, weight, tokens_T, log_rho_T, temperature, keep)
        logp_T, norm_T, rest = outputs(sums, len(weight), paper_fill)
        ctx.mark_non_differentiable(*rest)
        ctx.set_materialize_grads(False)
        inside_T = tokens_T.masked_fill(rest[-1], -1)
        # 1 − p of the sampled token, not its log-prob, which the caller may change in place.
        rows = (inside_T, sums.max_T, sums.cut_T, norm_T, -logp_T.expm1())
        ctx.save_for_backward(hidden_TH, weight_VH, *rows, *(getattr(kept, name) for name in KeptEntries.__slots__))
        ctx.settings = (temperature, paper_fill)
        return logp_T, *rest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad_T is None:
            return (None,) * 7
        hidden_TH, weight_VH, tokens_T, max_T, cut_T, norm_T, rest_T, *kept = ctx.saved_tensors
        temperature, paper_fill = ctx.settings
        # A token outside the set sends no gradient; with the paper's fill it still pushes safe logits down.
        inside_T = grad_T.masked_fill(tokens_T < 0, 0.0) / temperature
        scale_T = -grad_T / temperature if paper_fill else -inside_T
        pushes = Pushes(tokens_T, max_T, cut_T, norm_T, scale_T, inside_T * rest_T)
        hidden, weight = _operands(hidden_TH, weight_VH)
        wanted = ctx.needs_input_grad[:2]
        d_hidden, d_weight = gradients(hidden, weight, pushes, KeptEntries(*kept), temperature, wanted)
        return (
            None if d_hidden is None else d_hidden.to(hidden_TH.dtype),
            None if d_weight is None else d_weight.to(weight_VH.dtype),
            *(None,) * 5,
        )


def _operands(hidden_TH: Tensor, weight_VH: Tensor) -> tuple[Tensor, Tensor]:
    """Both factors in the dtype of the products."""
    narrow = hidden_TH.dtype == weight_VH.dtype == torch.bfloat16
    dtype = torch.bfloat16 if narrow else torch.float32
    return hidden_TH.to(dtype).contiguous(), weight_VH.to(dtype).contiguous()

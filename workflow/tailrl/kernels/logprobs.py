"""The constrained log-prob from hidden states, in chunks of rows, for training; it never holds tokens × vocabulary.

`constrained_logprobs` equals `safe_set.token_logprobs` of logits = hidden @ weightᵀ / temperature. That plain function
is the definition, and tests hold this one to it.

Row t of the gradient by the logits is c_t (1[k = a_t] − p_tk) on the safe set and exactly zero off it. The coefficient
c_t (the advantage times a weight made from these log-probs) is known in the backward only, which also needs p. At
ρ = e⁻¹³ the safe set is some 6 % of a vocabulary of 49,152. So the forward keeps only its entries of exp(z − max z),
five bytes each, and both products of the backward are sparse sums over them: most of two thirds of the matrix work is
spared. Where a chunk's safe sets are too large for that to pay, as with the full vocabulary, the backward computes the
chunk again with dense products. Rows with coefficient zero (no advantage, a rejected sequence) are skipped either way.

Logits are float32, or float64 where an input is. On a CUDA device `kernels.cuda` takes over, except for float64 and for
rules other than full and min_p; there every chunk is computed again.
"""

from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tailrl.kernels.cpu_chunks import (
    Entries,
    GradientSums,
    KeptEntries,
    Operands,
    add_dense,
    add_entries,
    chunk_sums,
    chunks,
)
from tailrl.kernels.row_sums import RowSums, outputs
from tailrl.kernels.sizes import KEPT_BYTES
from tailrl.objective.safe_set import TokenLogprobs, check_rows, checked
from tailrl.runtime.errors import ConfigurationError, DataError, NumericalError


def constrained_logprobs(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    tokens_T: Tensor,
    rule: str,
    threshold: float | Tensor | None = None,
    temperature: float = 1.0,
    paper_fill: bool = False,
) -> TokenLogprobs:
    """Constrained log-probs of the sampled tokens; `logp_T` carries the gradient to the hidden states and the weight.

    Args:
        hidden_TH: floating [T, H], last hidden states.
        weight_VH: floating [V, H], the head's weight.
        tokens_T: int64 [T], the sampled tokens.
        rule: a key of `safe_set.RULES`.
        threshold: ln ρ, k or p, by the rule; one for all rows or [T, 1].
        temperature: divides the logits, before the rule is applied.
        paper_fill: score as the paper does, with a logit of −50 for every token outside the set.

    Raises:
        NumericalError: a hidden state, the weight or a logit is not finite.
        StudyError: an unknown rule, a threshold, token or temperature that is missing or impossible, rows that are not
            packed, or a weight of another width.
    """
    check_rows(hidden_TH, tokens_T, len(weight_VH))
    if weight_VH.shape[1:] != hidden_TH.shape[1:]:
        raise DataError(
            f"hidden states {list(hidden_TH.shape)} and the head's weight {list(weight_VH.shape)} do not fit"
        )
    if not temperature > 0:
        raise ConfigurationError(f"temperature must be above 0, not {temperature:g}")
    threshold = checked(rule, threshold)
    for name, tensor in (("head's weight", weight_VH), ("policy's last hidden states", hidden_TH)):
        # A sum is not finite where a term is not: one cheap pass.
        if not torch.isfinite(tensor.detach().sum(dtype=torch.promote_types(tensor.dtype, torch.float32))):
            raise NumericalError(f"NaN or Inf in the {name}")
    float64 = torch.float64 in (hidden_TH.dtype, weight_VH.dtype)
    if hidden_TH.is_cuda and rule in ("full", "min_p") and not float64:
        from tailrl.kernels import cuda  # a CPU needs no Triton

        cut = -torch.inf if rule == "full" else threshold
        return cuda.constrained_logprobs(hidden_TH, weight_VH, tokens_T, cut, temperature, paper_fill)
    dtype = torch.float64 if float64 else torch.float32
    threshold_T1 = torch.as_tensor(threshold, dtype=dtype, device=hidden_TH.device).expand(len(hidden_TH), 1)
    keep = torch.is_grad_enabled() and (hidden_TH.requires_grad or weight_VH.requires_grad)
    inputs = (hidden_TH, weight_VH, tokens_T, threshold_T1, rule, temperature, paper_fill, keep)
    return TokenLogprobs(*_ConstrainedLogprobs.apply(*inputs))  # type: ignore[no-untyped-call]


class _ConstrainedLogprobs(torch.autograd.Function):
    """The fields of TokenLogprobs as autograd sees them: the first has a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        tokens_T: Tensor,
        threshold_T1: Tensor,
        rule: str,
        temperature: float,
        paper_fill: bool,
        keep: bool,
    ) -> tuple[Tensor, ...]:
        operands = _operands(hidden_TH, weight_VH, temperature)
        weight = operands.weight_VH
        rows_T, ways = RowSums.room(len(hidden_TH), weight), list[str]()
        kept = KeptEntries(len(hidden_TH), weight, KEPT_BYTES if keep and rule != "full" else 0)
        for rows, buffer in chunks(len(hidden_TH), weight):
            scaled_CH = operands.scaled(rows)
            chunk, entries = chunk_sums(scaled_CH, weight, tokens_T[rows], rule, threshold_T1[rows], buffer)
            rows_T.write(rows, chunk)
            ways.append("dense" if entries is None else "kept" if kept.add(entries) else "sparse")
            del chunk, entries  # before the next chunk asks for memory
        logp_T, norm_T, rest = outputs(rows_T, len(weight), paper_fill)
        ctx.mark_non_differentiable(*rest)
        ctx.set_materialize_grads(False)
        # Saved as tensors, not as attributes, so that autograd frees the entries after the backward.
        stored = kept.written()
        ctx.save_for_backward(hidden_TH, weight_VH, tokens_T, threshold_T1, rows_T.max_T, norm_T, rest[-1], *stored)
        ctx.ways, ctx.ends = ways, kept.ends
        ctx.settings = (rule, temperature, paper_fill)
        return logp_T, *rest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad_T is None:
            return (None,) * 8
        hidden_TH, weight_VH, tokens_T, threshold_T1, max_T, norm_T, outside_T, row_m, exp_m, count_SV = (
            ctx.saved_tensors
        )
        rule, temperature, paper_fill = ctx.settings
        operands = _operands(hidden_TH, weight_VH, temperature)
        weight = operands.weight_VH
        # A token outside the set sends no gradient; with the paper's fill it still pushes safe logits down.
        inside_T = grad_T.masked_fill(outside_T, 0.0)
        factor_T = -(grad_T if paper_fill else inside_T)
        gradients = GradientSums(
            torch.zeros_like(hidden_TH, dtype=weight.dtype) if ctx.needs_input_grad[0] else None,
            torch.zeros_like(weight) if ctx.needs_input_grad[1] else None,
        )
        kept = (
            Entries(row_m[start:end], exp_m[start:end], count_V)
            for (start, end), count_V in zip(pairwise(ctx.ends), count_SV, strict=False)
        )
        dense_T = torch.zeros_like(outside_T)
        for (rows, buffer), way in zip(chunks(len(hidden_TH), weight, "sparse" in ctx.ways), ctx.ways, strict=True):
            active_C = factor_T[rows] != 0
            if way == "dense":
                dense_T[rows] = active_C
                continue
            entries = next(kept) if way == "kept" else None
            if active_C.any():
                scaled_CH = operands.scaled(rows)
                if entries is None:
                    inputs = (scaled_CH, weight, tokens_T[rows], rule, threshold_T1[rows], buffer)
                    entries = cast(Entries, chunk_sums(*inputs)[1])
                scale_C = factor_T[rows] * (-norm_T[rows]).exp()
                add_entries(gradients, entries, scale_C, scaled_CH, weight, rows)
        del buffer
        add_dense(gradients, dense_T, factor_T, max_T + norm_T, rule, threshold_T1, operands)
        gradients.add_chosen(inside_T, tokens_T, operands)
        d_hidden, d_weight = gradients.hidden_TH, gradients.weight_VH
        return (
            None if d_hidden is None else d_hidden.div_(temperature).to(hidden_TH.dtype),
            None if d_weight is None else d_weight.to(weight_VH.dtype),
            *(None,) * 6,
        )


def _operands(hidden_TH: Tensor, weight_VH: Tensor, temperature: float) -> Operands:
    """Operands with the weight in the dtype of the logits: float32, or float64 where an input is."""
    dtype = torch.float64 if torch.float64 in (hidden_TH.dtype, weight_VH.dtype) else torch.float32
    return Operands(hidden_TH, weight_VH.to(dtype), temperature)

"""A row's sums, which every way to compute the constrained log-prob finds, and the outputs that follow from them."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from tailrl.objective.safe_set import PAPER_FILL
from tailrl.runtime.errors import NumericalError


@dataclass(frozen=True, slots=True)
class RowSums:
    """The forward's sums of T rows, over e = exp(z − max z); all [T]."""

    max_T: Tensor  # the largest logit
    cut_T: Tensor  # the smallest safe logit
    chosen_T: Tensor  # the sampled token's logit
    all_T: Tensor  # Σ e over the vocabulary
    safe_T: Tensor  # Σ e over the safe set
    moment_T: Tensor  # Σ e (z − max z) over the safe set
    kept_vocab_T: Tensor  # int64, size of the safe set

    @classmethod
    def room(cls, rows: int, like: Tensor) -> Self:
        """Unwritten sums of `rows` rows, with the dtype and device of `like`."""
        *floats, kept = cls.__slots__
        return cls(**{name: like.new_empty(rows) for name in floats}, **{kept: like.new_empty(rows, dtype=torch.int64)})

    def write(self, rows: slice, part: "RowSums") -> None:
        """Write the sums of some rows."""
        for name in self.__slots__:
            getattr(self, name)[rows] = getattr(part, name)


def outputs(sums: RowSums, vocabulary: int, paper_fill: bool) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """The log-probs of T rows, without gradient.

    Args:
        sums: of the rows.
        vocabulary: V, tokens of a row.
        paper_fill: score as the paper does, with a logit of −50 for every token outside the set.

    Returns:
        log π^mp of the sampled tokens, 0 outside the set without the fill; the log of the denominator of exp(z − max z)
        in it; the other fields of TokenLogprobs in their order: [T] each.

    Raises:
        NumericalError: a sum is not finite.
    """
    if not torch.isfinite(sums.max_T + sums.chosen_T + sums.all_T + sums.moment_T).all():
        raise NumericalError("a logit of the policy is not finite, although its hidden states and its head are")
    # Relative to the largest logit: a log-prob near 0 is then precise relative to itself, not to the logits.
    chosen_T, log_safe_T, log_all_T = sums.chosen_T - sums.max_T, sums.safe_T.log(), sums.all_T.log()
    outside_T = sums.chosen_T < sums.cut_T
    if paper_fill:
        pruned_T = (vocabulary - sums.kept_vocab_T).to(log_safe_T.dtype)
        filled_T = PAPER_FILL - sums.max_T
        norm_T = torch.logaddexp(log_safe_T, pruned_T.log() + filled_T)
        logp_T = torch.where(outside_T, filled_T, chosen_T) - norm_T
    else:
        norm_T = log_safe_T
        logp_T = (chosen_T - norm_T).masked_fill(outside_T, 0.0)
    entropy_T = log_safe_T - sums.moment_T / sums.safe_T
    return logp_T, norm_T, (chosen_T - log_all_T, log_safe_T - log_all_T, sums.kept_vocab_T, entropy_T, outside_T)

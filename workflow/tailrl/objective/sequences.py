"""Packed tokens of several sequences: checks, products, limits, and sums, means and extremes over each sequence."""

import torch
from torch import Tensor

from tailrl.runtime.errors import DataError


def check_logprobs(logp_T: Tensor) -> None:
    """Raises StudyError where a log-prob is above 0 by more than rounding: a probability, or a logit."""
    if (logp_T > 0.01).any():
        raise DataError(f"log-probs are at most 0, and one is {logp_T.max().item():.3g}: are these probabilities?")


def check_packed(count: int, sequence_T: Tensor, **others: Tensor) -> None:
    """Raises StudyError where tensors do not have one entry a token, or tokens belong to none of `count` sequences."""
    if sequence_T.dim() != 1 or any(other.shape != sequence_T.shape for other in others.values()):
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in {"sequence_T": sequence_T, **others}.items())
        raise DataError(f"one entry a token is needed, [T], not {shapes}: of a padded batch take x[mask]")
    if sequence_T.dtype not in (torch.int64, torch.int32) or ((sequence_T < 0) | (sequence_T >= count)).any():
        raise DataError(f"sequence_T must hold each token's sequence, whole numbers from 0 to {count - 1}")


def times(left: Tensor, right: Tensor) -> Tensor:
    """The product of two weights, where a zero wins over an infinity: what is dropped weighs 0, whatever its ratio."""
    product = left * right
    return product.masked_fill(((left == 0) & right.isinf()) | ((right == 0) & left.isinf()), 0.0)


def limited(log_ratio: Tensor, limit: float | None) -> Tensor:
    """Log-ratios within ± `limit` nats, without gradient beyond it, as verl and SkyRL clamp them; None: as they are."""
    return log_ratio if limit is None else log_ratio.clamp(-limit, limit)


def sequence_sum(values_T: Tensor, sequence_T: Tensor, count: int) -> Tensor:
    """Sums of per-token values [T] over N = `count` sequences: [N]."""
    return torch.zeros(count, dtype=values_T.dtype, device=values_T.device).index_add(0, sequence_T, values_T)


def sequence_mean(values_T: Tensor, sequence_T: Tensor, count: int) -> Tensor:
    """Means of per-token values [T] over N = `count` sequences: [N]; 0 for a sequence without a token."""
    tokens_N = sequence_sum(torch.ones_like(values_T), sequence_T, count)
    return sequence_sum(values_T, sequence_T, count) / tokens_N.clamp(min=1)


def sequence_any(flags_T: Tensor, sequence_T: Tensor, count: int) -> Tensor:
    """Whether any token of a sequence carries the flag: bool [N]."""
    return sequence_sum(flags_T.float(), sequence_T, count) > 0


def sequence_max(values_T: Tensor, sequence_T: Tensor, count: int) -> Tensor:
    """Largest per-token value [T] of each of N = `count` sequences: [N]; 0 for a sequence without a token."""
    most_N = torch.full((count,), -torch.inf, dtype=values_T.dtype, device=values_T.device)
    most_N = most_N.scatter_reduce(0, sequence_T.long(), values_T, "amax")
    return most_N.masked_fill(most_N.isneginf(), 0.0)

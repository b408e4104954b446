"""What a log says of each sampled token, from whole distributions: log-probs, largest log-probs, rank."""

from typing import NamedTuple

import torch
from torch import Tensor

from tailrl.objective.safe_set import safe_set, set_size
from tailrl.probes.distributions.measure import row_chunks


class TokenColumns(NamedTuple):
    """Of T sampled tokens, float64 on the CPU. `diagnosis.log.LoggedRow` says what each is; logs are in nats."""

    trainer_T: Tensor
    trainer_top_T: Tensor
    sampler_T: Tensor
    sampler_top_T: Tensor
    again_T: Tensor
    rank_T: Tensor
    trainer_set_T: Tensor
    sampler_set_T: Tensor


def token_columns(
    trainer_TV: Tensor, sampler_TV: Tensor, again_TV: Tensor, tokens_T: Tensor, log_kept_T: Tensor, log_rho: float
) -> TokenColumns:
    """The columns of the sampled tokens, computed in float64. Equal logits give equal numbers, bit for bit.

    Args:
        trainer_TV: float32, finite, after the temperature: the trainer's logits.
        sampler_TV: likewise, the engine's.
        again_TV: likewise, the trainer's with its sequences packed in another way.
        tokens_T: int64, the sampled tokens.
        log_kept_T: float64, nats: log Z' of the tokens that the engine samples from. The sampler's log-probs are those
            of its distribution within them.
        log_rho: ln ρ of the min-p sets whose sizes are logged.
    """
    parts = []
    for rows in row_chunks(trainer_TV):
        chosen_R1 = tokens_T[rows, None]
        trainer_R, trainer_top_R = _log_probs(trainer_TV[rows], chosen_R1)
        sampler_R, sampler_top_R = (logp_R - log_kept_T[rows] for logp_R in _log_probs(sampler_TV[rows], chosen_R1))
        again_R, _ = _log_probs(again_TV[rows], chosen_R1)
        rank_R = (trainer_TV[rows] > trainer_TV[rows].gather(-1, chosen_R1)).sum(-1).double()
        sets = [safe_set(side_TV[rows], "min_p", log_rho) for side_TV in (trainer_TV, sampler_TV)]
        sizes = (set_size(set_RV, "min_p").double() for set_RV in sets)
        parts.append(TokenColumns(trainer_R, trainer_top_R, sampler_R, sampler_top_R, again_R, rank_R, *sizes))
    return TokenColumns(*map(torch.cat, zip(*parts, strict=True)))


def _log_probs(logits_RV: Tensor, chosen_R1: Tensor) -> tuple[Tensor, Tensor]:
    """The log-prob of the chosen token and the largest log-prob, float64 [R]."""
    exact_RV = logits_RV.double()
    norm_R = exact_RV.logsumexp(-1)
    return exact_RV.gather(-1, chosen_R1)[:, 0] - norm_R, exact_RV.amax(-1) - norm_R

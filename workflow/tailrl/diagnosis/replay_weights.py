"""The objective's own weight of each token of a log: of a correction, of DVP, and of a loss of the ratio."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tailrl.artifacts.metrics import FloatArray
from tailrl.config.arm import Clip, Correction
from tailrl.config.vocabulary import Vocabulary
from tailrl.diagnosis.replay_sums import SoundTokens
from tailrl.objective.corrections import weigh
from tailrl.objective.ratio_losses import RATIO_LOSSES, RatioTokens
from tailrl.objective.safe_set import safe_set
from tailrl.runtime.errors import StudyError

ReplaySettings = Correction | Vocabulary | Clip


@dataclass(frozen=True, slots=True)
class TokenWeights:
    """Weights of T tokens; `ratio_X`: the weights whose mean over the batch divides them, None without `normalise`."""

    weight_T: FloatArray
    ratio_X: FloatArray | None = None


def by_advantage(settings: ReplaySettings) -> bool:
    """Whether a weight depends on the advantage's sign."""
    if isinstance(settings, Clip):
        return settings.loss != "cispo"
    return isinstance(settings, Correction) and any(rule.when != "always" for rule in settings.reject)


def token_weights(tokens: SoundTokens, settings: ReplaySettings) -> TokenWeights | None:
    """Each token's weight; None: one overflows. DVP keeps what lies in both sides' sets."""
    if isinstance(settings, Vocabulary):
        return TokenWeights(_dvp(tokens, settings))
    names = ("sequence_T", "infer_T", "advantage_T", "moved_T")
    sequence_T, infer_T, advantage_T, moved_T = (torch.from_numpy(getattr(tokens, name)) for name in names)
    delta_T = torch.from_numpy(tokens.train_T - tokens.infer_T)
    if isinstance(settings, Clip):
        weight_T = _gradient(delta_T + moved_T, advantage_T, sequence_T, tokens.count, settings)
        return TokenWeights(weight_T.numpy()) if weight_T.isfinite().all() else None
    try:
        found = weigh(delta_T, moved_T, sequence_T, tokens.count, settings, infer_T, advantage_T)
    except StudyError:  # of a weight that overflows: all else was checked before
        return None
    return TokenWeights(found.weight_T.numpy(), found.ratio_X.numpy() if settings.normalise else None)


def _gradient(ratio_T: Tensor, advantage_T: Tensor, sequence_T: Tensor, count: int, clip: Clip) -> Tensor:
    """The factor of A ∇ log π in the gradient of a loss of the ratio to the sampler, exp(`ratio_T`).

    The term is linear in A for a given sign, so A is ±1 here; where A is 0 nothing is learned, and it counts as −1.
    """
    sign_T = torch.where(advantage_T > 0, 1.0, -1.0).to(ratio_T)
    log_T = ratio_T.requires_grad_()  # Δ and log π differ by a constant
    bounds, limit = (clip.low, clip.high), clip.log_ratio_limit
    tokens = RatioTokens(log_T, log_T, sign_T, sequence_T, count, bounds, limit, dual=clip.dual)
    term_T, _ = RATIO_LOSSES[clip.loss](tokens)
    [gradient_T] = torch.autograd.grad(term_T.sum(), log_T)
    return gradient_T * sign_T


def _dvp(tokens: SoundTokens, settings: Vocabulary) -> FloatArray:
    kept_T = np.ones(len(tokens.train_T), bool)
    for logp_T, top_T in ((tokens.train_T, tokens.train_top_T), (tokens.infer_T, tokens.infer_top_T)):
        pair_T2 = torch.from_numpy(np.stack([np.nan_to_num(top_T), logp_T], 1))
        kept_T &= safe_set(pair_T2, settings.rule, settings.threshold(1))[:, 1].numpy()
    return kept_T.astype(np.float64)

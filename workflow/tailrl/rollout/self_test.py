"""Self-tests of engines: recorded log-probs against the trainer's bits, or against the engine's own logits."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tailrl.kernels.batch_invariant import uneven_lengths
from tailrl.kernels.exact_logprobs import Scoring, exact_logprobs
from tailrl.kernels.packing import pack_batch
from tailrl.model.forward import head_size, head_weight, hidden_states, key_heads
from tailrl.objective.safe_set import safe_set, set_size
from tailrl.rollout import Decoding
from tailrl.rollout.types import Request, Rollout
from tailrl.runtime.errors import ModelError

SEQUENCES = 96
TOKENS = 24
TESTED_TOKENS = 32
"""Longest response of a test of an engine against its own logits: it keeps a row of V numbers for each token."""
ON_GPU = "; run it without a GPU (CUDA_VISIBLE_DEVICES= before the command), where it is exact, or with another engine"

Generate = Callable[[Sequence[Request], Decoding], list[Rollout]]


@torch.no_grad()
def self_test(generate: Generate, trainer: PreTrainedModel, requests: Sequence[Request], decoding: Decoding) -> float:
    """Check that the trainer's packed forward gives every sampled token the bits that it was sampled with.

    The requests are sampled together, repeated under other seeds, and one of them alone. The trainer scores the
    responses all in one row, in another order, and three at a time. Responses are short here; attention of
    one sequence is tried at every multiple of 32 tokens that the requests can reach.

    Returns:
        0, the largest difference in nats.

    Raises:
        StudyError: a bit differs: the operators are not batch-invariant on this machine.
    """
    like, where = head_weight(trainer), ON_GPU if head_weight(trainer).is_cuda else ""
    shapes = (trainer.config.num_attention_heads, key_heads(trainer.config), head_size(trainer.config))
    longest = max(len(request.prompt_tokens) for request in requests) + decoding.max_new_tokens
    if uneven := uneven_lengths(*shapes, like, longest):
        raise ModelError(
            f"the engine is not exact on this machine: attention over {uneven[0]} tokens, one of {len(uneven)} such "
            f"lengths, has other bits than beside later ones{where}"
        )
    repeats = -(-SEQUENCES // len(requests))
    tested = [replace(request, seed=request.seed + turn) for turn in range(repeats) for request in requests]
    short = replace(decoding, max_new_tokens=min(decoding.max_new_tokens, TOKENS))
    sampled = list(zip(tested, generate(tested, short), strict=True))
    few = sampled[: len(requests)]
    alone = [(tested[0], generate(tested[:1], short)[0])]
    for group in (sampled[::-1], alone + few[::-1], *(few[i : i + 3] for i in range(0, len(few), 3))):
        wrong = differing_tokens(trainer, group, short)
        if wrong:
            raise ModelError(
                f"the engine is not exact on this machine: {wrong} of the trainer's log-probs differ from the engine's "
                f"in a packed row of {len(group)} responses{where}"
            )
    return 0.0


@torch.no_grad()
def differing_tokens(trainer: PreTrainedModel, sampled: Sequence[tuple[Request, Rollout]], decoding: Decoding) -> int:
    """Number of tokens whose log π^mp, log Z or |V_S| has other bits in the trainer, scored in one packed row."""
    rollouts = [rollout for _, rollout in sampled]
    weight_VH = head_weight(trainer)
    batch = pack_batch([r.prompt_tokens for r in rollouts], [r.tokens for r in rollouts], weight_VH.device)
    hidden_TH = hidden_states(trainer, batch.tokens_P, batch.packing)[batch.predict_T]
    threshold_N = torch.tensor([request.threshold for request, _ in sampled], device=weight_VH.device)
    threshold_T1 = threshold_N[batch.sequence_T, None]
    where = (batch.of_tokens([request.seed for request, _ in sampled]), batch.positions())
    scoring = Scoring(decoding.rule, decoding.temperature, disturbance=decoding.disturbance)
    scored = exact_logprobs(hidden_TH, weight_VH, batch.targets_T, threshold_T1, scoring, *where)
    same_T = np.ones(len(batch.targets_T), bool)
    for name, values_T in (
        ("logp_sampler_T", scored.logp_T),
        ("log_kept_sampler_T", scored.log_kept_T),
        ("kept_vocab_sampler_T", scored.kept_vocab_T.int()),
    ):
        sampler_T = np.concatenate([getattr(rollout, name) for rollout in rollouts])
        same_T &= sampler_T.view(np.int32) == values_T.numpy(force=True).view(np.int32)
    return int((~same_T).sum())


def shortened(decoding: Decoding) -> Decoding:
    """The decoding of a test of an engine against its own logits."""
    return replace(decoding, max_new_tokens=min(decoding.max_new_tokens, TESTED_TOKENS))


def tolerance(vocabulary: int) -> float:
    """Largest accepted error, nats, of a float32 log-softmax over so many tokens.

    1e-5, or one rounding for each addition in a lane of 16 where the vocabulary is large. Measured errors were 2e-5 for
    49,152 tokens and 5e-5 for 151,936. Raw log-probs in place of processed ones would be off by −log Z, 1e-4 and more.
    """
    return max(1e-5, vocabulary / 16 * 2**-24)


def record_error(request: Request, rollout: Rollout, logits_TV: Tensor, rule: str) -> float:
    """Largest error, nats, of a rollout's log π'^mp and log Z' against a float64 log-softmax of the engine's logits.

    Args:
        request: the rollout's request.
        rollout: the engine's record of T tokens.
        logits_TV: float32, after temperature and disturbance, before the mask. The caller disturbed the engine's raw
            logits anew by the request's seed, so that noise of another response in a row is found.
        rule: of the safe set.

    Returns:
        inf where |V'_S| differs, a number is nan, or a token has no logits.
    """
    count = len(rollout.tokens)
    if len(logits_TV) != count:
        return np.inf
    safe_TV = safe_set(logits_TV, rule, request.threshold)
    exact_TV = logits_TV.double()
    log_sum_safe_T = exact_TV.masked_fill(~safe_TV, -torch.inf).logsumexp(-1)
    chosen_T = exact_TV[torch.arange(count), list(rollout.tokens)]
    logp_error_T = (chosen_T - log_sum_safe_T).numpy() - rollout.logp_sampler_T
    kept_error_T = (log_sum_safe_T - exact_TV.logsumexp(-1)).numpy() - rollout.log_kept_sampler_T
    worst = float(np.abs([logp_error_T, kept_error_T]).max())
    same_sizes = bool((set_size(safe_TV, rule).numpy() == rollout.kept_vocab_sampler_T).all())
    return worst if same_sizes and np.isfinite(worst) else np.inf

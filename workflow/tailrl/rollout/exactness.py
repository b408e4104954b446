"""The self-test of a sampler whose log-probs are to be the trainer's own, bit for bit."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from tailrl.errors import StudyError
from tailrl.operators import Scoring, exact_logprobs
from tailrl.packing import pack_batch
from tailrl.policy import head_weight, hidden_states
from tailrl.records import Request, Rollout
from tailrl.rollout import Decoding

SEQUENCES = 96
TOKENS = 24

Generate = Callable[[Sequence[Request], Decoding], list[Rollout]]


@torch.no_grad()
def self_test(generate: Generate, trainer: PreTrainedModel, requests: Sequence[Request], decoding: Decoding) -> float:
    """Whether the trainer's packed forward gives every sampled token the very bits that it was sampled with.

    The requests are sampled together with repetitions under other seeds, and one of them alone; the trainer scores
    the responses all in one row, in another order, and three at a time.

    Returns:
        0, the largest difference in nats.

    Raises:
        StudyError: a bit differs: on this machine the operators are not what they are meant to be.
    """
    repeats = -(-SEQUENCES // len(requests))
    tested = [replace(request, seed=request.seed + turn) for turn in range(repeats) for request in requests]
    short = replace(decoding, max_new_tokens=min(decoding.max_new_tokens, TOKENS))
    sampled = list(zip(tested, generate(tested, short), strict=True))
    few = sampled[: len(requests)]
    alone = [(tested[0], generate(tested[:1], short)[0])]
    for group in (sampled[::-1], alone + few[::-1], *(few[i : i + 3] for i in range(0, len(few), 3))):
        wrong = differing_tokens(trainer, group, short)
        if wrong:
            raise StudyError(
                f"the engine is not exact on this machine: {wrong} of the trainer's log-probs differ from those that "
                f"were sampled with, in a packed row of {len(group)} responses"
            )
    return 0.0


@torch.no_grad()
def differing_tokens(trainer: PreTrainedModel, sampled: Sequence[tuple[Request, Rollout]], decoding: Decoding) -> int:
    """Tokens of which the trainer's log π^mp, log Z or |V_S| has other bits than the rollout's, in one packed row."""
    rollouts = [rollout for _, rollout in sampled]
    batch = pack_batch([r.prompt_tokens for r in rollouts], [r.tokens for r in rollouts])
    hidden_TH = hidden_states(trainer, batch.tokens_P, batch.packing)[batch.predict_T]
    threshold_T1 = torch.tensor([request.threshold for request, _ in sampled])[batch.sequence_T, None]
    where = (batch.of_tokens([request.seed for request, _ in sampled]), batch.places())
    scoring = Scoring(decoding.rule, decoding.temperature, disturbance=decoding.disturbance)
    weight_VH = head_weight(trainer)
    scored = exact_logprobs(hidden_TH, weight_VH, batch.targets_T, threshold_T1, scoring, *where)
    same_T = np.ones(len(batch.targets_T), bool)
    for name, values_T in (
        ("logp_infer_T", scored.logp_T),
        ("log_kept_infer_T", scored.log_kept_T),
        ("kept_vocab_infer_T", scored.kept_vocab_T.int()),
    ):
        theirs_T = np.concatenate([getattr(rollout, name) for rollout in rollouts])
        same_T &= theirs_T.view(np.int32) == values_T.numpy().view(np.int32)
    return int((~same_T).sum())

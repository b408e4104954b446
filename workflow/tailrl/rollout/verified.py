"""Speculative verification: a fast engine proposes a whole response, and the trainer decides every token of it.

Both sides draw a token as argmax_k(log π(k) + g_k) with the same Gumbel noise g (common random numbers), a function of
the response's seed, the position and the token. Each side's draws alone are samples of its own policy. Where the two
policies are close, the draws are nearly always equal. The trainer scores the proposal in one packed forward and makes
its own draw at every position, given the tokens before it. Up to the first difference the proposal is what the trainer
would have sampled token by token. There the trainer's draw is taken, and the engine goes on from it.

So the response follows exactly the trainer's policy in its scoring pass, whatever the engine does. A bad engine costs
rounds, never a bias, and it need not return probabilities. With batch-invariant operators in the trainer
(`model.forward.make_exact`) the loss uses the very bits of the log-probs that were drawn from.

Speculative decoding accepts or resamples, which needs the engine's distribution; here two argmaxes are compared. At a
total variation distance of d, draws from shared Gumbel noise differ with a probability of at most 2 d / (1 + d).
"""

import time
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tailrl.kernels.batch_invariant import pad_rows
from tailrl.kernels.exact_logprobs import Scoring, chunked_logits
from tailrl.kernels.packing import micro_batches, pack_batch
from tailrl.model.forward import head_weight, hidden_states
from tailrl.objective.disturbance import UNDISTURBED
from tailrl.rollout import Decoding, Sampler, self_test
from tailrl.rollout.sampling import Drawn, draw, response_limits
from tailrl.rollout.types import Request, Rollout
from tailrl.tracking.metrics import VERIFY_AGREEMENT, VERIFY_PROPOSED, VERIFY_ROUNDS, VERIFY_SECONDS

VERIFIED_TOKENS = 4096
"""Most tokens in one packed row of the scoring pass."""


class VerifiedSampler:
    """A `Sampler` whose responses are the trainer's own, proposed by another sampler."""

    def __init__(
        self, proposer: Sampler, trainer: PreTrainedModel, stop_tokens: Sequence[int], max_length: int
    ) -> None:
        self.proposer = proposer
        self.trainer = trainer
        self.stop_tokens = frozenset(stop_tokens)
        self.max_length = max_length
        self.rounds, self.proposed, self.judged, self.agreed, self.seconds = 0, 0, 0, 0, 0.0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Sampler.load_weights`; only the proposer needs them."""
        self.proposer.load_weights(weights)

    def release(self) -> None:
        """See `Sampler.release`."""
        self.proposer.release()

    def self_test(self, requests: Sequence[Request], decoding: Decoding) -> float:
        """See `self_test.self_test`."""
        return self_test.self_test(self.generate, self.trainer, requests, _shared(decoding))

    def metrics(self) -> dict[str, float]:
        """The cost of the last batch; see `tailrl.tracking.metrics`."""
        judged = max(1, self.judged)
        return {
            VERIFY_ROUNDS: float(self.rounds),
            VERIFY_AGREEMENT: self.agreed / judged,
            VERIFY_PROPOSED: self.proposed / judged,
            VERIFY_SECONDS: self.seconds,
        }

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], decoding: Decoding) -> list[Rollout]:
        """See `Sampler.generate`; raises StudyError for a prompt that leaves no room for a response."""
        self.rounds, self.proposed, self.judged, self.agreed, self.seconds = 0, 0, 0, 0, 0.0
        responses = [
            _Response(request, limit)
            for request, limit in zip(requests, response_limits(requests, decoding, self.max_length), strict=True)
        ]
        shared = _shared(decoding)
        going = responses
        while going:
            proposals = self.proposer.generate([r.continued() for r in going], replace(decoding, shared_noise=True))
            begun = time.perf_counter()
            drawn = self._draw(going, proposals, shared)
            for response, proposal, tokens in zip(going, proposals, drawn, strict=True):
                agreed, proposed = response.accept(proposal.tokens, tokens), len(proposal.tokens)
                self.agreed += agreed
                self.proposed += proposed
                # Tokens after a difference are not judged: their context is not the trainer's.
                self.judged += min(agreed + 1, proposed)
            self.rounds += 1
            self.seconds += time.perf_counter() - begun
            going = [r for r in going if not r.ended(self.stop_tokens)]
        return [response.rollout(self.stop_tokens) for response in responses]

    def _draw(self, responses: Sequence["_Response"], proposals: Sequence[Rollout], decoding: Decoding) -> list[Drawn]:
        """The trainer's draws at every position of every proposal, given the proposal's tokens before it."""
        requests, proposed = [r.continued() for r in responses], [p.tokens for p in proposals]
        drawn: dict[int, Drawn] = {}
        for group in micro_batches([r.prompt_tokens for r in requests], list(map(len, proposed)), VERIFIED_TOKENS):
            row = self._draw_row([requests[i] for i in group], [proposed[i] for i in group], decoding)
            drawn.update(zip(group, row.split([len(proposed[i]) for i in group]), strict=True))
        return [drawn[i] for i in range(len(requests))]

    def _draw_row(self, requests: Sequence[Request], proposed: Sequence[Sequence[int]], decoding: Decoding) -> Drawn:
        """`_draw` for the sequences of one packed row, in order."""
        weight_VH = head_weight(self.trainer)
        batch = pack_batch([request.prompt_tokens for request in requests], proposed, weight_VH.device)
        hidden_TH = hidden_states(self.trainer, batch.tokens_P, batch.packing)[batch.predict_T]
        scoring = Scoring(decoding.rule, decoding.temperature, disturbance=decoding.disturbance)
        seeds, starts = batch.of_tokens([r.seed for r in requests]), batch.of_tokens([r.start for r in requests])
        positions = [start + position for start, position in zip(starts, batch.positions(), strict=True)]
        threshold_N = torch.tensor([request.threshold for request in requests], device=weight_VH.device)
        threshold_T1 = threshold_N[batch.sequence_T, None]
        parts = []
        for rows, logits_RV in chunked_logits(hidden_TH, weight_VH, scoring, seeds, positions):
            count = len(seeds[rows])
            missing = [0] * (len(logits_RV) - count)
            of_row = pad_rows(threshold_T1[rows]), [*seeds[rows], *missing], [*positions[rows], *missing]
            parts.append(draw(logits_RV, decoding.rule, *of_row).at(slice(count)))
        return Drawn.joined(parts)


def _shared(decoding: Decoding) -> Decoding:
    """The trainer's decoding, without a disturbance of the sampler alone."""
    return decoding if decoding.disturbance.side == "both" else replace(decoding, disturbance=UNDISTURBED)


@dataclass(slots=True)
class _Response:
    """An unfinished response: the trainer's draws so far."""

    request: Request
    limit: int
    drawn: list[Drawn] = field(default_factory=list)
    tokens: tuple[int, ...] = ()

    def continued(self) -> Request:
        """The request for the rest of the response."""
        prompt_tokens = (*self.request.prompt_tokens, *self.tokens)
        return replace(self.request, prompt_tokens=prompt_tokens, start=self.request.start + len(self.tokens))

    def accept(self, proposed: Sequence[int], drawn: Drawn) -> int:
        """Take the draws up to and including the first that differs from the proposal; returns how many agreed."""
        differs_T = drawn.token_S.cpu() != torch.tensor(proposed)
        agreed = int(differs_T.nonzero()[0]) if differs_T.any() else len(proposed)
        taken = drawn.at(slice(agreed + 1))
        self.drawn.append(taken)
        self.tokens += tuple(taken.token_S.tolist())
        return agreed

    def ended(self, stop_tokens: Set[int]) -> bool:
        """Whether the response has its end token or its largest length."""
        return self.tokens[-1] in stop_tokens or len(self.tokens) == self.limit

    def rollout(self, stop_tokens: Set[int]) -> Rollout:
        """The response with the trainer's log-probs."""
        drawn = Drawn.joined(self.drawn)
        return Rollout(
            self.request.prompt_tokens,
            self.tokens,
            drawn.logp_S.float().cpu().numpy(),
            drawn.log_kept_S.float().cpu().numpy(),
            drawn.kept_vocab_S.to(torch.int32).cpu().numpy(),
            stopped=self.tokens[-1] in stop_tokens,
        )

"""The engine of tests that are not about an engine: slow, plain, and right."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from definitions import safe_tokens

from tailrl.records import Request, Rollout

if TYPE_CHECKING:
    from torch import Tensor

    from tailrl.rollout import Decoding


class PlainSampler:
    """A sampler that is the trainer's model, run one sequence at a time with transformers' own attention.

    Whatever the trainer and this engine disagree on is therefore an error of the trainer's packing, masking or
    bookkeeping. `handed` keeps every set of weights that it was given, `tested` what it was to test itself with.
    """

    def __init__(self, policy_folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32)
        self.handed: list[dict[str, Tensor]] = []
        self.tested: list[tuple[list[Request], Decoding]] = []

    def load_weights(self, weights: Iterable[tuple[str, "Tensor"]]) -> None:
        self.handed.append({name: weight.clone() for name, weight in weights})
        self.model.load_state_dict(self.handed[-1])

    def self_test(self, requests: Sequence[Request], decoding: "Decoding") -> float:
        self.tested.append((list(requests), decoding))
        return 0.0

    def metrics(self) -> dict[str, float]:
        return {}

    def generate(self, requests: Sequence[Request], decoding: "Decoding") -> list[Rollout]:
        return [self._respond(request, decoding) for request in requests]

    def _respond(self, request: Request, decoding: "Decoding") -> Rollout:
        import torch

        from tailrl.disturbance import disturb
        from tailrl.rollout import is_kept

        generator = torch.Generator().manual_seed(request.seed)
        tokens: list[int] = []
        log_probs, log_kept, kept, logits = [], [], [], []
        while len(tokens) < decoding.max_new_tokens and self.model.config.eos_token_id not in tokens:
            with torch.no_grad():
                logits_V = self.model(input_ids=torch.tensor([[*request.prompt_tokens, *tokens]])).logits[0, -1]
            # A policy of nan still samples something, as a real engine does.
            scaled_TV = logits_V.double().nan_to_num()[None] / decoding.temperature
            drawn_V = disturb(scaled_TV, [request.seed], [len(tokens)], decoding.disturbance)[0]
            if is_kept(request.seed, len(tokens), decoding.keep_every):
                logits.append(drawn_V.float().numpy())
            probs_V = drawn_V.softmax(-1)
            safe_V = torch.tensor(safe_tokens(probs_V.tolist(), decoding.rule, request.threshold))
            masked_V = torch.where(safe_V, probs_V, 0.0)
            token = int(torch.multinomial(masked_V, 1, generator=generator))
            tokens.append(token)
            log_probs.append(float((masked_V[token] / masked_V.sum()).log()))
            log_kept.append(float(masked_V.sum().log()))
            kept.append(int((masked_V > 0).sum()))
        return Rollout(
            request.prompt_tokens,
            tuple(tokens),
            np.array(log_probs, np.float32),
            np.array(log_kept, np.float32),
            np.array(kept, np.int32),
            stopped=tokens[-1] == self.model.config.eos_token_id,
            logits_infer_KV=tuple(logits),
        )

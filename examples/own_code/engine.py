"""An engine of your own. With this file beside the Snakefile: `sampler: {engine: "engine:OneByOne", dtype: float32}`"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tailrl.objective.disturbance import disturb
from tailrl.rollout.sampling import LocalSampler, draw, stop_tokens
from tailrl.rollout.types import Rollout


class OneByOne(LocalSampler):
    """An engine: transformers' model, one response after another. The base class takes weights and gives no metrics."""

    def __init__(self, policy_folder, settings, max_length, seed, beside_trainer):  # noqa: ARG002
        config = AutoConfig.from_pretrained(policy_folder)
        self.model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, settings.dtype)).eval()
        self.stop, self.max_length = stop_tokens(policy_folder), max_length

    @torch.inference_mode()
    def generate(self, requests, decoding):
        return [self.respond(request, decoding) for request in requests]

    def respond(self, request, decoding):
        tokens, drawn = [], []
        most = min(decoding.max_new_tokens - request.start, self.max_length - len(request.prompt_tokens))
        while len(tokens) < most and not (tokens and tokens[-1] in self.stop):
            seen, position = torch.tensor([[*request.prompt_tokens, *tokens]]), [request.start + len(tokens)]
            logits = self.model(seen).logits[:, -1].float() / decoding.temperature
            logits = disturb(logits, [request.seed], position, decoding.disturbance)
            drawn.append(draw(logits, decoding.rule, torch.tensor([[request.threshold]]), [request.seed], position))
            tokens.append(int(drawn[-1].token_S))
        return Rollout(
            prompt_tokens=request.prompt_tokens,
            tokens=tuple(tokens),
            logp_sampler_T=torch.cat([one.logp_S for one in drawn]).numpy(),
            log_kept_sampler_T=torch.cat([one.log_kept_S for one in drawn]).numpy(),
            kept_vocab_sampler_T=torch.cat([one.kept_vocab_S for one in drawn]).int().numpy(),
            stopped=tokens[-1] in self.stop,
        )

    def self_test(self, requests, decoding):  # noqa: ARG002
        """Largest error of its log-probs, nats; a StudyError where that would bias ratios."""
        return 0.0

"""What every engine of our own shares: end tokens, drawing a token, collecting responses."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from tailrl.model.forward import head_size, key_heads
from tailrl.model.policy import end_of_turn, load_config, load_tokenizer, read_generation
from tailrl.objective.noise import gumbel
from tailrl.objective.safe_set import Columns, log_masses, set_size
from tailrl.rollout import Decoding, is_kept
from tailrl.rollout.types import Request, Rollout
from tailrl.runtime.errors import ConfigurationError, DataError, ModelError


@dataclass(frozen=True, slots=True)
class Drawn(Columns):
    """One sampled token of each of S rows."""

    token_S: Tensor  # int64
    logp_S: Tensor  # float32, nats: log π^mp of the token
    log_kept_S: Tensor  # float32, nats: log Z
    kept_vocab_S: Tensor  # int64: |V_S|


def draw(logits_SV: Tensor, rule: str, threshold_S1: Tensor, seeds: Sequence[int], positions: Sequence[int]) -> Drawn:
    """One token from each row's safe set: the argmax of logit plus Gumbel noise.

    Args:
        logits_SV: float32, after the temperature and any disturbance.
        rule: a key of `safe_set.RULES`.
        threshold_S1: each row's ln ρ, k or p, by the rule.
        seeds: of each row's response.
        positions: of each row's token in its response. The noise depends on seed and position alone.
    """
    safe_SV, log_sum_safe_S, log_sum_S = log_masses(logits_SV, rule, threshold_S1)
    score_SV = gumbel(seeds, positions, logits_SV.shape[1], device=logits_SV.device).add_(logits_SV)
    if rule != "full":
        score_SV.masked_fill_(~safe_SV, -torch.inf)
    token_S = score_SV.max(-1).indices  # in a half to a third of `argmax`'s time
    return Drawn(
        token_S=token_S,
        logp_S=logits_SV.gather(-1, token_S[:, None]).squeeze(-1) - log_sum_safe_S,
        log_kept_S=log_sum_safe_S - log_sum_S,
        kept_vocab_S=set_size(safe_SV, rule),
    )


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """One token of each of S sequences in flight."""

    request_S: Tensor  # int64, the request of each
    index_S: Tensor  # int64, of the token among those sampled for the request
    drawn: Drawn
    # That it was drawn from: after temperature and disturbance, before any mask. Rows of none in flight come last;
    # where no logits are kept they may lie between.
    logits_SV: Tensor


class Responses:
    """The tokens sampled for N requests, as tensors [N, longest response] on the engine's device."""

    def __init__(self, count: int, longest: int, device: torch.device | str = "cpu") -> None:
        self.length_N = torch.zeros(count, dtype=torch.int64, device=device)
        self.token_NT = torch.zeros(count, longest, dtype=torch.int64, device=device)
        self.logp_NT, self.log_kept_NT = torch.zeros(2, count, longest, device=device)
        self.kept_vocab_NT = torch.zeros(count, longest, dtype=torch.int32, device=device)
        self.logits_NK: list[list[NDArray[np.float32]]] = [[] for _ in range(count)]

    def add(self, step: DrawnStep) -> None:
        """Add one token to each of S requests."""
        where, drawn = (step.request_S, step.index_S), step.drawn
        self.length_N[step.request_S] = step.index_S + 1
        self.token_NT[where] = drawn.token_S
        self.logp_NT[where] = drawn.logp_S
        self.log_kept_NT[where] = drawn.log_kept_S
        self.kept_vocab_NT[where] = drawn.kept_vocab_S.int()

    def keep(self, requests: Sequence[Request], step: DrawnStep, every: int) -> None:
        """Keep the logits of rows at kept positions (`rollout.is_kept`)."""
        if every:
            for row, (index, token) in enumerate(zip(step.request_S.tolist(), step.index_S.tolist(), strict=True)):
                if is_kept(requests[index].seed, requests[index].start + token, every):
                    self.logits_NK[index].append(step.logits_SV[row].numpy(force=True).copy())

    def rollouts(self, requests: Sequence[Request], stop: Tensor) -> list[Rollout]:
        """One rollout per request, in order; `stop` holds the end tokens."""
        ends = set(stop.tolist())
        token_NT = self.token_NT.cpu()
        numbers = [tensor.cpu() for tensor in (self.logp_NT, self.log_kept_NT, self.kept_vocab_NT)]
        made = []
        for index, (request, length) in enumerate(zip(requests, self.length_N.tolist(), strict=True)):
            tokens = tuple(token_NT[index, :length].tolist())
            logp_T, log_kept_T, kept_vocab_T = (tensor_NT[index, :length].numpy() for tensor_NT in numbers)
            numbers_T = logp_T, log_kept_T, kept_vocab_T
            logits_KV = tuple(self.logits_NK[index])
            made.append(Rollout(request.prompt_tokens, tokens, *numbers_T, tokens[-1] in ends, logits_KV))
        return made


class LocalSampler:
    """What engines in this process have in common: a model of their own, which is handed weights and draws in steps."""

    model: PreTrainedModel
    device: torch.device
    stop: Tensor  # the end tokens, on the device
    max_length: int  # of prompt and response
    has_weights = False

    def steps(self, requests: Sequence[Request], limits: Sequence[int], decoding: Decoding) -> Iterator[DrawnStep]:
        """Yields one token of every sequence in flight at a time, until each has its end token or its limit."""
        raise NotImplementedError

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], decoding: Decoding) -> list[Rollout]:
        """See `Sampler.generate`.

        Raises:
            StudyError: a prompt without a token, or one that leaves no room for a response.
        """
        self.check_weights()
        if not requests:
            return []
        limits = response_limits(requests, decoding, self.max_length)
        responses = Responses(len(requests), max(limits), self.device)
        for step in self.steps(requests, limits, decoding):
            responses.add(step)
            responses.keep(requests, step, decoding.keep_every)
        return responses.rollouts(requests, self.stop)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Sampler.load_weights`."""
        self.model.load_state_dict(dict(weights))
        self.has_weights = True

    def check_weights(self) -> None:
        """Raises RuntimeError where none have been handed over."""
        if not self.has_weights:
            raise RuntimeError("the engine has no weights yet: call load_weights first")

    def release(self) -> None:
        """See `Sampler.release`: nothing."""

    def metrics(self) -> dict[str, float]:
        """See `Sampler.metrics`: nothing."""
        return {}


def stop_tokens(policy_folder: Path, tokenizer: PreTrainedTokenizerBase | None = None) -> list[int]:
    """End tokens: of config.json and generation_config.json, of the tokenizer, and the end of the chat template's turn.

    The tokenizer is read from the folder where none is given.

    A base model's configuration names the end of a text alone, which a chat's turn does not end with.

    Raises:
        StudyError: there is none, so that no response could ever end.
    """
    configs = [load_config(policy_folder).get_text_config(), read_generation(policy_folder)]
    found: set[int] = set()
    for config in configs:
        ids = getattr(config, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or [])
    try:
        tokenizer = tokenizer or load_tokenizer(policy_folder)
    except ModelError:
        pass  # said where prompts are encoded
    else:
        found.update(token for token in (tokenizer.eos_token_id, end_of_turn(tokenizer)) if token is not None)
    if not found:
        raise ModelError(f"{policy_folder}: its configuration names no end token, so no response could ever end")
    return sorted(found)


def response_limits(requests: Sequence[Request], decoding: Decoding, max_length: int) -> list[int]:
    """Longest response to each request, tokens; raises StudyError for a prompt that is empty or leaves no room."""
    lengths = [len(request.prompt_tokens) for request in requests]
    if min(lengths) == 0:
        raise DataError("a prompt holds no token: there is nothing to predict the first token from")
    if max(lengths) >= max_length:
        raise ConfigurationError(
            f"a prompt of {max(lengths)} tokens leaves no room in the policy's {max_length} tokens"
        )
    return [
        min(decoding.max_new_tokens - request.start, max_length - length)
        for request, length in zip(requests, lengths, strict=True)
    ]


def token_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of one token's keys and values in all layers."""
    return int(2 * config.num_hidden_layers * key_heads(config) * head_size(config) * dtype.itemsize)

"""Records log π'^mp of the sampled tokens during generation, since TRL does not pass it on."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from tailrl.objective.safe_set import at_least_float32, log_masses


class Recorder(LogitsProcessor):  # type: ignore[misc]
    """A logits processor of `generate` that changes nothing, and notes log π'^mp of every sampled token.

    It gets the model's own logits, one step at a time.
    """

    def __init__(self, log_rho: float, temperature: float) -> None:
        self.log_rho = log_rho
        self.temperature = temperature
        self.logits_NV: Tensor | None = None
        self.columns: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._note(input_ids)
        self.logits_NV = scores.detach().clone()
        return scores

    @torch.no_grad()
    def _note(self, input_ids: Tensor) -> None:
        """Notes the log-probs of the last column of tokens [N, L], under the logits of its step."""
        if self.logits_NV is not None:
            logits_NV = at_least_float32(self.logits_NV) / self.temperature
            _, log_safe_N, _ = log_masses(logits_NV, "min_p", self.log_rho)
            self.columns.append(logits_NV.gather(1, input_ids[:, -1:]).squeeze(1) - log_safe_N)

    def finish(self, tokens_NL: Tensor) -> Tensor:
        """Log π'^mp of all T sampled columns, float32 [N, T], from the tokens [N, L] that `generate` returned.

        Values after a row's end token mean nothing.
        """
        self._note(tokens_NL)
        self.logits_NV = None
        return torch.stack(self.columns, 1)


@contextmanager
def replaced(owner: Any, name: str, method: Any) -> Iterator[None]:
    """In the block, the object has this method; afterwards what it had, of its own or of its class.

    FSDP 2 gives a model a `generate` of its own, which gathers its weights.
    """
    own = vars(owner).get(name)
    setattr(owner, name, method)
    try:
        yield
    finally:
        delattr(owner, name)
        if own is not None:
            setattr(owner, name, own)


@contextmanager
def recorded_generate(model: Any, log_rho: float, temperature: float) -> Iterator[list[Tensor]]:
    """In the block, each call of `model.generate` adds its tokens' log π'^mp, float32 [N, T], to the list."""
    plain, found = model.generate, list[Tensor]()

    def generate(*args: Any, **kwargs: Any) -> Any:
        recorder = Recorder(log_rho, temperature)
        tokens_NL = plain(*args, logits_processor=LogitsProcessorList([recorder]), **kwargs)
        found.append(recorder.finish(tokens_NL))
        return tokens_NL

    with replaced(model, "generate", generate):
        yield found


@contextmanager
def recorded_vllm(engine: Any) -> Iterator[list[list[list[float]]]]:
    """In the block, each call of TRL's vLLM generation adds its tokens' log π'^mp: for each response, one a token.

    TRL makes vLLM return log-probs of the sampler's distribution (`processed_logprobs`).
    """
    plain, found = engine.generate, list[list[list[float]]]()

    def generate(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        found.append([[top[0] for top in response] for response in result[2]])
        return result

    engine.logprobs = 0  # the sampled token's alone
    with replaced(engine, "generate", generate):
        yield found

"""Shared by the tests: a policy small enough to build in a second, and an engine that samples from it exactly."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

# Read when torch is imported. Matrices this small gain nothing from threads, and on a busy machine the threads
# wait for each other: a test of one second took fifty.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
from definitions import safe_tokens

from tailrl.records import Problem, Request, Rollout
from tailrl.settings import ArithmeticTask, ScratchPolicy
from tailrl.tasks.registry import load_task

# torch and transformers take seconds to import: only the tests that use a policy pay for them.
if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from tailrl.rollout import Decoding

TINY = ScratchPolicy(vocabulary_size=600, hidden_size=64, layers=2, heads=2, intermediate_size=96, max_length=64)


class ExactSampler:
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

    def generate(self, requests: Sequence[Request], decoding: "Decoding") -> list[Rollout]:
        return [self._respond(request, decoding) for request in requests]

    def _respond(self, request: Request, decoding: "Decoding") -> Rollout:
        import torch

        from tailrl.disturbance import disturb

        generator = torch.Generator().manual_seed(request.seed)
        tokens: list[int] = []
        log_probs, log_kept, kept = [], [], []
        while len(tokens) < decoding.max_new_tokens and self.model.config.eos_token_id not in tokens:
            with torch.no_grad():
                logits_V = self.model(input_ids=torch.tensor([[*request.prompt_tokens, *tokens]])).logits[0, -1]
            # A policy of nan still samples something, as a real engine does.
            scaled_TV = logits_V.double().nan_to_num()[None] / decoding.temperature
            probs_V = disturb(scaled_TV, [request.seed], [len(tokens)], decoding.disturbance)[0].softmax(-1)
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
        )


@pytest.fixture(scope="session")
def problems() -> list[Problem]:
    return load_task(ArithmeticTask(problems=60, seed=5)).problems


@pytest.fixture(scope="session")
def tokenizer(problems: list[Problem]) -> "PreTrainedTokenizerFast":
    from tailrl.tokenizer import train_tokenizer

    return train_tokenizer(TINY.vocabulary_size, [problem.prompt + problem.solution for problem in problems])


@pytest.fixture
def model(tokenizer: "PreTrainedTokenizerFast") -> "PreTrainedModel":
    """A tiny random Llama, new for every test."""
    from tailrl.policy import create_policy

    return create_policy(TINY, tokenizer, seed=3)


@pytest.fixture(scope="session")
def policy_folder(tokenizer: "PreTrainedTokenizerFast", tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny policy as a folder, shared: read it, do not change it."""
    from tailrl.policy import create_policy, save_policy

    folder = tmp_path_factory.mktemp("policy")
    save_policy(create_policy(TINY, tokenizer, seed=3), tokenizer, folder)
    return folder


@pytest.fixture
def exact_samplers(monkeypatch: pytest.MonkeyPatch) -> list[ExactSampler]:
    """Has the training loop use an `ExactSampler`; the list holds those that were made."""
    made: list[ExactSampler] = []

    def make(settings: object, policy_folder: Path, max_length: int, seed: int) -> ExactSampler:  # noqa: ARG001
        made.append(ExactSampler(policy_folder))
        return made[-1]

    monkeypatch.setattr("tailrl.training.loop.make_sampler", make)
    return made

"""Long responses: an update's memory grows with the tokens of a micro-batch, and not with a response's square."""

import resource
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks_fixture import on_ranks
from step_fixture import DVP, make_rollouts, run_of, samples_of
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tailrl.model.forward import PACKED_ATTENTION
from tailrl.rollout.types import Rollout
from tailrl.training import step
from tailrl.training.optimizer import make_optimizer
from tailrl.training.samples import Sample
from tailrl.training.scorer import Scorer, make_scorer
from tailrl.training.step import accumulate_gradients, update
from tailrl.training.stopwatch import Stopwatch

TOKENS = 8128
VOCABULARY = 512


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trained() -> tuple[float, float]:
    """The gradient's norm of an update on a long response, and MiB that the process grew by in it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        intermediate_size=128,
        tie_word_embeddings=True,
        max_position_embeddings=64 + TOKENS,
        attn_implementation=PACKED_ATTENTION,
        **sizes,
    )
    model = LlamaForCausalLM(config)
    run = run_of({"vocabulary": DVP}, max_new_tokens=8, token_budget=8192)
    rng = np.random.default_rng(0)
    numbers = (np.full(TOKENS, -6.2, np.float32), np.zeros(TOKENS, np.float32), np.full(TOKENS, 512, np.int32))
    tokens = tuple(rng.integers(2, VOCABULARY, TOKENS).tolist())
    sample = Sample(Rollout((5,) * 64, tokens, *numbers, stopped=False), 1.0, -1.5, 0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _, norm, _ = update(model, make_optimizer(model, run.training), [sample], run, 0, Stopwatch())
    return norm, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


@pytest.mark.usefixtures("one_thread")
def test_an_update_on_eight_thousand_tokens_takes_no_square_of_them(tmp_path: Path) -> None:
    """The scores of both heads alone would take 512 MiB."""
    ((norm, mib),) = on_ranks(1, tmp_path, trained)
    assert np.isfinite(norm) and norm > 0
    assert mib < 250


class Saved:
    """Counts the bytes that the forward keeps for the backward, as long as it keeps them."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def pack(self, tensor: Tensor) -> list[Tensor]:
        held = Held([tensor])
        self.add(tensor.nbytes)
        weakref.finalize(held, self.add, -tensor.nbytes)
        return held

    def add(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)


class Held(list[Tensor]):
    """A list that can be referred to weakly."""


def most_kept(length: int, count: int = 48) -> int:
    """The most bytes that a step's gradients keep at once, for so many responses of this length."""
    run, saved, rng = run_of({}, token_budget=256), Saved(), np.random.default_rng(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 32}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, attn_implementation=PACKED_ATTENTION, **sizes))
    numbers = (np.full(length, -6.2, np.float32), np.zeros(length, np.float32), np.full(length, 512, np.int32))
    tokens = [tuple(rng.integers(2, VOCABULARY, length).tolist()) for _ in range(count)]
    rollouts = [Rollout((5, 6, 7, number // 8), own, *numbers, stopped=True) for number, own in enumerate(tokens)]
    samples = samples_of(rollouts, rng.normal(size=count).tolist(), run)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda held: held[0]):
        accumulate_gradients(model, samples, make_scorer(run), Stopwatch())
    assert saved.now == 0
    return saved.most


def test_a_step_keeps_no_more_for_long_responses_than_for_short_ones() -> None:
    short, *longer = [most_kept(length) for length in (8, 60, 240)]
    assert max(longer) < 1.05 * short


def test_freed_memory_is_given_back_before_each_micro_batch_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls, score = run_of({}, token_budget=1), list[str](), Scorer.__call__
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 32}
    config = LlamaConfig(vocab_size=2048, attn_implementation=PACKED_ATTENTION, **sizes)
    model = LlamaForCausalLM(config)

    def forward(*given: Any) -> Any:
        calls.append("forward")
        return score(*given)

    monkeypatch.setattr(step, "give_back_freed", lambda: calls.append("given back"))
    monkeypatch.setattr(Scorer, "__call__", forward)
    rollouts, advantages = make_rollouts()
    accumulate_gradients(model, samples_of(rollouts, advantages, run), make_scorer(run), Stopwatch())
    assert calls == [*["given back", "forward"] * len(rollouts), "given back"]

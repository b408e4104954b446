"""The sampler's log-probs, from transformers' generate and from TRL's vLLM generation, and the trainer's forward."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from step_fixture import RHO
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from trl_fixture import TEMPERATURE, TRAINERS, make_trainer, padded

from tailrl.integrations.trl import Correction
from tailrl.integrations.trl.head import NOT_SCORED, score_constrained
from tailrl.integrations.trl.sampler import recorded_generate
from tailrl.integrations.trl.trainer import DVPMixin
from tailrl.objective.safe_set import token_logprobs
from tailrl.runtime.errors import NumericalError

PROMPTS = [[5, 6, 7, 8], [9], [10, 11]]


@pytest.fixture
def plain(policy_folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(policy_folder)


def test_what_generate_draws_from_is_recorded(plain: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """Against the definition, a sequence at a time; the tokens are those without the recorder."""
    ids, mask = padded(PROMPTS, "left", torch.int64, 1), padded([[1] * len(p) for p in PROMPTS], "left", torch.int64)

    def generate() -> torch.Tensor:
        torch.manual_seed(1)
        return plain.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            max_new_tokens=6,
            min_p=RHO,
            temperature=TEMPERATURE,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )

    tokens_NL = generate()
    with recorded_generate(plain, math.log(RHO), TEMPERATURE) as found:
        assert torch.equal(generate(), tokens_NL)
    [logp_NT] = found
    assert torch.equal(generate(), tokens_NL) and len(found) == 1
    assert logp_NT.shape == (3, 6)
    for prompt, row_L, logp_T in zip(PROMPTS, tokens_NL[:, ids.shape[1] :], logp_NT, strict=True):
        logits_TV = plain(torch.tensor([[*prompt, *row_L.tolist()]])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        expected = token_logprobs(logits_TV.double(), row_L, "min_p", math.log(RHO))
        assert not expected.outside_T.any()
        torch.testing.assert_close(logp_T.double(), expected.logp_T, atol=2e-6, rtol=0)


class Engine:
    """TRL's vLLM generation without vLLM: two tokens a response, the second now and then without a log-prob."""

    def __init__(self, logprobs: int | None, min_p: float, **_: Any) -> None:
        assert min_p == RHO
        self.logprobs = logprobs
        self.synced = 0

    def sync_weights(self) -> None:
        self.synced += 1

    def generate(self, prompts: list[list[int]], **_: Any) -> tuple[Any, ...]:
        responses = [[20 + 7 * i, 30 + i][: 1 + i % 2] for i in range(len(prompts))]
        values = [[[-3.0 - 0.1 * i], [None if i % 4 == 1 else -2.0]][: 1 + i % 2] for i in range(len(prompts))]
        return prompts, responses, None if self.logprobs is None else values, None


@pytest.mark.parametrize("kind", TRAINERS)
def test_what_vllm_draws_from_is_kept(
    policy_folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    monkeypatch.setattr(f"trl.trainer.{kind}_trainer.VLLMGeneration", Engine)
    settings = {"vllm_importance_sampling_correction": False} if kind == "grpo" else {}
    correction = Correction(sequence="mis", sequence_threshold=1.0, veto=1e-6)
    trainer = make_trainer(kind, policy_folder, tokenizer, tmp_path, correction, use_vllm=True, **settings)
    batch = trainer._generate_and_score_completions([{"prompt": "1+2="}] * 8)
    expected = torch.tensor([[-3.0 - 0.1 * i, [0.0, math.nan, 0.0, -2.0][i % 4]] for i in range(8)])
    torch.testing.assert_close(batch["sampling_per_token_logps"], expected, equal_nan=True)
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in trainer.model.parameters())
    [weight] = trainer._metrics["train"]["rollout_corr/rollout_is_mean"]
    weights = [math.exp(delta) * (delta <= 0) for delta in deltas(trainer.model, batch)]
    assert 0 < sum(weight > 0 for weight in weights) < 8
    assert weight == pytest.approx(sum(weights) / 8, rel=1e-5)


@torch.no_grad()
def deltas(model: nn.Module, batch: dict[str, torch.Tensor]) -> list[float]:
    """Δ_y of each response, by the definition; −∞ with a token outside, 0 for a token that vLLM did not score."""
    found = []
    for i in range(8):
        prompt, response = (
            batch[f"{name}_ids"][i][batch[f"{name}_mask"][i].bool()] for name in ("prompt", "completion")
        )
        logits_TV = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        own = token_logprobs(logits_TV, response, "min_p", math.log(RHO))
        delta_T = (own.logp_T - batch["sampling_per_token_logps"][i, : len(response)]).nan_to_num(0.0)
        found.append(delta_T.masked_fill(own.outside_T, -math.inf).sum().item())
    return found


def test_logits_are_float32_whatever_the_backbone_computes_in(plain: PreTrainedModel) -> None:
    score_constrained(plain, math.log(RHO), TEMPERATURE)
    ids_NL = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    scored_NC = ids_NL[:, -2:].clone()
    scored_NC[1, 1] = NOT_SCORED
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logp_T, *_ = plain(input_ids=ids_NL, scored_NC=scored_NC)
        hidden_NLH = plain.base_model(ids_NL, use_cache=False).last_hidden_state
        assert plain(ids_NL).logits.dtype == torch.bfloat16
    logits_NLV = hidden_NLH.float() @ plain.lm_head.weight.T / TEMPERATURE
    logits_TV = torch.stack([logits_NLV[0, 1], logits_NLV[0, 2], logits_NLV[1, 1]])
    expected = token_logprobs(logits_TV, torch.tensor([7, 8, 11]), "min_p", math.log(RHO))
    assert logp_T.dtype == torch.float32
    torch.testing.assert_close(logp_T, expected.logp_T, atol=2e-6, rtol=0)


class Generates:
    """Stands for a trainer of TRL that has sampled one response of two tokens."""

    def _generate_single_turn(self, *_: object) -> list[list[int]]:
        return [[5, 6]]


@pytest.mark.parametrize("logp", [math.nan, math.inf])
def test_a_log_prob_that_is_none_is_refused(logp: float) -> None:
    """Training would take its ratio for 1, as that of a token that vLLM did not score."""

    class Trainer(DVPMixin, Generates):
        rows: list[list[float | None]]

        @contextmanager
        def _recording(self) -> Iterator[list[Any]]:
            yield [self.rows]

    trainer = object.__new__(Trainer)
    # What follows a response means nothing.
    trainer.rows = [[-1.0, None, logp]]
    assert trainer._generate_single_turn() == [[5, 6]]
    trainer.rows = [[-1.0, logp]]
    with pytest.raises(NumericalError, match="a log-prob of the sampler is not finite"):
        trainer._generate_single_turn()

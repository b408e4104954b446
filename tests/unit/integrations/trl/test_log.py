"""What a real trainer of TRL samples, logged and diagnosed: its tokens, and TRL's own metrics of the mismatch."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from trl_fixture import make_trainer, reward

from tailrl import diagnose
from tailrl.diagnosis.metrics import named_metrics
from tailrl.integrations.trl import with_log
from tailrl.runtime.errors import StudyError


class Engine:
    """TRL's vLLM generation without vLLM: responses of 1 to 3 tokens, with log-probs that are not the trainer's."""

    def __init__(self, **_: Any) -> None:
        self.calls = 0

    def sync_weights(self) -> None:
        pass

    def generate(self, prompts: list[list[int]], **_: Any) -> tuple[Any, ...]:
        self.calls += 1
        responses = [[20 + 3 * i, 30 + i, 40][: 1 + i % 3] for i in range(len(prompts))]
        values = [
            [[-3.0 - 0.1 * i - 0.2 * place] for place in range(len(tokens))] for i, tokens in enumerate(responses)
        ]
        return prompts, responses, values, None


def make_grpo(folder: Path, tokenizer: PreTrainedTokenizerFast, out: Path, **settings: Any) -> Any:
    small: dict[str, Any] = {
        "beta": 0.0, "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 4, "max_steps": 2,
        "report_to": "none", "save_strategy": "no", "use_cpu": True, "bf16": False, "disable_tqdm": True,
    }  # fmt: skip
    return with_log(GRPOTrainer, out / "log")(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=reward,
        args=GRPOConfig(output_dir=str(out), **(small | settings)),
        train_dataset=Dataset.from_dict({"prompt": ["1+2=", "30+4=", "5*6*7=", "8-9="]}),
        processing_class=tokenizer,
    )


def test_a_logged_run_and_trls_own_metrics(
    policy_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", Engine)
    trainer = make_grpo(policy_folder, tokenizer, tmp_path, use_vllm=True, logging_steps=1)
    trainer.train()
    lines = (tmp_path / "log/rank_0.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == [0] * 8 + [1] * 8 and [row["version"] for row in rows] == [0] * 8 + [1] * 8
    assert [len(row["token_ids"]) for row in rows] == [1 + i % 3 for i in range(8)] * 2
    assert rows[5]["token_ids"] == [35, 35, 40] and rows[5]["sampler_logprobs"] == pytest.approx([-3.5, -3.7, -3.9])
    assert rows[5]["text"] == tokenizer.decode([35, 35, 40], skip_special_tokens=True)
    assert sum(row["advantage"] for row in rows[:4]) == pytest.approx(0, abs=1e-5)
    history = [entry for entry in trainer.state.log_history if "sampling/sampling_logp_difference/mean" in entry]
    for step, entry in enumerate(history):
        found = diagnose([row for row in rows if row["step"] == step])
        theirs = {one.name: one.value.mean for one in named_metrics(found.measured) if one.framework == "TRL"}
        assert len(theirs) == 5
        for name, value in theirs.items():
            assert value == pytest.approx(entry[name], rel=1e-6), name
    assert {"token", "advantage", "step", "version", "text"} <= diagnose(tmp_path / "log").measured.has


def test_a_trainer_with_dvp_is_logged_too(
    policy_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """With transformers' generate, whose log-probs `with_dvp` records, and several updates on a batch."""
    trainer = make_trainer("grpo", policy_folder, tokenizer, tmp_path, num_iterations=2)
    kind = with_log(type(trainer), tmp_path / "log")
    trainer.__class__ = kind
    trainer._generate_and_score_completions([{"prompt": "1+2="}] * 8)
    found = diagnose(tmp_path / "log").measured
    assert found.sequences == 8 and not math.isnan(found.extremes["abs_logp_max"])
    assert found.extremes["abs_logp_max"] < 1e-4


def test_a_token_outside_the_safe_set_is_masked_and_no_fault(
    policy_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """The first response's first token has log-prob −inf, by the trainer's own forward; TRL asks for no old one."""
    trainer = make_trainer("grpo", policy_folder, tokenizer, tmp_path, rho=0.5, min_p=0.5)
    trainer.__class__ = with_log(type(trainer), tmp_path / "log")
    score = trainer.score_batch

    def with_another_token(batch: dict[str, Any]) -> torch.Tensor:
        response_NC = batch["completion_ids"].clone()
        response_NC[0, 0] = 3
        found: torch.Tensor = score(batch | {"completion_ids": response_NC})
        return found

    trainer.score_batch = with_another_token
    batch = trainer._generate_and_score_completions([{"prompt": "1+2="}] * 8)
    assert "old_per_token_logps" not in batch, "the batch that TRL trains on is as it was"
    rows = [json.loads(line) for line in (tmp_path / "log/rank_0.jsonl").read_text().splitlines()]
    assert rows[0]["trainer_logprobs"][0] == -math.inf and rows[0]["mask"][0] == 0
    assert all(row["mask"] == [int(value > -math.inf) for value in row["trainer_logprobs"]] for row in rows)
    found = diagnose(tmp_path / "log")
    assert found.measured.tokens == sum(sum(row["mask"]) for row in rows) < sum(len(row["mask"]) for row in rows)
    assert not any(found.measured.odd.values()) and "nan" not in [cause.name for cause in found.causes]


def test_a_batch_without_one_side_is_one_sentence(
    policy_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_grpo(policy_folder, tokenizer, tmp_path)
    with pytest.raises(StudyError, match=r"no sampling_per_token_logps, .*use_vllm=True makes TRL keep them"):
        trainer.train()
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", Engine)
    trainer = make_grpo(policy_folder, tokenizer, tmp_path, use_vllm=True, vllm_importance_sampling_correction=False)
    with pytest.raises(StudyError, match=r"no old_per_token_logps, .*vllm_importance_sampling_correction=True makes"):
        trainer.train()

"""TRL's trainer with the real vLLM in one process (colocate): what it samples, scores and is handed.

vLLM's layers for a CPU pack their weights once, and then have no loader: TRL's own hand-over, one tensor at a time,
ends in vllm/model_executor/layers/linear.py with "no attribute 'weight_loader'". Here vLLM reloads all of them instead.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from trl_fixture import TRAINERS, make_trainer

import tailrl.rollout.vllm  # noqa: F401 - the environment that vLLM reads
from tailrl.integrations.trl import Correction, with_doctor

pytestmark = [pytest.mark.slow, pytest.mark.vllm]


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """TRL tells vLLM the rank by the process's environment; later tests must not inherit it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def untied(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    """The tiny policy with a head of its own: vLLM keeps its packed copy of a tied one."""
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.get_input_embeddings().weight.detach().clone())
    model.save_pretrained(tmp_path / "untied")
    tokenizer.save_pretrained(tmp_path / "untied")
    return tmp_path / "untied"


def hand_over(generation: Any) -> None:
    """TRL's `sync_weights`, by vLLM's own reload."""
    runner = generation.llm.llm_engine.model_executor.driver_worker.model_runner
    runner.reload_weights(weights_iterator=generation._iter_named_params())
    generation.llm.reset_prefix_cache()


@pytest.mark.parametrize("kind", TRAINERS)
def test_steps_with_vllm_in_the_same_process(
    untied: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine computes in bfloat16. A step moves k3 by 0.01: an engine without the new weights would show it."""
    monkeypatch.setattr("trl.generation.vllm_generation.VLLMGeneration.sync_weights", hand_over)
    settings: dict[str, Any] = {"vllm_importance_sampling_correction": False} if kind == "grpo" else {}
    trainer = make_trainer(
        kind, untied, tokenizer, tmp_path, Correction(sequence="mis"), use_vllm=True, vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.1, vllm_max_model_length=64, max_steps=4, learning_rate=0.01, max_grad_norm=100.0,
        **settings,
    )  # fmt: skip
    trainer.__class__ = with_doctor(type(trainer))
    params: list[Any] = []
    generate = trainer.vllm_generation.llm.generate

    def noted(*arguments: Any, **others: Any) -> Any:
        params.append(others["sampling_params"])
        return generate(*arguments, **others)

    trainer.vllm_generation.llm.generate = noted
    trainer.train()
    assert len(params) == 4 and all(one.min_p == trainer.args.min_p and one.logprobs == 0 for one in params)
    steps = [line for line in trainer.state.log_history if "rollout_corr/k3_kl" in line]
    assert len(steps) == 4
    for line in steps:
        assert 1e-12 < line["rollout_corr/k3_kl"] < 1e-3, steps
        assert 0 < line["dvp/kept_mass_train_mean"] < 1 and line["tailrl/lag"] == 0
        assert line["dvp/sampled_outside_train_support_fraction"] < 0.05
    trainer.vllm_generation.llm.llm_engine.engine_core.shutdown()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    assert max(line["grad_norm"] for line in steps) > 0

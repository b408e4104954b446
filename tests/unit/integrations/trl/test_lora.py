"""PEFT's adapters under TRL's trainers: the gradient of an adapter follows from that of the merged weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, TaskType
from step_fixture import DVP, make_rollouts, run_of, samples_of
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from trl_fixture import LONGEST, TEMPERATURE, batch_of, make_trainer

from tailrl.integrations.trl import Correction
from tailrl.runtime.errors import StudyError
from tailrl.training.scorer import make_scorer
from tailrl.training.step import accumulate_gradients
from tailrl.training.stopwatch import Stopwatch

LAYERS = ["q_proj", "v_proj", "down_proj"]
RANK, ALPHA = 4, 8


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(r=RANK, lora_alpha=ALPHA, task_type=TaskType.CAUSAL_LM, target_modules=LAYERS, **settings)


def adapters(model: Any) -> dict[str, Any]:
    """PEFT's layers by the name of the weight that they change."""
    inside = model.get_base_model()
    return {f"{name}.weight": layer for name, layer in inside.named_modules() if hasattr(layer, "lora_A")}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["rloo", "grpo"])
def test_gradients_are_those_of_the_merged_weights(
    model: PreTrainedModel,
    policy_folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    kind: str,
    checkpointing: bool,
) -> None:
    """W + s B A has the study's gradient G; so B has s G Aᵀ, and A has s Bᵀ G."""
    correction = Correction(sequence="mis", veto=1e-4)
    settings: dict[str, Any] = {"loss_type": "dr_grpo"} if kind == "grpo" else {}
    trainer = make_trainer(
        kind, policy_folder, tokenizer, tmp_path, correction, torch.float64, {"peft_config": lora()},
        gradient_checkpointing=checkpointing, **settings,
    )  # fmt: skip
    scale = ALPHA / RANK
    merged = model.double()
    generator = torch.Generator().manual_seed(1)
    for name, layer in adapters(trainer.model).items():
        factors = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
        for factor in factors:
            assert factor.dtype == torch.float64
            factor.data.normal_(std=0.05, generator=generator)
        weight = merged.get_parameter(name)
        weight.data += scale * factors[1].detach() @ factors[0].detach()
    rollouts, advantages = make_rollouts()
    run = run_of({"vocabulary": DVP, "correction": correction.model_dump()}, temperature=TEMPERATURE)
    accumulate_gradients(merged, samples_of(rollouts, advantages, run), make_scorer(run), Stopwatch())
    batch = batch_of(rollouts, advantages)
    if kind == "rloo":
        batch["old_logps"] = trainer.score_batch(batch).masked_fill(batch["completion_mask"] == 0, 0.0).sum(1)
        batch |= trainer._old
    (scale_of(kind) * trainer._compute_loss(trainer.model, batch)).backward()
    found = adapters(trainer.model)
    assert len(found) == 2 * len(LAYERS)
    for name, layer in found.items():
        whole = merged.get_parameter(name).grad
        assert whole is not None
        for factor, expected in (
            (layer.lora_A["default"].weight, scale * layer.lora_B["default"].weight.T @ whole),
            (layer.lora_B["default"].weight, scale * whole @ layer.lora_A["default"].weight.T),
        ):
            largest = expected.abs().max().item()
            assert largest > 0, name
            torch.testing.assert_close(factor.grad, expected, rtol=1e-5, atol=1e-6 * largest)
        assert layer.base_layer.weight.grad is None


def scale_of(kind: str) -> float:
    """What a loss is divided by, and the study's is not."""
    return LONGEST if kind == "grpo" else 1.0


def test_two_steps_change_the_adapters_alone(
    policy_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    trainer = make_trainer("grpo", policy_folder, tokenizer, tmp_path, given={"peft_config": lora()})
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    changed = {name for name, value in trainer.model.named_parameters() if not torch.equal(value, before[name])}
    assert changed and all("lora_" in name for name in changed)
    assert any(".lora_B." in name for name in changed) and any(".lora_A." in name for name in changed)
    log = [entry for entry in trainer.state.log_history if "dvp/kept_mass_train_mean" in entry]
    assert len(log) == 2 and all(abs(entry["rollout_corr/k3_kl"]) < 1e-6 for entry in log)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        # TRL itself refuses this one since 1.16.
        (LoraConfig(task_type=TaskType.CAUSAL_LM, target_modules=["q_proj", "lm_head"]), "lm_head"),
        (lora(modules_to_save=["lm_head"]), "PEFT changes the head"),
        (
            PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=2),
            "PROMPT_TUNING: tokens that PEFT",
        ),
    ],
    ids=["the head too", "a whole head", "prompt tuning"],
)
def test_adapters_that_the_objective_would_leave_out(
    policy_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, settings: Any, words: str
) -> None:
    with pytest.raises((StudyError, ValueError), match=words):
        make_trainer("grpo", policy_folder, tokenizer, tmp_path, given={"peft_config": settings})

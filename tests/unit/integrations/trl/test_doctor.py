"""Alarms inside a real trainer of TRL: those that `tailrl watch` raises on the log of the same run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer
from trl_fixture import make_trainer, reward

from tailrl.integrations.trl import with_doctor, with_log
from tailrl.integrations.trl.doctor import step_of
from tailrl.runtime.errors import StudyError
from tailrl.watch.follow import Watch

STEPS, BREAKS_AT = 9, 7


class Engine:
    """TRL's vLLM generation without vLLM: log-probs near the tiny policy's until it breaks."""

    def __init__(self, **_: Any) -> None:
        self.calls = 0

    def sync_weights(self) -> None:
        pass

    def generate(self, prompts: list[list[int]], **_: Any) -> tuple[Any, ...]:
        level = -6.5 if self.calls < BREAKS_AT else -1.0
        self.calls += 1
        responses = [[20 + (7 * self.calls + 3 * i) % 500, 30 + i, 40 + self.calls] for i in range(len(prompts))]
        return prompts, responses, [[[level]] * 3 for _ in responses], None


def make_watched(folder: Path, tokenizer: PreTrainedTokenizerFast, out: Path, **of_doctor: Any) -> Any:
    settings: dict[str, Any] = {
        "beta": 0.0, "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 4,
        "max_steps": STEPS, "report_to": "none", "save_strategy": "no", "use_cpu": True, "bf16": False,
        "disable_tqdm": True, "use_vllm": True, "logging_steps": 1, "learning_rate": 1e-6,
    }  # fmt: skip
    return with_doctor(with_log(GRPOTrainer, out / "log"), **of_doctor)(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=reward,
        args=GRPOConfig(output_dir=str(out), **settings),
        train_dataset=Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(8) for b in range(8)]}),
        processing_class=tokenizer,
    )


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", Engine)


@pytest.mark.usefixtures("stand_in")
def test_an_engine_that_breaks_raises_what_watch_raises(
    policy_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_watched(policy_folder, tokenizer, tmp_path)
    trainer.train()
    history = [line for line in trainer.state.log_history if "tailrl/alarms" in line]
    assert len(history) == STEPS
    raised = {
        (step, key.removeprefix("tailrl/alarm/"))
        for step, line in enumerate(history)
        for key in line
        if key.startswith("tailrl/alarm/")
    }
    assert (BREAKS_AT, "floor_jump") in raised and not [pair for pair in raised if pair[0] < BREAKS_AT]
    assert [line["tailrl/alarms"] for line in history] == [
        sum(step == number for number, _ in raised) for step in range(STEPS)
    ]
    judged = Watch(tmp_path / "log").look(whole=True)
    watched = {(one.step.number, alarm.name) for one in judged for alarm in one.alarms}
    assert raised == watched
    for step, line in enumerate(history):
        assert line["tailrl/mean_abs"] > 1 if step >= BREAKS_AT else line["tailrl/mean_abs"] < 1
    printed = [line for line in capsys.readouterr().err.splitlines() if "ALARM floor_jump" in line]
    assert len(printed) == 1 and printed[0].startswith(f"tailrl: step {BREAKS_AT}: ALARM floor_jump: the typical")


@pytest.mark.usefixtures("stand_in")
def test_an_alarm_can_be_silenced(policy_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    trainer = make_watched(policy_folder, tokenizer, tmp_path, without=["floor_jump"])
    trainer.train()
    assert not [line for line in trainer.state.log_history if "tailrl/alarm/floor_jump" in line]
    with pytest.raises(StudyError, match="no alarm is called flor_jump"):
        with_doctor(GRPOTrainer, without=["flor_jump"])


def test_with_dvp_a_sound_run_has_no_alarm(
    policy_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """transformers' generate is the trainer's own model; its learning rate of 0.001 is the tests'."""
    trainer = make_trainer("rloo", policy_folder, tokenizer, tmp_path, max_steps=4)
    trainer.__class__ = with_doctor(type(trainer))
    trainer.train()
    history = [line for line in trainer.state.log_history if "tailrl/alarms" in line]
    assert len(history) == 4 and all(line["tailrl/alarms"] == 0 for line in history)
    assert all(0 <= line["tailrl/k3"] < 1e-9 for line in history)


def test_rows_of_no_token_are_left_out() -> None:
    row = {"prompt": [1], "token_ids": [5, 6], "sampler_logprobs": [-1.0, -2.0], "trainer_logprobs": [-1.5, -2.0]}
    masked = row | {"prompt": [2], "mask": [0, 0]}
    step = step_of([masked, row, masked], 3)
    assert (step.number, step.responses, step.mean_abs, len(step.prompts)) == (3, 1, 0.25, 1)
    assert step_of([masked], 3).responses == 0

"""What the plugin for verl does without verl: settings, requests, rows and files of the log, the import hook."""

import asyncio
import importlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tailrl.diagnosis.diagnosis import diagnose
from tailrl.integrations.verl import log
from tailrl.integrations.verl.settings import Dvp, Log, Plugin, read_settings
from tailrl.integrations.verl.workers import KEPT, SIZE, TOP, constrain_module, training_params
from tailrl.runtime.errors import StudyError

# --- settings ---------------------------------------------------------------------------------------------


def test_settings_are_read_and_say_what_is_on() -> None:
    settings = read_settings({"dvp": {"log_rho": -13}, "log": {"folder": "tokens", "every": 10}})
    assert settings == Plugin(dvp=Dvp(log_rho=-13.0), log=Log(folder="tokens", every=10))
    assert settings.words == "DVP with ln ρ = -13, 64 responses of each 10. step logged in tokens, no alarms"
    assert read_settings({"log": {"folder": "x"}}).words.startswith("no DVP, ")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "nothing is asked of it"),
        ({}, "nothing is asked of it"),
        ({"dvp": {"rho": 0.1}}, "dvp.rho is not a known key"),
        ({"dvp": {"log_rho": 0.5}}, "dvp.log_rho"),
        ({"dvp": {"log_rho": -40}}, "dvp.log_rho"),
        ({"log": {}}, "log.folder is missing"),
        ({"log": {"folder": "x", "every": 0}}, "log.every"),
        ({"log": {"folder": "x", "format": "csv"}}, "must be one of jsonl, parquet"),
    ],
)
def test_settings_that_cannot_be_are_one_sentence(given: Any, words: str) -> None:
    with pytest.raises(StudyError, match=r"^tailrl: ") as error:
        read_settings(given)
    assert words in str(error.value) and "\n" not in str(error.value)


# --- requests ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("validate", "temperature", "pruned"),
    [(False, 1.0, True), (True, 1.0, False), (True, 0.0, False), (False, 0, False)],
)
def test_training_requests_that_sample_are_pruned(validate: bool, temperature: float, pruned: bool) -> None:
    plain = {"temperature": temperature, "top_p": 1.0}
    params = training_params(plain, {"validate": validate}, -13.0)
    assert params.get("min_p") == (math.exp(-13.0) if pruned else None)
    assert plain == {"temperature": temperature, "top_p": 1.0}, "verl shares the dictionary among requests"


def test_the_sampler_is_changed_once_however_often_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from tailrl.integrations.verl import workers

    monkeypatch.setattr(workers, "versions", lambda: "versions")
    asked: list[dict[str, Any]] = []

    class Worker:
        async def _run_agent_loop(self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **_: Any) -> None:
            assert not trajectory["validate"]
            asked.append(sampling_params)

    worker: Any = Worker()
    for log_rho in (-3.0, -1.0):
        workers.constrain_sampler(worker, log_rho)
    asyncio.run(worker._run_agent_loop({"temperature": 1.0}, trajectory={"validate": False}, agent_name="x"))
    assert asked == [{"temperature": 1.0, "min_p": math.exp(-1.0)}]


# --- the engine --------------------------------------------------------------------------------------------


def stand_in(scores_by_function: bool = True) -> Any:
    """A module with the two names that verl's has."""
    module = SimpleNamespace(logprobs_from_logits=None)

    class FSDPEngineWithLMHead:
        def prepare_model_outputs(
            self, output: Any, output_args: Any, micro_batch: Any, processor: Any
        ) -> dict[str, Any]:
            del output_args, micro_batch, processor
            labels_T = torch.zeros(len(output), dtype=torch.int64)
            return {"log_probs": module.logprobs_from_logits(output, labels_T)} if scores_by_function else {}

        def _gather_and_unpad_packed(self, values_T: torch.Tensor, pad_size: int) -> torch.Tensor:
            return values_T[: len(values_T) - pad_size]

    module.FSDPEngineWithLMHead = FSDPEngineWithLMHead
    return module


@pytest.mark.parametrize("pad_size", [None, 2])
def test_an_engine_returns_its_sets_beside_log_probs(pad_size: int | None) -> None:
    module = stand_in()
    constrain_module(module, -1.0)
    constrain_module(module, -3.0)
    rows = 5 + (pad_size or 0)
    ids = torch.nested.as_nested_tensor([torch.arange(3), torch.arange(2)], layout=torch.jagged)
    arguments = {} if pad_size is None else {"pad_size": pad_size}
    logits_TV = torch.tensor([[0.0, -2.0, -9.0]]).expand(rows, 3)
    output = module.FSDPEngineWithLMHead().prepare_model_outputs(logits_TV, arguments, {"input_ids": ids}, None)
    assert [len(row) for row in output[KEPT].unbind()] == [3, 2]
    assert set(output[SIZE].values().tolist()) == {2.0}, "the last ρ counts"
    inside = math.log(1 + math.exp(-2))
    assert output["log_probs"].tolist() == pytest.approx([-inside] * rows, abs=1e-6)
    assert output[TOP].values().tolist() == pytest.approx([-inside] * 5, abs=1e-6)
    assert output[KEPT].values().exp().tolist() == pytest.approx(
        [(1 + math.exp(-2)) / (1 + math.exp(-2) + math.exp(-9))] * 5, abs=1e-6
    )


def test_an_engine_that_scores_in_another_way_ends_the_run() -> None:
    module = stand_in(scores_by_function=False)
    constrain_module(module, -3.0)
    with pytest.raises(StudyError, match="DVP would do nothing"):
        module.FSDPEngineWithLMHead().prepare_model_outputs(torch.zeros(2, 3), {}, {}, None)


# --- the log -----------------------------------------------------------------------------------------------


def a_batch() -> log.Batch:
    def tensors(rows: list[list[float]]) -> list[torch.Tensor]:
        return [torch.tensor(row) for row in rows]

    return log.Batch(
        columns={
            "prompts": tensors([[1, 2], [3]]),
            "responses": tensors([[4, 5], [6]]),
            "rollout_log_probs": tensors([[-1.0, -0.5], [-2.0]]),
            "old_log_probs": tensors([[-1.25, -0.5], [-2.0]]),
        },
        masks=tensors([[1, 0], [1]]),
        rewards=[1.0, 0.0],
        advantages=tensors([[0.5, 0.5], [math.nan]]),
        extra={"trainer_set_size": tensors([[3.0, 4.0], [5.0]])},
        rows={"version": [2, None], "data_source": ["set", "set"]},
    )


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_file_of_the_log_is_read_by_diagnose(tmp_path: Path, form: Any) -> None:
    settings = Log(folder=str(tmp_path / "new/folder"), format=form)
    path = log.write(list(log.rows(a_batch(), [0, 1], step=3)), settings, "3")
    assert [file.name for file in path.parent.iterdir()] == [f"3.{form}"]
    measured = diagnose(path).measured
    assert (measured.sequences, measured.tokens) == (2, 2) and measured.extremes["abs_logp_max"] == 0.25
    if form == "jsonl":
        first, second = map(json.loads, path.read_text().splitlines())
        assert first == {
            "token_ids": [1, 2, 4, 5], "mask": [1, 0], "sampler_logprobs": [-1.0, -0.5], "advantage": [0.5, 0.5],
            "trainer_logprobs": [-1.25, -0.5], "trainer_set_size": [3.0, 4.0], "version": 2, "data_source": "set",
            "step": 3, "reward": 1.0, "framework": "verl",
        }  # fmt: skip
        assert second["advantage"] == [None] and second["version"] is None


def test_a_log_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StudyError, match="could not be written"):
        log.write([{"step": 1}], Log(folder=str(tmp_path / "file")), "1")


def test_responses_are_drawn_at_random_and_the_same_in_each_run_of_a_step() -> None:
    several = [log.chosen(step, range(1000), 10) for step in range(20)]
    assert all(len(set(one)) == 10 and one == sorted(one) for one in several)
    assert several == [log.chosen(step, range(1000), 10) for step in range(20)]
    assert len({tuple(one) for one in several}) == 20
    assert max(max(one) for one in several) > 900 and min(min(one) for one in several) < 100
    assert log.chosen(1, [4, 7], 10) == [4, 7]


# --- the import hook ---------------------------------------------------------------------------------------


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The plugin anew, as in a process where verl has not been imported."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "tailrl.integrations.verl.plugin", raising=False)
    yield importlib.import_module("tailrl.integrations.verl.plugin")
    sys.modules.pop("tailrl.integrations.verl.plugin", None)


def module_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("loaded = True")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)


def test_it_waits_for_a_module_and_acts_once(plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module_of(tmp_path, monkeypatch, "waited_for_by_a_test")
    seen: list[bool] = []
    monkeypatch.setitem(
        plugin.WAITED_FOR,
        "waited_for_by_a_test",
        lambda: seen.append(sys.modules["waited_for_by_a_test"].loaded),  # type: ignore[attr-defined]
    )
    importlib.import_module("json")
    assert seen == []
    importlib.import_module("waited_for_by_a_test")
    del sys.modules["waited_for_by_a_test"]
    importlib.import_module("waited_for_by_a_test")
    assert seen == [True]


def test_what_fails_there_does_not_break_the_module(
    plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module_of(tmp_path, monkeypatch, "waited_for_in_vain")

    def fail() -> None:
        raise AttributeError("verl has no such name")

    monkeypatch.setitem(plugin.WAITED_FOR, "waited_for_in_vain", fail)
    assert importlib.import_module("waited_for_in_vain").loaded
    assert "tailrl: could not add itself to waited_for_in_vain: AttributeError" in capsys.readouterr().err


def test_it_does_not_come_too_late_without_a_word(plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.v1", SimpleNamespace())
    with pytest.raises(RuntimeError, match="imported before this plugin"):
        plugin.install()

"""The numbers in which a run trains, on a CPU and on a pretended GPU: what is decided, said and set."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from step_fixture import make_rollouts, run_of, samples_of
from transformers import PreTrainedModel

from tailrl.artifacts import results
from tailrl.config.jobs import Run
from tailrl.config.sampler import SamplerSettings
from tailrl.runtime import distributed
from tailrl.runtime.errors import StudyError
from tailrl.training import step
from tailrl.training.placement import decided, is_sharded, number_formats, place, tensor_floats
from tailrl.training.stopwatch import Stopwatch

EXACT: dict[str, Any] = {"sampler": {"engine": "exact", "dtype": "float32"}}
VERIFIED: dict[str, Any] = {"sampler": {"verify": True}}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine says that it has a GPU."""
    monkeypatch.setattr(distributed, "device", lambda: torch.device("cuda"))


def dtypes(*runs: Run) -> list[str]:
    return [decided(run).training.dtype for run in runs]


def test_a_gpu_trains_in_bfloat16_unless_a_study_says_otherwise(gpu: None) -> None:  # noqa: ARG001
    assert dtypes(run_of({}), run_of({}, dtype="float32"), run_of(EXACT), run_of(VERIFIED)) == [
        "bfloat16",
        "float32",
        "float32",
        "float32",
    ]


def test_a_cpu_trains_in_float32_unless_a_study_says_otherwise() -> None:
    assert dtypes(run_of({}), run_of({}, dtype="bfloat16"), run_of(EXACT)) == ["float32", "bfloat16", "float32"]
    assert decided(run_of({})) == run_of({}, dtype="float32"), "so a checkpoint goes on, whichever of the two is said"


def test_auto_is_placed_as_float32(model: PreTrainedModel) -> None:
    place(model, run_of({}).training)
    assert not is_sharded(model)


def test_a_cpu_says_nothing_and_sets_nothing() -> None:
    with tensor_floats(SamplerSettings()):
        assert not torch.backends.cuda.matmul.allow_tf32
    assert number_formats(run_of({}, dtype="bfloat16")) is None


def test_a_gpu_says_what_it_trains_in(gpu: None) -> None:  # noqa: ARG001
    said = [number_formats(decided(run)) for run in (run_of({}), run_of({}, dtype="float32"), run_of(EXACT))]
    for sentence, words in zip(said, ("in bfloat16", "in TF32, and pads rows", "without TF32"), strict=True):
        assert sentence is not None and words in sentence


@pytest.mark.parametrize(("arm", "expected"), [({}, True), (EXACT, False)])
def test_tf32_is_the_trainers_alone(
    arm: dict[str, Any],
    expected: bool,
    model: PreTrainedModel,
    gpu: None,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine in the same process multiplies as before."""
    seen: list[bool] = []

    def noted(*_: Any) -> tuple[float, Any]:
        seen.append(torch.backends.cuda.matmul.allow_tf32)
        return 0.0, SimpleNamespace(weights=SimpleNamespace(ratio_X=None))

    monkeypatch.setattr(torch.cuda, "Event", lambda **_: SimpleNamespace(record=lambda: None))
    monkeypatch.setattr(step, "accumulate_gradients", noted)
    monkeypatch.setattr(step, "TokenTable", SimpleNamespace(joined=lambda tables: tables[0]))
    monkeypatch.setattr(step, "optimizer_step", lambda *_: 0.0)
    run = run_of(arm, dtype="float32")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step.update(model, optimizer, samples_of(*make_rollouts(), run), run, 0, Stopwatch())
    assert seen == [expected]
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize(
    ("said", "used", "fits"), [("auto", "bfloat16", True), ("auto", "float32", True), ("float32", "bfloat16", False)]
)
def test_a_report_takes_what_the_machine_decided(
    said: str, used: str, fits: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    settings = run_of({}, dtype=used)
    record = SimpleNamespace(settings=settings.model_dump(mode="json"), run=settings)
    monkeypatch.setattr(results, "read_job", lambda _: (record, {}))
    monkeypatch.setattr(results, "read_tokens", lambda *_: None)
    study: Any = SimpleNamespace(run=lambda _: run_of({}, dtype=said))
    if fits:
        assert results._read_run(study, tmp_path, "a", 0).record.settings == record.settings
    else:
        with pytest.raises(StudyError, match=r"trained with another training\.dtype than the study says"):
            results._read_run(study, tmp_path, "a", 0)

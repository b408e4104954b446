"""A job that cannot fit is refused in one sentence that says what would. GPUs are numbers here."""

from pathlib import Path

import pytest
import torch
from shaped import config_of

from tailrl.config.load import parse_study
from tailrl.config.sampler import SamplerSettings
from tailrl.planning import fits
from tailrl.planning.shapes import KNOWN, Shape
from tailrl.runtime.errors import StudyError

RUN = parse_study({"name": "s", "arms": {"a": {"sampler": {"engine": "vllm", "dtype": "bfloat16"}}}}).run("a")


def write_config(folder: Path, shape: Shape) -> Path:
    config_of(shape).save_pretrained(folder)
    return folder


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 GB."""
    monkeypatch.setattr(fits, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(fits, "_memory", lambda: 80e9)


def sentence(folder: Path, ranks: int) -> str:
    with pytest.raises(StudyError) as caught:
        fits.check_training(RUN, folder, ranks)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "ranks", "gigabytes", "enough"),
    # 16 bytes a parameter, shared by the GPUs, and 5 GB that the libraries take; vLLM's 2 are away in the update.
    [("Qwen3-8B", 1, 136, 2), ("Qwen3-14B", 1, 241, 4), ("Qwen3-14B", 2, 123, 4)],
)
@pytest.mark.usefixtures("gpu")
def test_what_does_not_fit_names_what_would(name: str, ranks: int, gigabytes: int, enough: int, tmp_path: Path) -> None:
    said = sentence(write_config(tmp_path, KNOWN[f"Qwen/{name}"]), ranks)
    assert f"does not fit {ranks} x 80 GB: weights, gradients, optimizer state and the engine take" in said
    assert f"take {gigabytes} GB of each; {enough} such devices would (--set-resources train:ranks={enough})" in said


@pytest.mark.usefixtures("gpu")
def test_what_may_fit_is_not_refused(tmp_path: Path) -> None:
    for name, ranks in (("Qwen3-1.7B", 1), ("Qwen3-4B", 1), ("Qwen3-8B", 2), ("Qwen3-14B", 4)):
        fits.check_training(RUN, write_config(tmp_path, KNOWN[f"Qwen/{name}"]), ranks)
    fits.check_sampling(SamplerSettings(dtype="bfloat16"), tmp_path)


@pytest.mark.usefixtures("gpu")
def test_an_evaluations_engine_must_fit_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "_memory", lambda: 24e9)
    folder = write_config(tmp_path, KNOWN["Qwen/Qwen3-14B"])
    with pytest.raises(StudyError, match=r"14\.8 billion .*24 GB: .* in bfloat16 take 35 GB of each; 1 of 48 GB would"):
        fits.check_sampling(SamplerSettings(dtype="bfloat16"), folder)


@pytest.mark.parametrize(
    ("name", "ranks", "gpus", "what"),
    [
        ("Qwen3-1.7B", 1, 0, "a policy of 1.7 billion parameters"),
        ("Qwen3-0.6B", 2, 2, "2 ranks"),
        ("Qwen3-0.6B", 2, 0, None),
        ("Qwen3-0.6B", 1, 2, None),
    ],
)
def test_a_torch_without_cuda_is_refused(
    name: str, ranks: int, gpus: int, what: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a policy is too large for a CPU, or ranks would leave the machine's GPUs idle; gloo alone is fine."""
    monkeypatch.setattr(fits, "attached", lambda: gpus)
    monkeypatch.setattr(fits, "device", lambda: torch.device("cpu"))
    folder = write_config(tmp_path, KNOWN[f"Qwen/{name}"])
    if what is None:
        fits.check_training(RUN, folder, ranks)
    else:
        said = sentence(folder, ranks)
        assert f": {what} would run on the CPU, since torch {torch.__version__} finds no GPU: make" in said
        assert "PINS=envs/gpu.txt" in said


def test_unknown_sizes_are_left_to_the_job(tmp_path: Path) -> None:
    fits.check_training(RUN, tmp_path, 1)

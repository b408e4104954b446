"""The script for a GPU, rehearsed on a CPU."""

import csv
import sys
from pathlib import Path

import gpu_study
import pytest


def test_the_whole_study_is_valid() -> None:
    study = gpu_study.study_of(Path("model"), rehearse=False)
    assert list(study.arms) == list(gpu_study.ARMS)
    assert all(study.run(arm).training.steps == 200 for arm in study.arms)
    assert study.run("naive_bfloat16").training.dtype == "bfloat16"
    assert {study.run(arm).sampler.engine for arm in study.arms} == {"transformers", "exact"}


def test_the_small_study_is_valid() -> None:
    study = gpu_study.small_study()
    runs = [study.run(arm) for arm in study.arms]
    assert {(run.training.steps, run.training.learning_rate, run.training.dtype) for run in runs} == {
        (100, 1e-4, "auto")
    }
    assert study.run("floor_control").disturbance.side == "both" and study.run("twin").sampler.quantization == "int4"


@pytest.mark.long
def test_a_rehearsal(policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a policy to curves and phases, through `tailrl job train`; a call whose time is up leaves no table."""
    arguments = ["gpu_study", str(tmp_path), "--rehearse", "--policy", str(policy_folder)]
    with monkeypatch.context() as patch:
        patch.setattr(gpu_study, "TAILRL", (sys.executable, "-c", "import time; time.sleep(60)"))
        patch.setattr(sys, "argv", [*arguments, "--seconds", "0"])
        with pytest.raises(SystemExit) as ended:
            gpu_study.main()
    assert ended.value.code == gpu_study.UNFINISHED
    assert not (tmp_path / "curves.csv").exists()
    monkeypatch.setattr(sys, "argv", arguments)
    gpu_study.main()
    with (tmp_path / "curves.csv").open(encoding="utf-8") as file:
        curves = list(csv.DictReader(file))
    assert [(row["arm"], row["train/step"]) for row in curves] == [("dvp_mis", str(float(step))) for step in range(3)]
    with (tmp_path / "phases.csv").open(encoding="utf-8") as file:
        (row,) = csv.DictReader(file)
    assert (row["arm"], row["steps"]) == ("dvp_mis", "3")
    assert min(float(row[name]) for name in ("rollout", "forward", "backward", "tokens_per_second")) > 0


def test_a_job_that_says_why_it_cannot_run_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = gpu_study.study_of(Path("model"), rehearse=True)
    monkeypatch.setattr(gpu_study, "TAILRL", (sys.executable, "-c", "raise SystemExit(1)"))
    (tmp_path / "dvp_mis").mkdir()
    assert gpu_study.train(study, "dvp_mis", tmp_path, until=float("inf")) is None
    monkeypatch.setattr(gpu_study, "TAILRL", ("there is no such program",))
    assert gpu_study.train(study, "dvp_mis", tmp_path, until=float("inf")) is None

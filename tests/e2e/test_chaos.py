"""A study that is killed at random and started again ends as one that nobody disturbed; `make chaos` is longer."""

from pathlib import Path

import chaos
import kills
import pytest
import rows
from small_study import ENGINES

from tailrl.config.sampler import SamplerSettings

SEED = 237
"""Both kills strike everything: one while a checkpoint is written, one while the results of a run are."""


@pytest.mark.long
def test_two_kills_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started again with the same file, the script has nothing left to do: not even the undisturbed study."""
    file = tmp_path / "kills.csv"
    struck = chaos.run(tmp_path, 2, "exact", seed=SEED, out=file)
    assert [row.aim for row in struck] == [kill.aim for kill in kills.plan(2, SEED)]
    assert [(row.at, row.followed) for row in struck] == [("checkpoint", "equal"), ("results", "equal")]
    assert struck[0].interrupted
    monkeypatch.setattr(chaos, "make_base", None)
    assert chaos.run(tmp_path, 2, "exact", seed=SEED, out=file) == rows.read(file) == struck


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.parametrize("engine", ["twin", "fp8", "int8", "int4", "moe"])
def test_two_kills_with_a_quantised_engine_and_with_experts(tmp_path: Path, engine: str) -> None:
    from tailrl.rollout.vllm import quantization  # imports vLLM, which takes seconds

    sampler = SamplerSettings.model_validate(ENGINES[engine]["arms.difficulty.sampler"])
    if sampler.engine == "vllm" and (words := quantization.missing_instructions(sampler)):
        pytest.skip(words)
    struck = chaos.run(tmp_path, 2, engine, seed=SEED)
    assert [(row.at, row.followed) for row in struck] == [("checkpoint", "equal"), ("results", "equal")]
    assert struck[0].interrupted


@pytest.mark.long
@pytest.mark.vllm
def test_ten_kills_with_vllm(tmp_path: Path) -> None:
    assert len(chaos.run(tmp_path, 10, "vllm", seed=1)) == 10

"""Policies on the way: each is what the run had then, interrupted or not, and all are among its results."""

import shutil
from pathlib import Path

import pytest
import torch
from ranks_fixture import on_ranks
from run_fixture import Interrupted, Runs, interrupt_at, make_runs
from safetensors.torch import load_file
from sampler_fixture import PlainSampler

from tailrl.config.load import parse_study
from tailrl.model.policy import load_config, load_policy
from tailrl.runtime.errors import StudyError
from tailrl.tasks.problem import Problem
from tailrl.training import loop
from tailrl.training.snapshots import read_snapshots


@pytest.fixture
def runs(tmp_path: Path, policy_folder: Path, problems: list[Problem], monkeypatch: pytest.MonkeyPatch) -> Runs:
    return make_runs(tmp_path, policy_folder, problems[:5], monkeypatch)


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_a_snapshot_is_the_policy_of_a_run_that_ends_there(runs: Runs) -> None:
    """Nothing in a run looks ahead: a shorter one is the first part of a longer one."""
    result = runs.train(runs.settings(steps=5, snapshot_every=2))
    found = read_snapshots(runs.folder / "out" / "snapshots")
    assert [(step, path.name) for step, path in found] == [(2, "step-00000002"), (4, "step-00000004")]
    for steps, folder in found:
        assert weights(folder) == runs.train(runs.settings(steps=steps), name=f"to{steps}").policy
        load_policy(folder)
    assert result.policy not in [weights(folder) for _, folder in found]
    assert not (runs.folder / "to2" / "snapshots").exists(), "only where the study asks for them"


def test_an_interrupted_run_has_the_same_snapshots(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """It resumes from step 4, before the snapshot of step 5, which it makes again."""
    whole = runs.train(runs.settings(steps=7, snapshot_every=5, checkpoint_every=4), name="whole")
    interrupt_at(monkeypatch, 6)
    with pytest.raises(Interrupted):
        runs.train(runs.settings(steps=7, snapshot_every=5, checkpoint_every=4))
    assert runs.train(runs.settings(steps=7, snapshot_every=5, checkpoint_every=4)).same(whole)
    first, second = (read_snapshots(runs.folder / name / "snapshots") for name in ("whole", "out"))
    assert [step for step, _ in first] == [step for step, _ in second] == [5]
    assert weights(first[0][1]) == weights(second[0][1])
    shutil.rmtree(runs.folder / "out" / "snapshots")
    runs.train(runs.settings(steps=7, snapshot_every=5, checkpoint_every=4))
    assert weights(runs.folder / "out/snapshots/step-00000005") == weights(first[0][1]), "given again"


@pytest.mark.slow  # the other snapshots
def test_a_bfloat16_run_leaves_policies_of_the_bits_that_it_computes_with(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Snapshots and the last policy are the float32 masters, rounded: what an evaluation in bfloat16 samples anyway."""
    monkeypatch.setattr(loop, "make_sampler", lambda *_: PlainSampler(runs.policy))

    def train(name: str, sampler: str) -> dict[str, dict[str, torch.Tensor]]:
        arm = {"sampler": {"engine": "transformers", "dtype": sampler}}
        run = runs.settings(arm, steps=4, snapshot_every=2, dtype="bfloat16")
        on_ranks(1, runs.folder, runs.train_rank, run, 5, name)
        out = runs.folder / name
        policies = {"policy": out / "policy", "snapshot": out / "snapshots" / "step-00000002"}
        for folder in policies.values():
            dtypes = {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()}
            assert dtypes == {load_config(folder).dtype}, "as others who load it expect"
        return {which: load_file(folder / "model.safetensors") for which, folder in policies.items()}

    rounded, masters = train("rounded", "bfloat16"), train("masters", "float32")
    for which, weights in masters.items():
        assert weights.keys() == rounded[which].keys()
        for name, weight in weights.items():
            assert weight.dtype == torch.float32 and not torch.equal(weight, weight.bfloat16().float())
            assert rounded[which][name].dtype == torch.bfloat16
            assert torch.equal(rounded[which][name], weight.bfloat16()), (which, name)
    sizes = [(runs.folder / name / "policy" / "model.safetensors").stat().st_size for name in ("rounded", "masters")]
    assert 2 * sizes[0] == pytest.approx(sizes[1], rel=0.02)


def test_a_missing_snapshot_is_an_error(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_at(monkeypatch, 5)
    with pytest.raises(Interrupted):
        runs.train(runs.settings(steps=6, snapshot_every=3))
    (snapshot,) = runs.checkpoints.glob("snapshot-*-00000003")
    shutil.rmtree(snapshot)
    with pytest.raises(StudyError, match=r"^\S+snapshot-\w+-00000003: the policy after step 3 is missing$"):
        runs.train(runs.settings(steps=6, snapshot_every=3))


def test_a_snapshot_that_was_damaged_on_the_way_is_an_error(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the run's manifest, which is made at its end, would vouch for the damage."""
    interrupt_at(monkeypatch, 5)
    with pytest.raises(Interrupted):
        runs.train(runs.settings(steps=6, snapshot_every=3))
    (file,) = runs.checkpoints.glob("snapshot-*-00000003/model.safetensors")
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    words = (
        r"^\S+snapshot-\w+-00000003/model\.safetensors: is not as its job left it, as manifest\.json shows; put it back"
    )
    with pytest.raises(StudyError, match=words):
        runs.train(runs.settings(steps=6, snapshot_every=3))
    file.write_bytes(data)
    runs.train(runs.settings(steps=6, snapshot_every=3))
    assert not list((runs.folder / "out/snapshots").rglob("manifest.json"))
    assert weights(runs.folder / "out/snapshots/step-00000003") == data


def test_a_full_disk_is_named(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tailrl.training.snapshots.save_policy", full)
    with pytest.raises(StudyError, match=r"the policy after step 1 could not be kept .*No space left.* MB are free"):
        runs.train(runs.settings(steps=2, snapshot_every=1))


def test_a_run_that_ends_early_has_its_snapshots_so_far(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop.Watch, "alarm", lambda self: "stopped" if len(self.values) >= 3 else None)
    monkeypatch.setattr(loop.Watch, "values", [], raising=False)
    monkeypatch.setattr(loop.Watch, "see", lambda self, metrics: self.values.append(metrics))
    runs.train(runs.settings(steps=6, snapshot_every=2))
    assert [step for step, _ in read_snapshots(runs.folder / "out" / "snapshots")] == [2]


def test_folders_that_hold_no_snapshots(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"nowhere: no snapshots could be read from it"):
        read_snapshots(tmp_path / "nowhere")
    (tmp_path / ".snakemake_timestamp").touch()
    assert read_snapshots(tmp_path) == []
    (tmp_path / "checkpoint-3").mkdir()
    with pytest.raises(StudyError, match=r"checkpoint-3: is no snapshot"):
        read_snapshots(tmp_path)


def test_all_arms_have_the_studys_snapshot_steps() -> None:
    study = {"name": "s", "arms": {"a": {}}, "training": {"steps": 10, "snapshot_every": 5}}
    assert list(parse_study(study).training.snapshots) == [5]
    with pytest.raises(StudyError, match=r"arms\.a\.training\.snapshot_every: arms are compared at the same steps"):
        parse_study({**study, "arms": {"a": {"training": {"snapshot_every": 2}}}})

"""An evaluation that is killed goes on with what is left, and several processes share the policies."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from evaluation_fixture import PROBLEMS, SETTINGS, CharTokenizer, FakeSampler, save_policy
from study_fixture import ROOT

from tailrl.config.jobs import Evaluation
from tailrl.evaluation.evaluate import Evaluated, Sampling, evaluate
from tailrl.rollout import Decoding
from tailrl.rollout.types import Request, Rollout
from tailrl.tasks.problem import write_problems

SEEDS = range(5)


class Killed(FakeSampler):
    """Notes which policies it samples from, and is killed in the middle of one of them."""

    def __init__(self, notes: Path, last: int = len(SEEDS)) -> None:
        super().__init__()
        self.notes, self.last = notes, last

    def generate(self, requests: Sequence[Request], decoding: Decoding) -> list[Rollout]:
        with self.notes.open("a") as file:
            file.write(f"{self.weight} ")
        if self.weight == self.last:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().generate(requests, decoding)


@pytest.fixture
def policies(tmp_path: Path) -> list[tuple[int, Path]]:
    write_problems(PROBLEMS, tmp_path / "problems.jsonl")
    return [(seed, save_policy(tmp_path / f"policy{seed}", seed)) for seed in SEEDS]


def evaluated(
    policies: Sequence[tuple[int, Path]],
    sampler: FakeSampler | None,
    kept: str = "parts",
    settings: Evaluation = SETTINGS,
    share: tuple[int, int] = (0, 1),
    prompts: str = "a digest",
) -> Evaluated | None:
    """Of these policies; without a sampler no engine may start."""
    folder = policies[0][1].parent

    def start() -> Sampling:
        assert sampler is not None, "an engine is started"
        return Sampling(sampler, CharTokenizer(), 100)

    return evaluate("dvp", policies, folder / "problems.jsonl", settings, start, folder / kept, (), share, prompts)


def test_killed_twice_it_goes_on_to_the_undisturbed_scores(
    policies: list[tuple[int, Path]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    undisturbed, notes = evaluated(policies, FakeSampler(), "undisturbed"), tmp_path / "notes"
    for last in (1, 3):
        process = multiprocessing.get_context("fork").Process(target=evaluated, args=(policies, Killed(notes, last)))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    parts = sorted((tmp_path / "parts").iterdir())
    assert len(parts) == 3
    # What a crash or a disk can leave: a half-written file aside, and a part that is cut or changed.
    (tmp_path / "parts" / "writing-1").write_bytes(parts[0].read_bytes()[:100])
    parts[1].write_bytes(parts[1].read_bytes()[:-40])
    again = evaluated(policies, Killed(notes))
    assert again == undisturbed
    sampled = notes.read_text().split()
    assert sampled[:4] == ["0", "1", "1", "2"] and sampled[4] == "3"
    assert len(sampled[5:]) == 3 and set(sampled[5:]) > {"3", "4"}, "the damaged one, and those that are left"
    said = capfd.readouterr().err
    assert f"tailrl: {parts[1]}: damaged, left out" in said
    assert "tailrl: arm dvp: 2 of 5 policies are evaluated already" in said
    assert evaluated(policies, None) == undisturbed, "a finished one starts no engine"


@pytest.mark.parametrize("changed", ["settings", "problems", "prompts", "policy", "source files"])
def test_a_part_counts_only_for_what_it_was_made_from(
    changed: str, policies: list[tuple[int, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated(policies[:2], FakeSampler())
    settings, prompts, left = SETTINGS, "a digest", ["0", "1"]
    match changed:
        case "settings":
            settings = SETTINGS.model_copy(update={"seed": 12})
        case "problems":
            write_problems(PROBLEMS[::-1], tmp_path / "problems.jsonl")
        case "prompts":
            prompts = "another"
        case "policy":
            (policies[1][1] / "generation_config.json").write_text("{}\n")
            left = ["1"]
        case _:
            monkeypatch.setattr("tailrl.evaluation.parts.at_start", lambda _: {"a.py": "another"})
    again = evaluated(policies[:2], Killed(tmp_path / "notes"), settings=settings, prompts=prompts)
    assert again is not None and {policy.prompts for policy in again.summary.policies} == {prompts}
    assert (tmp_path / "notes").read_text().split() == left
    unchanged = settings.model_copy(update={"rollout_timeout": 5.0})
    assert evaluated(policies[:2], None, settings=unchanged, prompts=prompts) is not None


def test_processes_share_the_policies(policies: list[tuple[int, Path]], tmp_path: Path) -> None:
    undisturbed = evaluated(policies, FakeSampler(), "undisturbed")
    for number in (1, 0):
        assert evaluated(policies, Killed(tmp_path / f"notes{number}"), share=(number, 2)) is None
    assert [(tmp_path / f"notes{number}").read_text().split() for number in (0, 1)] == [["0", "2", "4"], ["1", "3"]]
    assert evaluated(policies, None) == undisturbed


# In every Python that starts: an evaluation that notes what it is given, and waits until both halves have begun.
FAKE = """
import json, os, sys, time, types
from pathlib import Path

notes = Path(os.environ["NOTES"])

def evaluate_arm(arm, policies, problems, settings, kept, snapshots, share):
    number, count = share
    if count == 1:
        return "assembled"
    (notes / f"{number}").touch()
    end = time.monotonic() + 60
    while len(list(notes.glob("[01]"))) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    found = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE", "LOCAL_RANK")}
    both = (notes / f"{1 - number}").exists()
    (notes / f"{number}.json").write_text(json.dumps(found | {"share": share, "both": both}))

def write_results(evaluated, out, samples):
    (notes / "written").write_text(evaluated)

if "NOTES" in os.environ:
    name = "tailrl.evaluation.evaluate"
    sys.modules[name] = types.SimpleNamespace(evaluate_arm=evaluate_arm, write_results=write_results)
    # They would import torch and transformers, in each of three processes.
    sys.modules["tailrl.training.snapshots"] = types.SimpleNamespace(read_snapshots=lambda folder: [])
    sys.modules["tailrl.planning.fits"] = types.SimpleNamespace(check_sampling=lambda *given: None)
"""


@pytest.mark.slow  # `test_processes_share_the_policies` has the halves in this process
def test_two_devices_evaluate_halves_at_once(tmp_path: Path) -> None:
    """From the command line; each process sees one device and no group."""
    (tmp_path / "sitecustomize.py").write_text(FAKE)
    (tmp_path / "out").mkdir()
    options = ["--arm=a", f"--settings={SETTINGS.model_dump_json()}", "--ranks=3", f"--problems={tmp_path}"]
    options += ["--policy=0=/nowhere", "--policy=1=/nowhere", f"--out={tmp_path / 'out/a.json'}", "--samples=b"]
    ended = subprocess.run(
        [sys.executable, "-c", "from tailrl.cli import main; main()", "job", "evaluate", *options],
        env=os.environ
        | {"PYTHONPATH": f"{tmp_path}:{ROOT / 'workflow'}", "NOTES": str(tmp_path), "TMPDIR": str(tmp_path)}
        | {"CUDA_VISIBLE_DEVICES": "5,6"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found = [json.loads((tmp_path / f"{number}.json").read_text()) for number in (0, 1)]
    alone = {"RANK": None, "WORLD_SIZE": None, "LOCAL_RANK": None, "both": True}
    assert found == [
        alone | {"CUDA_VISIBLE_DEVICES": device, "share": [number, 2]} for number, device in ((0, "5"), (1, "6"))
    ]
    assert (tmp_path / "written").read_text() == "assembled"

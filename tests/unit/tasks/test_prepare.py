"""What every arm starts from: problem files without what is evaluated, and the base policy."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases_fixture import rest_long

from tailrl.artifacts.manifest import policy_digest
from tailrl.config.jobs import Problems
from tailrl.config.load import parse_study
from tailrl.config.policy import PretrainedPolicy, ScratchPolicy, WarmStart
from tailrl.config.tasks import Task
from tailrl.config.tasks.aime25 import Aime25Task
from tailrl.config.tasks.arithmetic import ArithmeticTask
from tailrl.model.download import download_inputs
from tailrl.model.policy import load_policy, load_tokenizer, named_weights
from tailrl.runtime.errors import StudyError
from tailrl.tasks import prepare
from tailrl.tasks.loaded import Loaded
from tailrl.tasks.prepare import write_all_problems
from tailrl.tasks.problem import Problem, read_problems, write_problems
from tailrl.tasks.registry import load_task
from tailrl.training import base_policy
from tailrl.training.base_policy import write_base_policy

# Few enough different problems that the three sets overlap.
TRAIN = ArithmeticTask(problems=150, terms=(2, 2), largest=15, seed=0)
EVALUATION = ArithmeticTask(problems=60, terms=(2, 2), largest=15, seed=1)
STAGES = (
    ArithmeticTask(problems=80, terms=(2, 2), largest=15, seed=2),
    ArithmeticTask(problems=40, terms=(2, 2), largest=15, slip=0.5, seed=3),
)


def test_evaluated_problems_are_not_trained_on(tmp_path: Path) -> None:
    write_all_problems(Problems(train=TRAIN, evaluation=EVALUATION, warm_start=STAGES), tmp_path)
    evaluation = load_task(EVALUATION).problems
    prompts = {problem.prompt for problem in evaluation}
    sources = {
        "train": load_task(TRAIN).problems,
        "warm_start": [problem for stage in STAGES for problem in load_task(stage).problems],
    }
    report = json.loads((tmp_path / "problems.json").read_text())
    assert read_problems(tmp_path / "evaluation.jsonl") == evaluation
    assert report.keys() == {"train", "warm_start", "evaluation"}
    assert report["evaluation"] == {"problems": 60, "removed_because_evaluated": 0, "skipped": {}}
    for name, source in sources.items():
        kept = [problem for problem in source if problem.prompt not in prompts]
        assert 0 < len(kept) < len(source)
        assert read_problems(tmp_path / f"{name}.jsonl") == kept
        removed = len(source) - len(kept)
        assert report[name] == {"problems": len(kept), "removed_because_evaluated": removed, "skipped": {}}


def test_harder_tasks_follow_with_their_levels_and_without_what_is_evaluated(tmp_path: Path) -> None:
    harder = (ArithmeticTask(problems=70, terms=(3, 3), seed=4), ArithmeticTask(problems=90, terms=(2, 2), seed=1))
    write_all_problems(Problems(train=TRAIN, harder=harder, evaluation=EVALUATION, warm_start=STAGES), tmp_path)
    prompts = {problem.prompt for problem in load_task(EVALUATION).problems}
    every = [
        replace(one, level=level) for level, task in enumerate((TRAIN, *harder)) for one in load_task(task).problems
    ]
    kept = [problem for problem in every if problem.prompt not in prompts]
    assert read_problems(tmp_path / "train.jsonl") == kept and {one.level for one in kept} == {0, 1, 2}
    assert {one.level for one in read_problems(tmp_path / "warm_start.jsonl")} == {0}


def test_rows_that_cannot_be_used_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"problem": "1+1", "answer": "2", "id": "x"}, {"problem": "2+2", "answer": "four", "id": "y"}]
    (tmp_path / "aime.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    settings = Problems.model_validate(
        {"train": TRAIN, "evaluation": {"name": "aime25", "path": str(tmp_path / "aime.jsonl")}, "warm_start": ()}
    )
    write_all_problems(settings, tmp_path)
    evaluation = json.loads((tmp_path / "problems.json").read_text())["evaluation"]
    assert evaluation == {
        "problems": 1,
        "removed_because_evaluated": 0,
        "skipped": {"answer is not an integer from 0 to 999": ["row 2"]},
    }
    assert (tmp_path / "warm_start.jsonl").read_text() == ""
    said = "evaluation: 1 rows give no problem: answer is not an integer from 0 to 999 (1, first row 2)"
    assert capsys.readouterr().err == f"tailrl: {said}; problems.json lists them\n"


def test_training_on_what_is_evaluated_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="every train problem is also an evaluation problem"):
        write_all_problems(Problems(train=TRAIN, evaluation=TRAIN, warm_start=()), tmp_path)


def test_a_data_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snakemake would keep the new file's checksum beside the old file's problems."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"problem": "p", "answer": 1, "id": 0}) + "\n", encoding="utf-8")
    settings = Problems(train=TRAIN, evaluation=Aime25Task(name="aime25", path=str(path)), warm_start=())
    write_all_problems(settings, tmp_path)

    def load(task: Task) -> Loaded:
        loaded = load_task(task)
        path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")
        return loaded

    monkeypatch.setattr(prepare, "load_task", load)
    with pytest.raises(StudyError, match=r"rows\.jsonl: changed while this job read it; run the study again"):
        write_all_problems(settings, tmp_path)


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer is tried in a process of its own, which imports transformers; once here is enough."""
    monkeypatch.setattr(base_policy, "try_tokenizer", lambda _: None)


@pytest.fixture
def tried(request: pytest.FixtureRequest) -> None:
    if not request.param:
        request.getfixturevalue("untried")


@pytest.mark.usefixtures("untried")
def test_a_pretrained_policy_that_changes_while_it_is_read_is_refused(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(policy_folder, folder)

    def load(path: str) -> object:
        os.utime(folder / "config.json", ns=(0, 0))
        return load_policy(path)

    monkeypatch.setattr(base_policy, "load_policy", load)
    with pytest.raises(StudyError, match=r"config\.json.*: changed while this job read it"):
        write_base_policy(PretrainedPolicy(source="pretrained", path=str(folder)), tmp_path / "none", tmp_path / "base")


def test_a_policy_from_scratch(tmp_path: Path) -> None:
    settings = ScratchPolicy(
        vocabulary_size=600, hidden_size=32, heads=1, layers=1, warm_start=WarmStart(stages=STAGES, batch=16, seed=4)
    )
    write_problems(load_task(STAGES[0]).problems, tmp_path / "warm_start.jsonl")
    for name in ("one", "two"):
        write_base_policy(settings, tmp_path / "warm_start.jsonl", tmp_path / name)
    losses = json.loads((tmp_path / "one" / "warm_start.json").read_text())["loss"]
    assert len(losses) == 5 and losses[-1] < losses[0]
    assert len(load_tokenizer(tmp_path / "one")) == load_policy(tmp_path / "one").config.vocab_size == 600
    for file in ("model.safetensors", "tokenizer.json", "warm_start.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


@pytest.mark.parametrize("tried", rest_long((False,), (False, True)), indirect=True)
@pytest.mark.usefixtures("tried")
def test_a_pretrained_policy_is_copied(policy_folder: Path, tmp_path: Path) -> None:
    settings = PretrainedPolicy(source="pretrained", path=str(policy_folder))
    write_base_policy(settings, tmp_path / "not needed", tmp_path / "base")
    before, after = (dict(named_weights(load_policy(folder))) for folder in (policy_folder, tmp_path / "base"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert load_tokenizer(tmp_path / "base").get_vocab() == load_tokenizer(policy_folder).get_vocab()


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("source", ["scratch", "pretrained"])
def test_a_byte_flipped_in_the_base_policy_is_noticed(policy_folder: Path, tmp_path: Path, source: str) -> None:
    """By every job that asks for its digest: trainings and evaluations."""
    write_problems(load_task(STAGES[0]).problems[:16], tmp_path / "warm_start.jsonl")
    tiny = ScratchPolicy(
        vocabulary_size=600, hidden_size=32, heads=1, layers=1, warm_start=WarmStart(stages=STAGES, batch=16)
    )
    settings = tiny if source == "scratch" else PretrainedPolicy(source="pretrained", path=str(policy_folder))
    write_base_policy(settings, tmp_path / "warm_start.jsonl", tmp_path / "base")
    policy_digest(tmp_path / "base")
    weights = tmp_path / "base" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(StudyError, match=r"model\.safetensors: is not as its job left it"):
        policy_digest(tmp_path / "base")


def test_a_warm_start_needs_worked_solutions(tmp_path: Path) -> None:
    write_problems([Problem("a", "p", "1", "s"), Problem("b", "p", "1")], tmp_path / "warm_start.jsonl")
    with pytest.raises(StudyError, match=r"warm_start\.jsonl: a warm start needs worked solutions"):
        write_base_policy(ScratchPolicy(), tmp_path / "warm_start.jsonl", tmp_path / "base")


def test_download_asks_for_what_comes_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr("tailrl.tasks.registry.fetch", lambda *source: asked.append(source))
    monkeypatch.setattr("tailrl.model.download.load_policy", asked.append)
    monkeypatch.setattr("tailrl.model.download.try_tokenizer", lambda path: asked.append(("trial", path)))
    monkeypatch.setattr("tailrl.model.download.load_tokenizer", lambda path: asked.append(("tokenizer", path)))
    assert download_inputs(parse_study({"name": "s", "arms": {"a": {}}})) == asked == []
    fetched = download_inputs(
        parse_study(
            {
                "name": "s",
                "arms": {"a": {}},
                "task": {"name": "dapo_math", "path": "here.jsonl"},
                "policy": {"source": "pretrained", "path": "some/model"},
                "evaluation": {"task": {"name": "aime25"}},
            }
        )
    )
    assert fetched == ["math-ai/aime25", "some/model"]
    assert asked == [("math-ai/aime25", "test"), ("trial", "some/model"), ("tokenizer", "some/model"), "some/model"]

"""The model card of a trained policy, read back by huggingface_hub; its code runs as it stands."""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from artifacts_fixture import edit, policy_of, record_of, vouch_again, write_job, write_scores
from huggingface_hub import ModelCard
from run_fixture import Runs, make_runs
from transformers import GenerationMixin

from tailrl.cli import main
from tailrl.config.load import parse_study
from tailrl.evaluation.model_card import write_card
from tailrl.runtime.errors import StudyError
from tailrl.tasks.problem import Problem
from tailrl.training import loop

DVP = {"vocabulary": {"rule": "min_p", "rho": "e-3"}, "correction": {"sequence": "mis"}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, policy_folder: Path, problems: list[Problem]) -> Path:
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        runs: Runs = make_runs(folder, policy_folder, problems, patch)
        runs.train(runs.settings(DVP, steps=2))
    return folder / "out"


def change(folder: Path, trained: Path, **settings: Any) -> Path:
    """The run in another folder, with other settings in its record."""
    (folder / "policy").mkdir()
    for name in ("run.json", "metrics.jsonl", "manifest.json", "policy/config.json"):
        (folder / name).write_bytes((trained / name).read_bytes())
    edit(folder / "run.json", lambda record: record["settings"].update(settings))
    return folder


def test_what_a_card_says(trained: Path) -> None:
    card = ModelCard.load(write_card(trained))
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["reinforcement-learning", "rloo", "min_p"],
    }
    record = json.loads((trained / "run.json").read_text(encoding="utf-8"))
    rewards = [json.loads(line)["reward/mean"] for line in (trained / "metrics.jsonl").read_text().splitlines()]
    words = ["# test: test, seed 5", "min_p with ρ = e-3", f"{sum(rewards) / 2:.3f} in the first 2 steps"]
    words += ["2 steps, 2 prompts a step, 4 responses each", "exact in float32", str(record["commit"])]
    words += ["sequence: mis", f"| torch | {torch.__version__} |", "evaluates it afterwards"]
    assert [word for word in words if word not in card.text] == []
    assert "{" not in re.sub(r"```.*?```", "", card.text, flags=re.S)


def test_the_code_in_a_card_samples_with_the_mask(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [code] = re.findall(r"```python\n(.*?)```", write_card(trained).read_text(encoding="utf-8"), flags=re.S)
    given: list[dict[str, Any]] = []
    generate = GenerationMixin.generate

    def noted(self: Any, **arguments: Any) -> Any:
        given.append(arguments)
        return generate(self, **arguments)

    monkeypatch.setattr(GenerationMixin, "generate", noted)
    monkeypatch.chdir(trained / "policy")
    exec(code.replace('"..."', '"1+2="'), {})
    assert capsys.readouterr().out.strip()
    [arguments] = given
    assert arguments["min_p"] == pytest.approx(torch.tensor(-3.0).exp().item())
    assert (arguments["temperature"], arguments["top_k"], arguments["top_p"]) == (0.8, 0, 1.0)


@pytest.mark.parametrize(
    ("vocabulary", "argument", "words"),
    [
        ({"rule": "full"}, "top_k=0, top_p=1.0, max", "no mask is needed"),
        ({"rule": "min_p", "rho": "e-3", "side": "trainer"}, "top_p=1.0, max", "no mask is needed"),
        ({"rule": "min_p", "rho": "0.6/V"}, "min_p=0.001", "ρ = 0.6/V"),
        ({"rule": "top_k", "k": 7}, "top_k=7, top_p=1.0", "k = 7"),
        ({"rule": "top_p", "p": 0.9}, "top_k=0, top_p=0.9", "p = 0.9"),
        ({"rule": "entropy", "rho": "e-3"}, "top_p=1.0, max", "`generate` has no such mask"),
        (
            {"rule": "min_p", "rho": "e-3", "adapt": "budget", "budget": 0.1},
            "min_p=0.0497",
            "moved in training (budget)",
        ),
    ],
)
def test_the_mask_of_every_rule(
    tmp_path: Path, trained: Path, vocabulary: dict[str, Any], argument: str, words: str
) -> None:
    text = write_card(change(tmp_path, trained, vocabulary=vocabulary)).read_text(encoding="utf-8")
    assert argument in text and words in text


def test_a_pretrained_base_and_a_chat(tmp_path: Path, trained: Path) -> None:
    run = change(tmp_path, trained, policy={"source": "pretrained", "path": "someone/small"})
    (run / "policy" / "chat_template.jinja").write_text("", encoding="utf-8")
    card = ModelCard.load(write_card(run))
    assert card.data.base_model == "someone/small"
    assert "apply_chat_template(" in card.text and "someone/small, trained further" in card.text


def test_an_evaluation_that_is_known(
    tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, study = tmp_path / "own/train/a/seed5", parse_study({"name": "s", "arms": {"a": {}}})
    policies = [policy_of(seed, [[1, 0, 0, 0, 0, 0, 0, right], [0] * 8]) for seed, right in ((0, 0), (5, 1))]
    for seed in (0, 5):
        write_job(tmp_path / "other/train/a" / f"seed{seed}", record_of(study.run("a"), seed), [])
    shutil.copytree(tmp_path / "other/train/a/seed0", tmp_path / "own/train/a/seed0")
    shutil.copytree(trained, run)
    other, file = (write_scores(tmp_path / name, study, "a", policies) for name in ("other", "own"))
    with pytest.raises(StudyError, match=re.escape(f"{other}: evaluated another policy than {run / 'policy'}")):
        write_card(run, other)
    call(monkeypatch, "card", run, "--evaluation", file)
    text = Path(capsys.readouterr().out.strip()).read_text(encoding="utf-8")
    assert "On 2 held-out problems of `arithmetic`, 8 samples each" in text
    assert "avg@8 = 12.5%, pass@8 = 50.0%" in text


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("run.json", "{", "not valid JSON"),
        ("run.json", "[]", "not a JSON object"),
        ("run.json", "{}", "settings is missing"),
        ("metrics.jsonl", "{", "line 1: not a JSON object of numbers"),
        ("metrics.jsonl", '{"train/step": 0}', "has no reward/mean"),
        ("metrics.jsonl", None, "is missing"),
        ("policy/config.json", "{}", "has no vocab_size"),
    ],
)
def test_files_that_are_none(tmp_path: Path, trained: Path, file: str, content: str | None, words: str) -> None:
    run = change(tmp_path, trained)
    (run / file).unlink() if content is None else (run / file).write_text(content, encoding="utf-8")
    if content is not None and file != "policy/config.json":
        vouch_again(run / file)
    with pytest.raises(StudyError, match=f"^{re.escape(str(run))}.*{words}"):
        write_card(run)


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["tailrl", *map(str, arguments)])
    main()


def test_training_ends_with_a_card_and_is_not_lost_for_want_of_one(
    tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loop, "train", lambda *_: None)  # it has left its files
    run = change(tmp_path, trained)
    settings = json.dumps(json.loads((run / "run.json").read_text(encoding="utf-8"))["settings"])
    rest = [x for name in ("policy", "problems", "wandb") for x in (f"--{name}", tmp_path)]
    call(monkeypatch, "job", "train", "--settings", settings, "--seed", 5, "--out", run, *rest)
    assert (run / "policy" / "README.md").is_file() and capsys.readouterr().err == ""
    (run / "run.json").unlink()
    call(monkeypatch, "job", "train", "--settings", settings, "--seed", 5, "--out", run, *rest)
    assert "run.json: is missing" in capsys.readouterr().err


def test_a_full_disk_at_the_card_loses_no_run(
    tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(loop, "train", lambda *_: None)
    monkeypatch.setattr("tailrl.evaluation.model_card.write_card", full)
    settings = json.dumps(json.loads((trained / "run.json").read_text(encoding="utf-8"))["settings"])
    rest = [x for name in ("policy", "problems", "wandb") for x in (f"--{name}", tmp_path)]
    call(monkeypatch, "job", "train", "--settings", settings, "--seed", 5, "--out", trained, *rest)
    assert capsys.readouterr().err.endswith("no model card: No space left on device\n")

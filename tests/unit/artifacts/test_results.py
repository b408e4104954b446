"""The readers: what they return, and the sentence for each file that cannot be used."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailrl.artifacts.results import read_evaluation, read_metrics, read_results, read_run, read_tokens
from tailrl.config.study import Study
from tailrl.runtime.errors import StudyError


def test_metrics_are_arrays_with_nan_where_absent_or_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"train/step": 0, "a": 1}\n{"train/step": 2, "a": null, "b": NaN}\n{"train/step": 3, "b": 4.5}\n')
    metrics = read_metrics(path)
    np.testing.assert_array_equal(metrics["train/step"], [0, 2, 3])
    np.testing.assert_array_equal(metrics["a"], [1, math.nan, math.nan])
    np.testing.assert_array_equal(metrics["b"], [math.nan, math.nan, 4.5])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "holds no training step"),
        ('{"train/step": 0}\n{"train/st', "line 2: not a JSON object of numbers"),
        ('{"train/step": 0, "a": "b"}\n', "line 1: not a JSON object of numbers"),
        ("[0]\n", "line 1: not a JSON object of numbers"),
        ('{"train/step": 1}\n{"train/step": 1}\n', "line 2: train/step is missing or does not rise"),
        ('{"reward/mean": 1}\n', "line 1: train/step is missing or does not rise"),
    ],
)
def test_metrics_that_cannot_be_used(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(StudyError) as error:
        read_metrics(path)
    assert str(error.value).startswith(str(path))
    assert sentence in str(error.value)


def test_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tokens.npz"
    logp = np.array([-1.5, -2.25], dtype=np.float32)
    np.savez(path, step=np.array([0, 10], dtype=np.int32), logp_train=logp, logp_infer=logp * 2)
    tokens = read_tokens(path)
    np.testing.assert_array_equal(tokens.step_T, [0, 10])
    np.testing.assert_array_equal(tokens.logp_train_T, [-1.5, -2.25])
    np.testing.assert_array_equal(tokens.logp_infer_T, [-3.0, -4.5])


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"step": [0], "logp_train": [0.0]}, "logp_infer"),
        ({"step": [], "logp_train": [], "logp_infer": []}, "no tokens, or arrays of different lengths"),
        ({"step": [0, 1], "logp_train": [0.0, 1.0], "logp_infer": [0.0]}, "arrays of different lengths"),
    ],
)
def test_tokens_that_cannot_be_used(tmp_path: Path, arrays: dict[str, list[float]], sentence: str) -> None:
    path = tmp_path / "tokens.npz"
    np.savez(path, **{name: np.array(values) for name, values in arrays.items()})  # type: ignore[arg-type]
    with pytest.raises(StudyError, match=sentence):
        read_tokens(path)


@pytest.mark.parametrize("content", [b"", b"not an archive", b"PK\x03\x04 cut short"])
def test_tokens_in_a_broken_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokens.npz"
    path.write_bytes(content)
    with pytest.raises(StudyError, match="cannot be read as an npz file"):
        read_tokens(path)


def evaluation(**changes: Any) -> dict[str, Any]:
    rows = [{"id": "a", "correct": [1, 0]}, {"id": "b", "correct": [0, 0]}]
    return {"arm": "naive", "policies": [{"seed": 4, "per_problem": rows}], "lm_eval_version": "0.4", **changes}


def test_evaluation(tmp_path: Path) -> None:
    path = tmp_path / "naive.json"
    path.write_text(json.dumps(evaluation()))
    read = read_evaluation(path)
    score = read.scores[0]
    assert (read.arm, read.problems, read.lm_eval, score.seed) == ("naive", ("a", "b"), "0.4", 4)
    assert (score.avg_at_k, score.pass_at_k) == (0.25, 0.5)
    np.testing.assert_array_equal(score.by_problem, [0.5, 0.0])


OTHER = {"seed": 5, "per_problem": [{"id": "c", "correct": [1, 0]}, {"id": "b", "correct": [0, 0]}]}
FEWER = {"seed": 5, "per_problem": [{"id": "a", "correct": [1]}, {"id": "b", "correct": [0]}]}


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (evaluation(policies=[]), "holds no policy"),
        (evaluation(policies=[{"seed": 0, "per_problem": []}]), "a policy without problems"),
        (evaluation(policies=[{"seed": 0}]), "not an evaluation with per-problem samples: KeyError"),
        (evaluation(policies=[*evaluation()["policies"], OTHER]), "its policies differ in problems"),
        (evaluation(policies=[*evaluation()["policies"], FEWER]), "or samples per problem"),
        ([], "holds list, not a JSON object"),
    ],
)
def test_evaluation_that_cannot_be_used(tmp_path: Path, data: object, sentence: str) -> None:
    path = tmp_path / "naive.json"
    path.write_text(json.dumps(data))
    with pytest.raises(StudyError, match=sentence) as error:
        read_evaluation(path)
    assert str(path) in str(error.value)


def test_ragged_samples(tmp_path: Path) -> None:
    rows = [{"id": "a", "correct": [1, 0]}, {"id": "b", "correct": [0]}]
    path = tmp_path / "naive.json"
    path.write_text(json.dumps(evaluation(policies=[{"seed": 0, "per_problem": rows}])))
    with pytest.raises(StudyError, match="not an evaluation"):
        read_evaluation(path)


def test_results_keep_the_order_of_arms_and_seeds(whole: tuple[Study, Path]) -> None:
    study, folder = whole
    results = read_results(study, folder, study.arms)
    assert results.arms == ("naive", "dvp", "mis", "dvp_mis")
    assert [(run.arm, run.seed) for run in results.all_runs()][:4] == [
        ("naive", 0),
        ("naive", 1),
        ("naive", 2),
        ("dvp", 0),
    ]
    assert [score.seed for score in results.evaluations["mis"].scores] == [0, 1, 2]
    absent = results.runs["naive"][0].metric("no/such/key")
    assert absent.shape == (60,)
    assert np.isnan(absent).all()


@pytest.mark.parametrize("file", ["metrics.jsonl", "tokens.npz", "run.json"])
def test_a_missing_file_of_a_run(make_study: Callable[..., tuple[Study, Path]], file: str) -> None:
    study, folder = make_study(seeds=[0], training={"steps": 2}, ablations={})
    path = folder / "train" / "dvp" / "seed0" / file
    path.unlink()
    with pytest.raises(StudyError) as error:
        read_results(study, folder, study.arms)
    assert str(error.value) == f"{path}: is missing"


def test_a_missing_arm_and_a_missing_evaluation(make_study: Callable[..., tuple[Study, Path]]) -> None:
    study, folder = make_study(seeds=[0], training={"steps": 2}, ablations={})
    (folder / "eval" / "mis.json").unlink()
    with pytest.raises(StudyError, match=r"eval/mis\.json: is missing"):
        read_results(study, folder, study.arms)
    shutil.rmtree(folder / "train" / "naive")
    with pytest.raises(StudyError, match=r"train/naive/seed0/run\.json: is missing"):
        read_results(study, folder, study.arms)


def test_a_seed_or_problems_that_do_not_fit(make_study: Callable[..., tuple[Study, Path]]) -> None:
    study, folder = make_study(seeds=[0, 1], training={"steps": 2}, ablations={})
    path = folder / "eval" / "mis.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "policies": data["policies"][:1]}))
    with pytest.raises(StudyError, match=r"mis\.json: holds no policy of seed 1"):
        read_results(study, folder, study.arms)
    for policy in data["policies"]:
        policy["per_problem"] = policy["per_problem"][1:]
    path.write_text(json.dumps(data))
    with pytest.raises(StudyError, match="not those that the base policy was evaluated on"):
        read_results(study, folder, study.arms)


@pytest.mark.parametrize(("text", "sentence"), [("{", "not valid JSON"), ("{}", "no block named settings")])
def test_a_broken_run_record(make_study: Callable[..., tuple[Study, Path]], text: str, sentence: str) -> None:
    _, folder = make_study(seeds=[0], training={"steps": 2}, ablations={})
    (folder / "train" / "mis" / "seed0" / "run.json").write_text(text)
    with pytest.raises(StudyError, match=sentence):
        read_run(folder, "mis", 0)

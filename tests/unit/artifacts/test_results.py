"""The readers: what they return, and the sentence for each file that cannot be used."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artifacts_fixture import edit, policy_of, record_of, tokens_of, vouch_again, write_job, write_scores

from tailrl.artifacts.evaluation import manifest_of, read_evaluation_file
from tailrl.artifacts.manifest import MANIFEST, files_in, read_manifest, write_manifest
from tailrl.artifacts.metrics import metrics_line, read_metrics, read_steps
from tailrl.artifacts.records import RunRecord, read_record, write_record
from tailrl.artifacts.results import read_results
from tailrl.artifacts.tokens import ARRAYS, read_token_arrays, read_tokens, write_tokens
from tailrl.config.load import parse_study
from tailrl.config.study import Study
from tailrl.reports.scores.numbers import policy_scores
from tailrl.reports.what_ran import what_ran
from tailrl.runtime.errors import StudyError

UNMASKED = "rollout_corr_unmasked"
STUDY = parse_study({"name": "s", "seeds": [4, 5], "arms": {"naive": {}}, "evaluation": {"samples": 2}})


def metrics_in(job: Path, text: str) -> Path:
    """The folder of a run with these metrics."""
    (job / "metrics.jsonl").write_text(text)
    write_manifest(job / MANIFEST, files_in(job))
    return job


def test_metrics_are_arrays_with_nan_where_absent_or_null(tmp_path: Path) -> None:
    lines = '{"train/step": 0, "a": 1}\n{"train/step": 1, "a": null, "b": NaN}\n{"train/step": 2, "b": 4.5}\n'
    metrics = read_metrics(metrics_in(tmp_path, lines))
    np.testing.assert_array_equal(metrics["train/step"], [0, 1, 2])
    np.testing.assert_array_equal(metrics["a"], [1, math.nan, math.nan])
    np.testing.assert_array_equal(metrics["b"], [math.nan, math.nan, 4.5])


def test_written_metrics_are_read_back(tmp_path: Path) -> None:
    points = [{"train/step": 0.0, "a": math.nan, "b": 0.1}, {"train/step": 1.0, "a": -math.inf, "b": 2.0}]
    job = metrics_in(tmp_path, "".join(map(metrics_line, points)))
    assert read_steps(job) == [{"train/step": 0.0, "a": None, "b": 0.1}, {"train/step": 1.0, "a": None, "b": 2.0}]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "holds no training step"),
        ('{"train/step": 0}\n{"train/st', "line 2: not a JSON object of numbers"),
        ('{"train/step": 0, "a": "b"}\n', "line 1: not a JSON object of numbers"),
        ('{"train/step": 0, "a": []}\n', "line 1: not a JSON object of numbers"),
        (f'{{"train/step": 0, "a": {"9" * 400}}}\n', "line 1: not a JSON object of numbers"),
        (f'{{"train/step": 0, "a": {"9" * 5000}}}\n', "line 1: not a JSON object of numbers"),
        ("[0]\n", "line 1: not a JSON object of numbers"),
        ('{"train/step": 0}\n{"train/step": 0}\n', "line 2: train/step is 0, not 1"),
        ('{"train/step": 0}\n{"train/step": 2}\n', "line 2: train/step is 2, not 1"),
        ('{"train/step": 1}\n', "line 1: train/step is 1, not 0"),
        ('{"reward/mean": 1}\n', "line 1: train/step is None, not 0"),
        ('{"train/step": 0, "reward/mean": 1.5}\n', "line 1: reward/mean is 1.5, but rewards lie between 0 and 1"),
        ('{"train/step": 0, "reward/mean": NaN}\n', "line 1: reward/mean is nan, but"),
    ],
)
def test_metrics_that_cannot_be_used(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(StudyError) as error:
        read_metrics(metrics_in(tmp_path, text))
    assert str(error.value).startswith(str(tmp_path / "metrics.jsonl"))
    assert sentence in str(error.value)


def tokens_in(job: Path, arrays: dict[str, Any]) -> Path:
    """The folder of a run with these tokens."""
    write_tokens(job, arrays)
    write_manifest(job / MANIFEST, files_in(job))
    return job


def test_tokens(tmp_path: Path) -> None:
    logp = np.array([-1.5, -2.25], dtype=np.float32)
    arrays = tokens_of([0, 10], logp_train=logp, logp_infer=logp * 2)
    tokens = read_tokens(tokens_in(tmp_path, arrays), {"train/step": np.arange(11.0)}, 10)
    np.testing.assert_array_equal(tokens.step_T, [0, 10])
    np.testing.assert_array_equal(tokens.logp_trainer_T, [-1.5, -2.25])
    np.testing.assert_array_equal(tokens.logp_sampler_T, [-3.0, -4.5])
    found = read_token_arrays(tmp_path)
    assert list(found) == list(ARRAYS)
    for name, array in found.items():
        np.testing.assert_array_equal(array, arrays[name], strict=True)


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"step": [0], "logp_train": [0.0]}, "has no logp_infer"),
        ({"step": [], "logp_train": [], "logp_infer": []}, "its arrays hold 0 numbers"),
        ({"step": [0, 1], "logp_train": [0.0, 1.0], "logp_infer": [0.0]}, "its arrays hold 1, 2 numbers"),
        ({"step": ["a"], "logp_train": [0.0], "logp_infer": [0.0]}, "do not hold numbers"),
        ({"step": 0, "logp_train": [0.0], "logp_infer": [0.0]}, "do not hold numbers"),
    ],
)
def test_tokens_that_cannot_be_used(tmp_path: Path, arrays: dict[str, list[float]], sentence: str) -> None:
    tokens_in(tmp_path, {name: np.array(values) for name, values in arrays.items()})
    with pytest.raises(StudyError, match=sentence):
        read_token_arrays(tmp_path, ("step", "logp_train", "logp_infer"))


def test_tokens_are_those_of_the_metrics(tmp_path: Path) -> None:
    """Means over responses of tokens' means; log-probs are of the tokens inside the safe set."""
    train, infer = np.array([-1.0, -3.0, -5.0, -7.0, -2.0]), np.array([-2.0, -4.0, -4.0, -9.0, -1.0])
    arrays = tokens_of([0, 0, 0, 0, 10], logp_train=train, logp_infer=infer, sequence=np.array([3, 3, 0, 0, 3]))
    arrays |= {"outside": np.array([False, False, False, True, False]), "reward": np.array([1.0, 1.0, 0.0, 0.0, 1.0])}
    job, nan = tokens_in(tmp_path, arrays), math.nan
    right = {
        "reward/mean": (0.5, 1.0),
        f"{UNMASKED}/training_log_ppl": (3.5, 2.0),
        f"{UNMASKED}/rollout_log_ppl": (3.5, 1.0),
    }

    def metrics(values: dict[str, tuple[float, float]]) -> dict[str, Any]:
        wide = {key: np.array([first, *[nan] * 9, second]) for key, (first, second) in values.items()}
        return {"train/step": np.arange(11.0), **wide}

    read_tokens(job, metrics(right), 10)
    for key, (first, second) in right.items():
        read_tokens(job, metrics({**right, key: (nan, second)}), 10)
        with pytest.raises(StudyError) as error:
            read_tokens(job, metrics({**right, key: (first, second + 0.01)}), 10)
        sentence = f"in step 10 {key} is {second:g}, and metrics.jsonl says {second + 0.01:g}"
        assert str(error.value) == f"{job / 'tokens.npz'}: {sentence}"


@pytest.mark.parametrize("content", [b"", b"not an archive", b"PK\x03\x04 cut short"])
def test_tokens_in_a_broken_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokens.npz").write_bytes(content)
    write_manifest(tmp_path / MANIFEST, files_in(tmp_path))
    with pytest.raises(StudyError, match="cannot be read as an npz file"):
        read_token_arrays(tmp_path, ("step", "logp_train", "logp_infer"))


# --- evaluations -----------------------------------------------------------------------------------------


@pytest.fixture
def evaluated(tmp_path: Path) -> Path:
    """The evaluation of two policies on two problems."""
    for seed in STUDY.seeds:
        write_job(tmp_path / "train" / "naive" / f"seed{seed}", record_of(STUDY.run("naive"), seed), [])
    return write_scores(tmp_path, STUDY, "naive", [policy_of(4, [[1, 0], [0, 0]]), policy_of(5, [[1, 1], [0, 1]])])


def test_evaluation(evaluated: Path) -> None:
    read = read_evaluation_file(evaluated).arrays()
    score = read.scores[0]
    assert (read.arm, read.problems, read.lm_eval, score.seed) == ("naive", ("p0", "p1"), "0.4.13", 4)
    assert (score.avg_at_k, score.pass_at_k) == (0.25, 0.5)
    np.testing.assert_array_equal(score.by_problem, [0.5, 0.0])


FEWER = policy_of(6, [[1], [0]])
OTHER = {**policy_of(6, [[1, 0], [0, 0]]), "per_problem": [{"id": name, "correct": [1, 0]} for name in ("c", "p1")]}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda data: data.update(policies=[]), "holds no policy"),
        (lambda data: data.update(policies=[{**FEWER, "per_problem": []}]), "a policy without problems"),
        (lambda data: data.update(policies=[{"seed": 0}]), "policies.0.per_problem is missing"),
        (lambda data: data["policies"].append(OTHER), "its policies differ in problems"),
        (lambda data: data["policies"].append(FEWER), "or samples per problem"),
        (lambda data: data["policies"][0]["per_problem"][0].update(correct=[1]), "or samples per problem"),
        (lambda data: data["policies"][0]["per_problem"][0].update(correct=[]), "correct"),
        (lambda data: data["policies"][0].update(seed=-1), "policies.0.seed"),
        (lambda data: data["policies"][0].update(seed=10**400), "policies.0.seed"),
        (lambda data: data["policies"][0].update(avg_at_k=10**400), "policies.0.avg_at_k"),
        (lambda data: data.update(arm=None), "arm"),
    ],
)
def test_evaluation_that_cannot_be_used(evaluated: Path, change: Callable[[Any], None], sentence: str) -> None:
    edit(evaluated, change)
    with pytest.raises(StudyError, match=sentence) as error:
        read_evaluation_file(evaluated)
    assert str(evaluated) in str(error.value) and len(str(error.value)) < 600


def test_a_list_is_no_evaluation(evaluated: Path) -> None:
    evaluated.write_text("[]")
    vouch_again(evaluated)
    with pytest.raises(StudyError, match="holds list, not a JSON object"):
        read_evaluation_file(evaluated)


def test_the_rows_of_one_policy_may_not_be_ragged(evaluated: Path) -> None:
    edit(evaluated, lambda data: [p["per_problem"][1].update(correct=[0]) for p in data["policies"]])
    with pytest.raises(StudyError, match="a problem does not have 2 samples"):
        read_evaluation_file(evaluated)


# --- whole studies ---------------------------------------------------------------------------------------


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
    assert str(error.value).startswith(f"{path}: is missing")


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

    def fewer(data: Any) -> None:
        rows = {policy["seed"]: [row["correct"] for row in policy["per_problem"][1:]] for policy in data["policies"]}
        data["policies"] = [policy_of(seed, correct) for seed, correct in rows.items()]

    edit(path, fewer)
    with pytest.raises(StudyError, match="not those that the base policy was evaluated on"):
        read_results(study, folder, study.arms)
    edit(path, lambda data: data["policies"].pop())
    with pytest.raises(StudyError, match=r"mis\.json: holds no policy of seed 1"):
        read_results(study, folder, study.arms)


def test_operational_settings_may_differ(make_study: Callable[..., tuple[Study, Path]]) -> None:
    """A report may have other timeouts and checkpoints, and fewer seeds, than the training."""
    study, folder = make_study(seeds=[0, 1], training={"steps": 2}, ablations={})
    training = study.training.model_copy(update={"checkpoint_every": 7, "keep_checkpoints": 3, "max_skipped": 9})
    evaluation = study.evaluation.model_copy(update={"rollout_timeout": 1.0})
    fewer = study.model_copy(update={"seeds": (1,), "training": training, "evaluation": evaluation})
    results = read_results(fewer, folder, fewer.arms)
    assert [score.seed for score in results.evaluations["mis"].scores] == [1]


def test_baselines_are_of_the_base_policy(make_study: Callable[..., tuple[Study, Path]]) -> None:
    study, folder = make_study(seeds=[0], training={"steps": 2}, ablations={}, baselines=[0.01, 0.3])
    results = read_results(study, folder, study.arms)
    assert [(name, len(scores.scores)) for name, scores in results.baselines.items()] == [
        ("base@0.01", 1),
        ("base@0.3", 1),
    ]
    rows = [(score.arm, score.seed) for score in policy_scores(results)]
    assert rows[:4] == [("base", 0), ("base@0.01", 0), ("base@0.3", 0), ("naive", 0)]
    path = folder / "eval" / "base@0.3.json"
    vouch_again(path, policies=[{"seed": 0, "sha256": "f" * 64}])
    with pytest.raises(StudyError, match=r"base@0\.3\.json: is not of the policy and the problems of .*base\.json"):
        read_results(study, folder, study.arms)
    edit(path, lambda data: data.update(temperature=1.0))
    vouch_again(path, settings=study.evaluation.model_dump(mode="json"))
    with pytest.raises(StudyError, match=r"base@0\.3\.json: was evaluated with another temperature"):
        read_results(study, folder, study.arms)


@pytest.mark.parametrize("kept", ["policy", "snapshots/step-00000001"])
def test_the_evaluated_policies_are_those_in_the_runs_folders(
    make_study: Callable[..., tuple[Study, Path]], kept: str
) -> None:
    """A run that was trained again after its evaluation, with equal metrics: its weights alone are others."""
    study, folder = make_study(seeds=[0, 1], training={"steps": 2}, ablations={})
    job, path = folder / "train" / "dvp" / "seed1", folder / "eval" / "dvp.json"
    correct = [[row["correct"] for row in policy["per_problem"]] for policy in json.loads(path.read_text())["policies"]]
    weights = job / kept / "model.safetensors"
    weights.parent.mkdir(parents=True, exist_ok=True)
    weights.write_text("first")

    def vouch() -> None:
        write_manifest(job / MANIFEST, files_in(job), **read_manifest(job / MANIFEST).model_dump(exclude={"outputs"}))

    vouch()
    snapshots = [policy_of(1, correct[1], step=1)] if "step" in kept else []
    write_scores(
        folder, study, "dvp", [policy_of(seed, rows) for seed, rows in enumerate(correct)], snapshots=snapshots
    )
    read_results(study, folder, study.arms)
    weights.write_text("again")
    vouch()
    with pytest.raises(StudyError) as raised:
        read_results(study, folder, study.arms)
    assert str(raised.value) == f"{path}: evaluated another policy than {job / kept}; remove it to evaluate that one"


def flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


HELD = ("base/model.safetensors", "data/train.jsonl", "train/dvp/seed1/policy/model.safetensors",
        "train/dvp/seed1/tokens.npz", "eval/dvp.samples.jsonl", "eval/base.samples.jsonl")  # fmt: skip


@pytest.mark.parametrize("name", HELD)
def test_a_byte_flipped_anywhere_is_seen_when_the_report_alone_is_made_again(
    make_study: Callable[..., tuple[Study, Path]], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    study, folder = make_study(seeds=[0, 1], training={"steps": 2}, ablations={})
    for arm in ("base", "dvp"):
        samples, manifest = folder / f"eval/{arm}.samples.jsonl", manifest_of(folder / f"eval/{arm}.json")
        samples.write_text("{}\n", encoding="utf-8")
        known = read_manifest(manifest).model_dump(exclude={"outputs"})
        write_manifest(manifest, [samples, folder / f"eval/{arm}.json"], **known)
    assert read_results(study, folder, study.arms).edited == ()
    flip(folder / name)
    with pytest.raises(StudyError, match=rf"{name}: is not as its job left it"):
        read_results(study, folder, study.arms)
    if "policy" in name or name.startswith(("base", "data")):
        (folder / name).unlink()  # to save space, as it may be
        read_results(study, folder, study.arms)
    assert capsys.readouterr().err == ""


def test_results_of_an_edited_source_file_are_named(
    make_study: Callable[..., tuple[Study, Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    study, folder = make_study(seeds=[0, 1], training={"steps": 2}, ablations={})
    for name in ("train/dvp/seed1/manifest.json", "eval/mis.manifest.json"):
        vouch_again(
            folder / name.replace(".manifest", "").replace(MANIFEST, "run.json"), sources={"tailrl/x.py": "0" * 16}
        )
    capsys.readouterr()
    results = read_results(study, folder, study.arms)
    assert results.edited == ("tailrl/x.py",)
    first, second = (folder / name for name in ("train/dvp/seed1/manifest.json", "eval/mis.manifest.json"))
    sentence = f"{first}, {second}: made by another version of tailrl/x.py than is there now"
    assert capsys.readouterr().err == f"tailrl: {sentence}\n"
    assert "\n- Made by another version of tailrl/x.py than is there now.\n" in what_ran(results)


def test_runs_with_different_prompt_tokens_are_said(make_study: Callable[..., tuple[Study, Path]]) -> None:
    """By their records alone: an older one says nothing of its prompts, and is read as before."""
    study, folder = make_study(seeds=[0, 1], training={"steps": 2}, ablations={})
    sentence = "- The runs had different prompt tokens, made from the same problems:"
    for seed, digest, said in ((0, "first", False), (1, "first", False), (1, "second", True)):
        record = folder / "train" / "dvp" / f"seed{seed}" / "run.json"
        edit(record, lambda data, digest=digest: data["fingerprint"].update(prompts=digest))
        assert (sentence in what_ran(read_results(study, folder, study.arms))) == said


@pytest.mark.parametrize(("steps", "stopped", "accepted"), [(2, "a rule", True), (3, "a rule", True), (2, None, False)])
def test_a_run_may_end_early_by_a_rule_alone(tmp_path: Path, steps: int, stopped: str | None, accepted: bool) -> None:
    study = parse_study({"name": "s", "seeds": [0], "arms": {"a": {}}, "training": {"steps": 3}})
    points = [{"train/step": float(step)} for step in range(steps)]
    write_job(tmp_path / "train" / "a" / "seed0", record_of(study.run("a"), 0, stopped=stopped), points)
    for arm in ("a", "base"):
        write_scores(tmp_path, study, arm, [policy_of(0, [[0] * 8])])
    if accepted:
        assert len(read_results(study, tmp_path, ["a"]).runs["a"][0].metrics["train/step"]) == steps
    else:
        with pytest.raises(StudyError, match=r"metrics\.jsonl: holds 2 steps, and its run has 3"):
            read_results(study, tmp_path, ["a"])


def test_the_first_kept_step_may_be_any(tmp_path: Path) -> None:
    """Those before it were skipped."""
    study = parse_study({"name": "s", "seeds": [0], "arms": {"a": {}}, "training": {"steps": 12}})
    points = [{"train/step": float(step)} for step in range(12)]
    write_job(tmp_path / "train" / "a" / "seed0", record_of(study.run("a"), 0), points, tokens_of([3, 3, 10]))
    for arm in ("a", "base"):
        write_scores(tmp_path, study, arm, [policy_of(0, [[0] * 8])])
    tokens = read_results(study, tmp_path, ["a"]).runs["a"][0].tokens
    np.testing.assert_array_equal(tokens.step_T, [3, 3, 10])


# --- records and tables ----------------------------------------------------------------------------------


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = record_of(STUDY.run("naive"), 4, commit=None, sampler_self_test=None, stopped="a rule")
    write_record(tmp_path, record)
    write_manifest(tmp_path / MANIFEST, files_in(tmp_path))
    assert read_record(tmp_path, RunRecord) == record
    assert record.run == STUDY.run("naive")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data["hardware"].update(cores="2"), "hardware.cores"),
        (lambda data: data["hardware"].pop("gpu"), "hardware.gpu is missing"),
        (lambda data: data["versions"].update(torch=2), "versions.torch"),
        (lambda data: data.update(dirty="no"), "dirty"),
        (lambda data: data.update(resumed_at_steps=[1, -1]), "resumed_at_steps.1"),
        (lambda data: data.update(fingerprint=[]), "fingerprint"),
        (lambda data: data["settings"]["training"].update(steps="3x"), "settings: training.steps"),
        (lambda data: data["settings"].pop("sampler"), "settings: sampler is missing"),
        (lambda data: data.update(settings=None), "settings"),
    ],
)
def test_a_record_that_cannot_be_used(tmp_path: Path, change: Callable[[Any], None], words: str) -> None:
    write_record(tmp_path, record_of(STUDY.run("naive"), 4))
    write_manifest(tmp_path / MANIFEST, files_in(tmp_path))
    edit(tmp_path / "run.json", change)
    with pytest.raises(StudyError) as error:
        read_record(tmp_path, RunRecord)
    assert str(error.value).startswith(f"{tmp_path / 'run.json'}: ") and words in str(error.value)

"""A run that verl trains: what its command gets, and what becomes of its files. verl's own code: tests/verl."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from run_fixture import Runs, make_runs

from tailrl.artifacts.metrics import read_metrics
from tailrl.artifacts.records import RunRecord, read_record
from tailrl.artifacts.tokens import read_token_arrays
from tailrl.config.jobs import Run
from tailrl.integrations.verl.reward import compute_score
from tailrl.model.policy import encode_prompt, load_tokenizer
from tailrl.runtime.errors import StudyError
from tailrl.tasks.problem import Problem, read_problems, write_problems
from tailrl.training import verl
from tailrl.training.checkpoints import Checkpoints

STAND_IN = """#!{python}
# Does what verl's command leaves: of each step the plugin's log and verl's metrics, and behind the last the policy.
import json, os, pathlib, shutil, sys
lines = {{key: value.strip('"') for key, value in (line.lstrip("+").split("=", 1) for line in sys.argv[3:])}}
folder = pathlib.Path(lines["trainer.default_local_dir"])
(folder.parent / "lines.json").write_text(json.dumps(sys.argv[1:]))
saved = folder / "latest_checkpointed_iteration.txt"
begun = int(saved.read_text()) if saved.is_file() else 0
steps = int(lines["trainer.total_training_steps"])
last = int(os.environ.get("STOP_AFTER", steps))
logged = pathlib.Path(lines["tailrl.log.folder"])
logged.mkdir(parents=True, exist_ok=True)
with open(lines["ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH"], "w") as file:
    for step in range(begun + 1, last + 1):
        shutil.copy(f"{replay}/{{step}}.jsonl", logged)
        data = {{"actor/lr": 1e-3, "actor/pg_loss": 0.5, "actor/grad_norm": 2.0, "actor/entropy": 9.0, "none": None}}
        if not (step == last and "LOSE_LAST" in os.environ):  # verl saves before it writes a step's metrics
            file.write(json.dumps({{"step": step, "data": data}}) + "\\n")
        left = folder / f"global_step_{{step}}/actor"
        shutil.copytree(lines["actor_rollout_ref.model.path"], left / "huggingface")
        saved.write_text(str(step))
print("verl says goodbye", flush=True)
if "KILLED" in os.environ:
    os.kill(os.getpid(), 9)
sys.exit(3 if last < steps else 0)
"""

SIZES = {"steps": 3, "prompts": 2, "group_size": 2, "keep_tokens_every": 1}
SAME = (
    "rollout_corr/k3_kl", "rollout_corr/kl", "rollout_corr/chi2_seq", "rollout_corr/rollout_is_mean",
    "rollout_corr_raw/rollout_is_eff_sample_size", "rollout_corr_unmasked/k3_kl", "rollout_corr_unmasked/training_ppl",
    "rollout_corr/c_positive_advantage", "rollout_corr/c_negative_advantage",
    "dvp/sampled_outside_train_support_fraction", "reward/mean",
    "reward/all_wrong_fraction", "response/length_mean", "response/length_max", "dvp/kept_mass_train_mean",
)  # fmt: skip


@pytest.fixture
def runs(
    tmp_path: Path, policy_folder: Path, problems: list[Problem], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Runs]:
    """Runs of our own loop, and a stand-in for verl's command that logs what the first of them sampled."""
    made = make_runs(tmp_path, policy_folder, problems, monkeypatch)
    made.train_rank(made.settings({"sampler": {"engine": "transformers", "dtype": "bfloat16"}}, **SIZES), 5, "own")
    replay = tmp_path / "replay"
    replay.mkdir()
    for step, rows in enumerate(rows_of(tmp_path / "own"), start=1):
        (replay / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    stand_in = tmp_path / "python"
    stand_in.write_text(STAND_IN.format(python=sys.executable, replay=replay), encoding="utf-8")
    stand_in.chmod(0o755)
    monkeypatch.setenv(verl.PYTHON, str(stand_in))
    yield made


def rows_of(job: Path) -> list[list[dict[str, Any]]]:
    """The tokens of a run as the plugin logs them, by step; the prompts' tokens are made up."""
    arrays = read_token_arrays(job)
    steps = []
    for step in np.unique(arrays["step"]):
        rows = []
        for number in np.unique(arrays["sequence"][arrays["step"] == step]):
            of = (arrays["step"] == step) & (arrays["sequence"] == number)
            rows.append(
                {
                    "token_ids": [5, 6, int(number) // SIZES["group_size"], *arrays["token"][of].tolist()],
                    "mask": (~arrays["outside"][of]).astype(int).tolist(),
                    "sampler_logprobs": arrays["logp_infer_masked"][of].tolist(),
                    "trainer_logprobs": arrays["logp_train_masked"][of].tolist(),
                    "advantage": arrays["advantage"][of].tolist(),
                    "reward": float(arrays["reward"][of][0]),
                }
            )
        # verl's order is another one.
        steps.append(rows[::-1])
    return steps


def by_verl(runs: Runs, **training: Any) -> Run:
    return runs.settings({"sampler": {"engine": "vllm"}}, **SIZES, backend="verl", **training)


def train(runs: Runs, run: Run, name: str = "out") -> Path:
    verl.train(run, 5, runs.policy, runs.folder / "problems.jsonl", runs.folder / name, runs.folder, devices=2)
    return runs.folder / name


def test_a_look_at_the_metrics_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    """Of a file that grows, each whole line once; half a line waits for its rest."""
    file = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "data": {"actor/lr": 0.1 * step, "actor/kl": None}}) for step in (1, 2, 3)]
    assert verl._read_points(file) == ({}, 0)
    file.write_text(f"{lines[0]}\n" + json.dumps({"step": 0, "data": {"val/acc": 1}}) + f"\n{lines[1][:9]}")
    first, end = verl._read_points(file)
    assert first == {1: {"actor/lr": 0.1}} and verl._read_points(file, end) == ({}, end)
    with file.open("a") as opened:
        opened.write(f"{lines[1][9:]}\n{lines[2]}\n")
    later, end = verl._read_points(file, end)
    assert list(later) == [2, 3] and end == file.stat().st_size and verl._read_points(file, end) == ({}, end)


def test_its_results_are_those_of_our_own_loop(runs: Runs) -> None:
    """The same tokens, rewards and weights give the same numbers."""
    out, own = train(runs, by_verl(runs)), runs.folder / "own"
    theirs, ours = read_metrics(out), read_metrics(own)
    for key in SAME:
        np.testing.assert_allclose(theirs[key], ours[key], rtol=1e-4, atol=1e-9, err_msg=key)
    assert (ours["rollout_corr/k3_kl"] > 1e-8).all() and theirs["train/loss"].tolist() == [0.5] * 3
    np.testing.assert_allclose(theirs["policy/entropy"], 9.0 / ours["response/length_mean"])
    arrays, kept = read_token_arrays(out), read_token_arrays(own)
    for name in ("step", "logp_train", "logp_infer", "outside", "advantage", "reward"):
        assert sorted(arrays[name].tolist()) == sorted(kept[name].tolist()), name
    record = read_record(out, RunRecord)
    assert record.settings["training"]["backend"] == "verl" and record.resumed_at_steps == []
    assert (out / "policy/model.safetensors").is_file() and [*(out / "checkpoints").glob("verl-*")] == []


def test_what_verl_does_not_say_of_a_pruned_policy_is_null(runs: Runs) -> None:
    arm = {"sampler": {"engine": "vllm"}, "vocabulary": {"rule": "min_p", "rho": "e-13"}}
    metrics = read_metrics(train(runs, runs.settings(arm, **SIZES, backend="verl")))
    unknown = ("policy/entropy", "dvp/kept_mass_rollout_mean", "dvp/outside_delta_abs_mean")
    for key in (*unknown, *(key for key in metrics if key.startswith("rollout_corr_unmasked/"))):
        assert np.isnan(metrics[key]).all(), key
    own = read_metrics(runs.folder / "own")
    np.testing.assert_allclose(metrics["rollout_corr/k3_kl"], own["rollout_corr/k3_kl"], rtol=1e-4)
    np.testing.assert_allclose(metrics["dvp/threshold"], -13.0)


def test_verl_reads_the_studys_problems_as_our_loop_does(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoints, "clear", lambda _: None)
    out = train(runs, by_verl(runs, verl_overrides=["trainer.nnodes=4"]))
    [folder] = (out / "checkpoints").glob("verl-*")
    rows = pyarrow.parquet.read_table(folder / "problems.parquet").to_pylist()
    problems = read_problems(runs.folder / "problems.jsonl")
    given, own = load_tokenizer(folder / "policy"), load_tokenizer(runs.policy)
    for row, problem in zip(rows, problems, strict=True):
        ids = given.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False)
        assert list(ids) == encode_prompt(own, problem.prompt)
        right = compute_score("x", f"it is \\boxed{{{problem.answer}}}", problem.answer, row["extra_info"])
        assert (right, compute_score("x", "nothing", problem.answer, row["extra_info"])) == (1.0, 0.0)
    lines = json.loads((folder / "lines.json").read_text())
    assert lines[:2] == ["-m", "verl.trainer.main_ppo"] and lines[-1] == "trainer.nnodes=4"
    assert {"trainer.n_gpus_per_node=2", "trainer.total_training_steps=3", "data.seed=5"} <= set(lines)
    reward = next(line for line in lines if "custom_reward_function.path" in line).split("=")[1]
    assert Path(reward.strip('"')).is_file()
    # 60 problems have 30 batches of 2.
    assert "trainer.total_epochs=2" in lines


def test_an_interrupted_run_goes_on_from_verls_checkpoint(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOP_AFTER", "2")
    with pytest.raises(StudyError, match=r"verl ended with 3 after 2 of 3 steps \(verl says goodbye\); .*output\.txt"):
        train(runs, by_verl(runs))
    monkeypatch.delenv("STOP_AFTER")
    out = train(runs, by_verl(runs))
    assert read_record(out, RunRecord).resumed_at_steps == [2]
    metrics = read_metrics(out)
    np.testing.assert_allclose(metrics["rollout_corr/k3_kl"], read_metrics(runs.folder / "own")["rollout_corr/k3_kl"])
    # What a killed Snakemake removed is there again, without verl.
    shutil.rmtree(out / "policy")
    monkeypatch.setenv(verl.PYTHON, "/nowhere/python")
    assert (train(runs, by_verl(runs)) / "policy").is_dir()
    with pytest.raises(StudyError, match=r"training\.backend: verl: set TAILRL_VERL_PYTHON to the Python of an env"):
        train(runs, by_verl(runs, learning_rate=0.5))


def test_a_step_whose_metrics_a_kill_left_out_is_in_the_log(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"STOP_AFTER": "2", "LOSE_LAST": "1", "KILLED": "1"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        train(runs, by_verl(runs))
    assert ended.value.code == 128 + 9, "the rule starts it once more"
    for name in names:
        monkeypatch.delenv(name)
    metrics = read_metrics(train(runs, by_verl(runs)))
    np.testing.assert_allclose(metrics["rollout_corr/k3_kl"], read_metrics(runs.folder / "own")["rollout_corr/k3_kl"])
    assert np.isnan(metrics["train/loss"]).tolist() == [False, True, False]


def test_a_response_that_verl_rejects_has_its_advantage(runs: Runs) -> None:
    for file in (runs.folder / "replay").iterdir():
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        rows[0]["advantage"] = [None] * len(rows[0]["mask"])
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    theirs, ours = read_metrics(train(runs, by_verl(runs))), read_metrics(runs.folder / "own")
    for key in ("rollout_corr/c_positive_advantage", "rollout_corr/c_negative_advantage"):
        np.testing.assert_allclose(theirs[key], ours[key], rtol=1e-4, atol=1e-12)


def test_a_step_wants_as_many_problems_as_there_are(runs: Runs) -> None:
    write_problems(read_problems(runs.folder / "problems.jsonl")[:1], runs.folder / "problems.jsonl")
    with pytest.raises(StudyError, match=r"training\.prompts: 2 a step, and there are 1 problems"):
        train(runs, by_verl(runs))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda rows: rows[1:], r"2\.jsonl: holds 3 responses, which are not 2 times 2"),
        (
            lambda rows: [{k: v for k, v in row.items() if k != "mask"} for row in rows],
            r"2\.jsonl: a response has no mask",
        ),
    ],
)
def test_a_log_that_is_not_whole_is_refused(runs: Runs, change: Callable[[Any], Any], sentence: str) -> None:
    file = runs.folder / "replay/2.jsonl"
    rows = change([json.loads(line) for line in file.read_text().splitlines()])
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(StudyError, match=sentence):
        train(runs, by_verl(runs))

"""Files of metrics: each kind as its own writer makes it, where that is installed, or else as its documents say."""

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from tailrl.curves.history import History, read_address, read_all, read_history
from tailrl.curves.names import KNOWN, Names
from tailrl.curves.reading import own_names, read_curves, together
from tailrl.curves.wandb_file import read_wandb_file
from tailrl.runtime.errors import StudyError

K3 = "rollout_corr/k3_kl"
VALUES = [0.001, 0.002, 0.0015]


def curve(history: History | None, name: str = K3, run: str = "") -> tuple[list[float], list[float]]:
    assert history is not None
    [found] = [one for one in history.curves if (one.name, one.run) == (name, run)]
    return found.step_N.tolist(), found.value_N.tolist()


def written(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


# --- W&B's own file ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wandb_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that wandb itself wrote, offline: with nested, missing, NaN and large values."""
    import wandb

    folder = tmp_path_factory.mktemp("wandb")
    with wandb.init(mode="offline", dir=folder, project="p", settings=wandb.Settings(silent=True)) as run:
        for step in range(300):
            run.log({K3: step / 1000, "nested": {"inner": step}, "text": "x" * 300, "actor/lr": 0.0}, step=2 * step)
        run.log({K3: float("nan"), "large": 10**15}, step=1000)
    [path] = folder.rglob("*.wandb")
    for _ in range(100):  # wandb's own process may write the end a moment later
        if "large" in list(read_wandb_file(path))[-1]:
            break
        time.sleep(0.1)
    return path


def test_a_file_that_wandb_wrote(wandb_file: Path) -> None:
    assert wandb_file.stat().st_size > 2 * 32768  # records that go over the ends of blocks
    history = read_history(wandb_file)
    steps, values = curve(history)
    assert steps == [*range(0, 600, 2), 1000]
    assert values[:-1] == [step / 1000 for step in range(300)]
    assert np.isnan(values[-1])
    assert curve(history, "nested/inner")[1] == [*range(300)]
    assert curve(history, "large") == ([1000], [10**15])


def test_a_run_that_is_still_written_is_read_so_far(wandb_file: Path, tmp_path: Path) -> None:
    content = wandb_file.read_bytes()
    whole = len(list(read_wandb_file(wandb_file)))
    for share in (0.3, 0.6, 0.9):
        part = tmp_path / f"{share}.wandb"
        part.write_bytes(content[: int(share * len(content))])
        rows = list(read_wandb_file(part))
        assert 0 < len(rows) < whole
        assert rows == list(read_wandb_file(wandb_file))[: len(rows)]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"x\.wandb: is no file of a W&B run"):
        list(read_wandb_file(written(tmp_path, "x.wandb", "hello")))


def test_damage_ends_in_a_sentence_or_in_fewer_rows(wandb_file: Path, tmp_path: Path) -> None:
    content = bytearray(wandb_file.read_bytes())
    generator = np.random.default_rng(0)
    for number in range(50):
        damaged = content.copy()
        for place in generator.integers(7, len(damaged), 5):
            damaged[place] = generator.integers(256)
        path = tmp_path / f"{number}.wandb"
        path.write_bytes(damaged)
        try:
            read_history(path)
        except StudyError as error:
            assert str(path) in str(error)


# --- text ----------------------------------------------------------------------------------------------


def test_w_and_b_export_of_two_runs(tmp_path: Path) -> None:
    lines = [f'"Step","a - {K3}","a - {K3}__MIN","a - {K3}__MAX","b - {K3}"', '"0","0.1","0.1","0.1",""']
    lines += ['"1","0.2","0.2","0.2","NaN"', '"2","","","","0.4"']
    history = read_history(written(tmp_path, "export.csv", "\n".join(lines)))
    assert curve(history, run="a") == ([0, 1], [0.1, 0.2])
    steps, values = curve(history, run="b")
    assert steps == [1, 2]
    assert np.isnan(values[0]) and values[1] == 0.4


@pytest.mark.parametrize("ending", ["jsonl", "ndjson"])
def test_json_lines(tmp_path: Path, ending: str) -> None:
    rows = [{"step": step, "train": {K3: value}, "note": None} for step, value in enumerate(VALUES)]
    text = "\ufeff" + "\n\n".join(map(json.dumps, rows)) + '\n{"step": 3, "tra'
    history = read_history(written(tmp_path, f"m.{ending}", text))
    assert curve(history, f"train/{K3}") == ([0, 1, 2], VALUES)


def test_trainer_state(tmp_path: Path) -> None:
    state = {"log_history": [{"step": step, K3: value, "epoch": 0.1} for step, value in enumerate(VALUES)]}
    assert curve(read_history(written(tmp_path, "trainer_state.json", json.dumps(state)))) == ([0, 1, 2], VALUES)


def test_tensorboards_csv_has_its_metric_in_its_name(tmp_path: Path) -> None:
    text = "Wall time,Step,Value\n" + "".join(f"1.7e9,{step},{value}\n" for step, value in enumerate(VALUES))
    path = written(tmp_path, "run-exp_1-tag-rollout_corr_k3_kl.csv", text)
    assert curve(read_history(path)) == ([0, 1, 2], VALUES)


def test_verls_console(tmp_path: Path) -> None:
    lines = ["loading", "\x1b[36m(TaskRunner pid=7)\x1b[0m step:1 - actor/lr:1e-06 - rollout_corr/k3_kl:0.001"]
    lines += ["(TaskRunner pid=7) step:2 - actor/lr:0.0 - rollout_corr/k3_kl:np.float64(2.5e-03) - val/x:nan", "end"]
    history = read_history(written(tmp_path, "verl.log", "\n".join(lines)))
    assert curve(history) == ([1, 2], [0.001, 0.0025])
    assert curve(history, "actor/lr")[1] == [1e-6, 0.0]


def test_any_table_with_steps(tmp_path: Path) -> None:
    text = f"global_step,loss,{K3}\n" + "".join(f"{step},1,{value}\n" for step, value in enumerate(VALUES))
    assert curve(read_history(written(tmp_path, "t.csv", text))) == ([0, 1, 2], VALUES)


def test_a_restart_replaces_the_steps_that_it_repeats(tmp_path: Path) -> None:
    rows = [(0, 1.0), (1, 2.0), (2, 3.0), (1, 20.0), (2, 30.0), (3, 40.0)]
    text = "\n".join(json.dumps({"step": step, K3: value}) for step, value in rows)
    history = read_history(written(tmp_path, "m.jsonl", text))
    assert curve(history) == ([0, 1, 2, 3], [1.0, 20.0, 30.0, 40.0])
    assert history is not None and history.restarts == {"": (1.0,)}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("log.jsonl", '{"sampler_logprobs": [-1.0], "trainer_logprobs": [-1.0], "step": 1}'),
        ("texts.jsonl", '{"input": "q", "output": "a", "score": 1.0, "step": 12}'),
        ("study.json", '{"a": 1}'),
        ("list.json", "[1, 2]"),
        ("broken.json", "{"),
        ("deep.json", "[" * 100_000),
        ("table.csv", "a,b\n1,2\n"),
        ("empty.csv", ""),
        ("plain.txt", "nothing here"),
        ("page.html", "<p>"),
    ],
)
def test_what_is_no_history_is_left_to_others(tmp_path: Path, name: str, text: str) -> None:
    assert read_history(written(tmp_path, name, text)) is None


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, "m.jsonl", f'{{"step": 1, "{K3}": 1}}\n{{broken\n{{"step": 2, "{K3}": 1}}\n')
    with pytest.raises(StudyError, match=r"m\.jsonl, line 2: is no JSON"):
        read_history(path)


def test_of_a_large_log_of_tokens_one_line_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "log.jsonl", '{"sampler_logprobs": [-1.0], "step": 1}\n' * 1000)
    monkeypatch.setattr("tailrl.curves.history.MOST_BYTES", 1000)
    assert read_history(path) is None


def test_curves_and_logs_are_given_apart(tmp_path: Path) -> None:
    metrics = written(tmp_path, "m.jsonl", f'{{"step": 1, "{K3}": 1}}\n')
    other = written(tmp_path, "x.jsonl", '{"sampler_logprobs": [1]}\n')
    assert read_all([str(other), str(metrics)]) == []
    with pytest.raises(StudyError, match="give logs and curves apart"):
        read_all([str(metrics), str(other)])


def test_an_address_needs_a_run_and_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StudyError, match="is no address of a W&B run"):
        read_address("https://wandb.ai/entity/project")
    monkeypatch.delitem(os.environ, "WANDB_API_KEY", raising=False)
    with pytest.raises(StudyError, match="WANDB_API_KEY is not set"):
        read_address("https://wandb.ai/entity/project/runs/abc?workspace=user")


@pytest.mark.parametrize(
    ("name", "framework", "of"),
    [
        ("rollout_corr/k3_kl", "verl", "k3"),
        ("train/gen_kl_error", "NeMo-RL", "k3"),
        ("mismatch_kl/all/mean", "prime-rl", "k3"),
        ("train/train_rollout_logprob_abs_diff", "slime", "response_abs_logp"),
        ("train/sampling/sampling_logp_difference/mean", "TRL", "abs_logp"),
        ("policy/rollout_train_logprobs_abs_diff_mean", "SkyRL", "abs_logp"),
    ],
)
def test_names_of_frameworks(name: str, framework: str, of: str) -> None:
    metric = KNOWN.metric(name)
    assert metric is not None and (metric.framework, metric.of) == (framework, of)


def test_other_names_are_unknown() -> None:
    assert KNOWN.metric("loss") is None and KNOWN.metric("xrollout_corr/k3_kl") is None


def test_a_wandb_run_may_have_a_dash_in_its_name(tmp_path: Path) -> None:
    header = f"Step,qwen3 - test - {K3},qwen3 - test - {K3}__MIN"
    path = written(tmp_path, "dash.csv", f"{header}\n0,0.001,0.001\n1,0.002,0.002\n")
    assert curve(read_history(path), run="qwen3 - test") == ([0, 1], [0.001, 0.002])


def test_our_own_names_are_known_metrics() -> None:
    names = {
        "k3": "k3",
        "k1": "k1",
        "train/abs_logp": "abs_logp",
        "mismatch_k3": "k3",
        "recall_k1": None,
        "topk3": None,
        "policy/reference_k3": None,
        "train/ref/k3": None,
    }
    for name, of in names.items():
        metric = KNOWN.metric(name)
        assert (metric.of if metric else None) == of, name


def test_other_lists_in_a_row_of_metrics_are_left_out_and_a_log_of_tokens_is_no_curve(tmp_path: Path) -> None:
    rows = [{"step": step, K3: value, "layers": [1, 2]} for step, value in enumerate(VALUES)]
    path = written(tmp_path, "m.jsonl", "\n".join(map(json.dumps, rows)))
    assert curve(read_history(path)) == ([0, 1, 2], VALUES)
    tokens = written(tmp_path, "t.jsonl", json.dumps({"step": 0, "k3": 0.1, "sampler_logprobs": [-1.0]}))
    assert read_history(tokens) is None


def test_trls_console_has_a_dictionary_of_python_a_line(tmp_path: Path) -> None:
    name = "sampling/sampling_logp_difference/mean"
    lines = ["loading {'model'}", "{'config': 3}", "{" + "[" * 9000 + "}"]
    lines += [f" 10%|# | 1/3\r{{'loss': 0.1, '{name}': {value}, 'epoch': 0.1}}" for value in VALUES[:2]]
    lines.append(f"{{'loss': nan, '{name}': '{VALUES[2]}'}}")
    lines.append(f"{{'loss': 0.1, '{name}': -inf}}")
    told = read_history(written(tmp_path, "trl.log", "\n".join(lines)))
    assert curve(told, name) == ([0, 1, 2, 3], [*VALUES, -np.inf])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("m.csv", "iter,gap\n0,0.001\n1,0.002\n2,0.0015\n"),
        ("m.jsonl", "\n".join(json.dumps({"iter": step, "gap": value}) for step, value in enumerate(VALUES))),
        ("m.json", json.dumps([{"iter": step, "gap": value} for step, value in enumerate(VALUES)])),
        ("m.log", "\n".join(f"{{'iter': {step}, 'gap': {value}}}" for step, value in enumerate(VALUES))),
        ("wandb.csv", '"iter","run - gap"\n0,0.001\n1,0.002\n2,0.0015\n'),
        ("run-x-tag-gap.csv", "Wall time,Step,Value\n1.0,0,0.001\n2.0,1,0.002\n3.0,2,0.0015\n"),
    ],
)
def test_a_users_own_names_are_read_in_each_kind_of_file(tmp_path: Path, name: str, text: str) -> None:
    path = written(tmp_path, name, text)
    names = own_names({"k3": "gap"} if "Wall" in text else {"k3": "gap", "step": "iter"})
    [reading] = read_curves(together(read_all([path], names)), names).runs
    assert reading.main.metric.of == "k3" and reading.main.curve.value_N.tolist() == VALUES
    assert reading.main.curve.step_N.tolist() == [0, 1, 2]


def test_names_of_a_log_and_of_curves_are_not_mixed() -> None:
    assert own_names({"sampler": "a", "step": "b"}) == Names()
    with pytest.raises(StudyError, match="sampler is of a log of tokens, and the others of curves"):
        own_names({"sampler": "a", "k3": "b"})

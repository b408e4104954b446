"""Logs that grow while they are followed: half lines, rotation, new files, restarts, and every kind of file."""

import gzip
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailrl.curves.wandb_file import read_wandb_file
from tailrl.diagnosis.log import LoggedRow
from tailrl.diagnosis.log_files import write_log
from tailrl.watch.follow import ALARMED, NOTHING, QUIET, Judged, Watch, watch


def responses(step: int, count: int = 4, noise: float = 0.01, **columns: Any) -> list[dict[str, Any]]:
    random = np.random.default_rng([step, count])
    made = []
    for number in range(count):
        sampler_T = -random.exponential(1.0, 30)
        trainer_T = np.minimum(sampler_T + random.normal(0, noise, 30) * (1 - np.exp(sampler_T)), 0.0)
        made.append(
            {
                "step": step,
                "version": step,
                "prompt": f"prompt {step} {number // 2}",
                "token_ids": random.integers(0, 900, 30).tolist(),
                "sampler_logprobs": sampler_T.tolist(),
                "trainer_logprobs": trainer_T.tolist(),
                **columns,
            }
        )
    return made


def lines(*steps: int, **columns: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for step in steps for row in responses(step, **columns))


def append(file: Path, content: bytes) -> None:
    with file.open("ab") as opened:
        opened.write(content)


def write_offline_run(folder: Path, rows: list[dict[str, float]]) -> Path:
    """The file of an offline run of the real wandb."""
    import wandb

    folder.mkdir()
    with wandb.init(mode="offline", dir=folder, project="p", settings=wandb.Settings(silent=True)) as run:
        for row in rows:
            run.log(row)
    [path] = folder.rglob("*.wandb")
    for _ in range(100):  # wandb's own process may write the end a moment later
        if len(list(read_wandb_file(path))) == len(rows):
            return path
        time.sleep(0.1)
    raise AssertionError(path)


def judged(following: Watch, whole: bool = False) -> dict[float, Judged]:
    return {one.step.number: one for one in following.look(whole)}


def test_a_step_is_judged_once_a_later_one_has_begun(tmp_path: Path):
    log = tmp_path / "tokens.jsonl"
    log.write_bytes(lines(0))
    following = Watch(tmp_path)
    assert list(judged(following)) == []
    append(log, lines(1))
    assert list(judged(following)) == [0]
    assert list(judged(following)) == []
    append(log, lines(2))
    assert list(judged(following)) == [1]
    assert list(judged(following, whole=True)) == [2]


def test_every_response_counts_once_however_the_file_grows(tmp_path: Path):
    """The log comes in pieces of 700 bytes, which end within lines."""
    log, content = tmp_path / "tokens.jsonl", lines(0, 1, 2, 3)
    log.touch()
    following, found = Watch(tmp_path), dict[float, Judged]()
    for begin in range(0, len(content), 700):
        append(log, content[begin : begin + 700])
        found |= judged(following)
    found |= judged(following, whole=True)
    assert sorted(found) == [0, 1, 2, 3]
    assert [one.step.responses for one in found.values()] == [4] * 4
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "tokens.jsonl").write_bytes(content)
    at_once = judged(Watch(tmp_path / "whole"), whole=True)
    assert [one.step for one in at_once.values()] == [one.step for one in found.values()]


def test_a_line_that_is_still_being_written_waits(tmp_path: Path):
    log, content = tmp_path / "tokens.jsonl", lines(0)
    log.write_bytes(content[:-20])
    following = Watch(tmp_path)
    judged(following)
    append(log, content[-20:])
    assert judged(following, whole=True)[0].step.responses == 4


def test_a_rotated_file_goes_on_where_it_was(tmp_path: Path):
    log = tmp_path / "tokens.jsonl"
    log.write_bytes(lines(0, 1))
    following = Watch(tmp_path)
    found = judged(following)
    append(log, lines(2))
    log.rename(tmp_path / "tokens.jsonl.1")
    log.write_bytes(lines(3))
    found |= judged(following) | judged(following, whole=True)
    assert [one.step.responses for one in found.values()] == [4] * 4


def test_a_file_that_was_cut_is_read_anew(tmp_path: Path):
    log = tmp_path / "tokens.jsonl"
    log.write_bytes(lines(0, 1))
    following = Watch(tmp_path)
    found = judged(following)
    with log.open("r+b") as opened:
        opened.truncate(0)
        opened.write(lines(2))
    found |= judged(following, whole=True)
    assert sorted(found) == [0, 1, 2]
    assert all(one.step.responses == 4 for one in found.values())


def test_new_files_are_found_and_ranks_add_up(tmp_path: Path):
    """prime-rl writes a folder a step, and a file a rank."""
    following, found = Watch(tmp_path), dict[float, Judged]()
    for step in range(3):
        for rank in range(2):
            file = tmp_path / f"token_exports/step_{step}/rank_{rank}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(lines(step, count=3 + rank))
            found |= judged(following)
    found |= judged(following, whole=True)
    assert [one.step.responses for one in found.values()] == [7, 7, 7]


def test_metrics_and_tokens_of_a_step_are_one(tmp_path: Path):
    (tmp_path / "tokens.jsonl").write_bytes(lines(0, 1))
    rows = [{"train/step": n, "actor/lr": 1e-6, "actor/pg_clipfrac": 0.25, "rollout_corr/k3_kl": 9.0} for n in (0, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    step = judged(Watch(tmp_path), whole=True)[1].step
    assert (step.learning_rate, step.clip, step.responses) == (1e-6, 0.25, 4)
    assert step.k3 < 0.1  # the tokens' own


def test_a_second_copy_of_the_responses_is_left_out(tmp_path: Path):
    rows = responses(0) + responses(1)
    logged = [
        LoggedRow(
            where="",
            sampler_T=np.array(row["sampler_logprobs"]),
            trainer_T=np.array(row["trainer_logprobs"]),
            token_T=np.array(row["token_ids"]),
            step=row["step"],
        )
        for row in rows
    ]
    write_log(logged, tmp_path / "log.parquet")
    (tmp_path / "tokens.jsonl").write_bytes(lines(0, 1))
    assert [one.step.responses for one in judged(Watch(tmp_path), whole=True).values()] == [4, 4]
    (tmp_path / "tokens.jsonl").unlink()
    assert [one.step.responses for one in judged(Watch(tmp_path), whole=True).values()] == [4, 4]


def test_a_table_that_is_written_again_with_more_rows_gives_the_new_ones(tmp_path: Path):
    """The step is still open when its second half comes."""
    log, rows = tmp_path / "log.parquet", responses(0, count=8)
    following, found = Watch(tmp_path), dict[float, Judged]()
    for count in (4, 8):
        logged = [
            LoggedRow("", np.array(row["sampler_logprobs"]), np.array(row["trainer_logprobs"]), step=0)
            for row in rows[:count]
        ]
        write_log(logged, log)
        found |= judged(following)
    found |= judged(following, whole=True)
    assert found[0].step.responses == 8


def test_compressed_logs_are_read_when_they_are_whole(tmp_path: Path):
    content = gzip.compress(lines(0, 1))
    log = tmp_path / "tokens.jsonl.gz"
    log.write_bytes(content[: len(content) // 2])
    following = Watch(tmp_path)
    judged(following)
    log.write_bytes(content)
    judged(following)
    assert 0 < len(judged(following, whole=True)) <= 2


def test_an_offline_file_of_wandb_is_followed(tmp_path: Path):
    """The file that wandb itself wrote, given in two pieces."""
    rows = [{"train/global_step": n, "sampling/sampling_logp_difference/mean": 0.01, "lr": 1e-6} for n in range(12)]
    rows += [{"train/global_step": 12, "sampling/sampling_logp_difference/mean": 0.2, "lr": 1e-6}]
    whole = write_offline_run(tmp_path / "made", rows)
    content, log = whole.read_bytes(), tmp_path / "watched" / whole.name
    log.parent.mkdir()
    log.write_bytes(content[: len(content) // 2])
    following = Watch(log.parent)
    found = judged(following)
    log.write_bytes(content)
    found |= judged(following) | judged(following, whole=True)
    assert sorted(found) == list(range(13))
    assert [alarm.name for alarm in found[12].alarms] == ["floor_jump"]
    assert not any(one.alarms for step, one in found.items() if step < 12)


def test_trainer_state_is_read_again_when_it_is_written_again(tmp_path: Path):
    file, history = tmp_path / "checkpoint-5" / "trainer_state.json", []
    file.parent.mkdir()
    following, found = Watch(tmp_path), dict[float, Judged]()
    for step in range(1, 7):
        history.append({"step": step, "learning_rate": 1e-6, "sampling/sampling_logp_difference/mean": 0.02})
        file.write_text(json.dumps({"log_history": history}), encoding="utf-8")
        found |= judged(following)
    found |= judged(following, whole=True)
    assert sorted(found) == [1, 2, 3, 4, 5, 6]


def test_a_run_that_was_started_again_is_judged_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    log = tmp_path / "tokens.jsonl"
    log.write_bytes(lines(*range(8)))
    following = Watch(tmp_path)
    first = [one.step.number for one in following.look()]
    append(log, lines(3, 4, 5, count=5))
    again = [one.step.number for one in following.look(whole=True)]
    assert first[:6] == [0, 1, 2, 3, 4, 5]
    assert again[-3:] == [3, 4, 5]
    assert "the log goes back to step 3" in capsys.readouterr().err


def test_a_copy_that_appears_at_the_end_is_no_restart(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    log = tmp_path / "tokens.jsonl"
    log.write_bytes(lines(*range(8)))
    following = Watch(tmp_path)
    first = judged(following)
    (tmp_path / "finished").mkdir()
    shutil.copy(log, tmp_path / "finished" / "tokens.jsonl")
    assert sorted([*first, *judged(following, whole=True)]) == list(range(8))
    assert "goes back" not in capsys.readouterr().err


def test_rows_that_come_late_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    log = tmp_path / "tokens.jsonl"
    log.write_bytes(lines(0, 1, 2, 3))
    following = Watch(tmp_path)
    done = max(judged(following))
    append(log, lines(int(done), count=2))
    found = judged(following, whole=True)
    assert done not in found
    assert "came after it was judged" in capsys.readouterr().err


def test_a_row_that_is_wrong_is_left_out_and_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    wrong = {**responses(0)[0], "trainer_logprobs": [-1.0]}
    content = lines(0) + json.dumps(wrong).encode() + b"\n" + b"{ no json\n" + lines(1)
    (tmp_path / "tokens.jsonl").write_bytes(content)
    assert [one.step.responses for one in judged(Watch(tmp_path), whole=True).values()] == [4, 4]
    told = capsys.readouterr().err
    assert "line 5: is left out: trainer_logprobs has 1 numbers" in told
    assert "line 6: is no JSON" in told


def test_other_files_of_a_run_are_no_logs(tmp_path: Path):
    (tmp_path / "problems.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 3, encoding="utf-8")
    (tmp_path / "train.log").write_text("loading weights\n", encoding="utf-8")
    (tmp_path / "list.jsonl").write_text("[1, 2]\n", encoding="utf-8")
    (tmp_path / "tokens.jsonl").write_bytes(lines(0))
    assert list(judged(Watch(tmp_path), whole=True)) == [0]


def test_a_digest_or_a_name_of_the_weights_is_read(tmp_path: Path):
    for number, columns in enumerate(({"weights_digest": "abc"}, {"version": "step-7-abc"})):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "tokens.jsonl").write_bytes(b"".join(lines(n, **columns) for n in range(8)))
        found = judged(Watch(folder), whole=True)
        assert [bool(one.alarms) for one in found.values()] == [False] * 5 + [True] * 3
        assert found[7].alarms[0].name == "weights_stop"


def test_prompts_are_known_by_a_column_or_by_the_ids_before_the_response(tmp_path: Path):
    with_ids = [{**row, "token_ids": [5, row["step"], 7, *row["token_ids"]]} for row in responses(3)]
    for row in with_ids:
        del row["prompt"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in with_ids), encoding="utf-8")
    assert len(judged(Watch(tmp_path / "a.jsonl"), whole=True)[3].step.prompts) == 1
    (tmp_path / "b.jsonl").write_bytes(lines(3))
    assert len(judged(Watch(tmp_path / "b.jsonl"), whole=True)[3].step.prompts) == 2


def test_a_log_without_steps_has_one_every_256_responses(tmp_path: Path):
    rows = [{name: value for name, value in row.items() if name != "step"} for row in responses(0, count=600)]
    (tmp_path / "tokens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert [one.step.responses for one in judged(Watch(tmp_path), whole=True).values()] == [256, 256, 88]


def stale(tmp_path: Path) -> Path:
    """Ten steps, of which the last has half the responses of later weights."""
    rows = [row for step in range(10) for row in responses(step)]
    rows[-1]["version"] = rows[-2]["version"] = 12
    (tmp_path / "tokens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return tmp_path


def test_lines_and_exit_codes(tmp_path: Path):
    shown: list[str] = []
    assert watch(stale(tmp_path), once=True, show=shown.append) == ALARMED
    assert shown[0].startswith("step 0  responses 4  lag 0  mean |Δ| ")
    assert shown[0].endswith("ok")
    assert shown[-1].startswith(
        "  ALARM negative_lag: 2 responses have weights of a version after their step, by up to 3."
    )
    shown.clear()
    assert watch(tmp_path, once=True, as_json=True, without=("negative_lag",), show=shown.append) == QUIET
    found = [json.loads(line) for line in shown]
    assert [one["step"] for one in found] == list(range(10))
    assert (found[3]["responses"], found[3]["alarms"]) == (4, [])
    assert "learning_rate" not in found[3]


def test_it_stops_at_the_first_alarm(tmp_path: Path):
    shown: list[str] = []
    assert watch(stale(tmp_path), once=True, stop=True, as_json=True, show=shown.append) == ALARMED
    assert json.loads(shown[-1])["alarms"][0]["name"] == "negative_lag"


def test_it_ends_when_nothing_new_comes(tmp_path: Path):
    (tmp_path / "tokens.jsonl").write_bytes(lines(0, 1))
    shown: list[str] = []
    assert watch(tmp_path, seconds=0.01, idle=0.05, show=shown.append) == QUIET
    assert len(shown) == 2
    assert watch(tmp_path / "tokens.jsonl", seconds=0.01, idle=0.05, show=shown.append) == QUIET
    (tmp_path / "empty").mkdir()
    assert watch(tmp_path / "empty", seconds=0.01, idle=0.02, show=shown.append) == NOTHING


def test_ctrl_c_judges_what_is_left(tmp_path: Path):
    shown: list[str] = []
    (tmp_path / "tokens.jsonl").write_bytes(lines(*range(5)))

    def show(line: str) -> None:
        shown.append(line)
        signal.raise_signal(signal.SIGINT)

    assert watch(tmp_path, as_json=True, show=show, seconds=60) == QUIET
    assert [json.loads(line)["step"] for line in shown] == list(range(5))


@pytest.mark.parametrize(("name", "words"), [("nowhere", "nowhere: is missing"), ("", "holds no step")])
def test_nothing_to_watch_is_one_sentence_and_no_alarm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, words: str
):
    assert watch(tmp_path / name, once=True) == NOTHING
    assert words in capsys.readouterr().err


def test_a_step_in_a_files_name_is_its_step(tmp_path: Path):
    """As NeMo-RL's logs have it, whose rows say no step."""
    for step in (3, 4):
        row = {"token_ids": [1, 2], "generation_logprobs": [-0.5, -1.0], "prev_logprobs": [-0.4, -1.1]}
        row |= {"token_loss_mask": [1, 1], "advantages": [0.1, 0.1]}
        (tmp_path / f"train_data_step{step}.jsonl").write_text((json.dumps(row) + "\n") * 4, encoding="utf-8")
    shown: list[str] = []
    assert watch(tmp_path, once=True, as_json=True, show=shown.append) == QUIET
    assert [json.loads(line)["step"] for line in shown] == [3, 4]


@pytest.mark.parametrize("value", ["NaN", '"NaN"', "Infinity", '"-Infinity"'])
def test_a_metric_that_is_no_number_is_an_alarm(tmp_path: Path, value: str):
    """W&B writes such numbers as text."""
    rows = [f'{{"step": {step}, "rollout_corr/k3_kl": {value if step == 7 else 0.001}}}' for step in range(9)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    shown: list[str] = []
    assert watch(tmp_path, once=True, as_json=True, show=shown.append) == ALARMED
    alarms = [[alarm["name"] for alarm in json.loads(line)["alarms"]] for line in shown]
    assert alarms == [[]] * 7 + [["not_finite"]] + [[]]


def test_a_correlation_without_spread_is_no_alarm(tmp_path: Path):
    """All probabilities are 1 once a policy is sure of each token, and verl's correlation is then 0/0."""
    rows = [
        {"step": step, "training/rollout_actor_probs_pearson_corr": math.nan, "rollout_corr/k3_kl": 0.0}
        for step in range(3)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(lines, encoding="utf-8")
    assert watch(tmp_path, once=True, as_json=True, show=[].append) == QUIET


def test_the_command_runs_without_torch(tmp_path: Path):
    """torch, transformers and vLLM cannot be imported in this process."""
    blocked = "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'vllm', 'wandb')))"
    words = ["tailrl", "watch", str(stale(tmp_path)), "--once"]
    code = f"{blocked}; from tailrl.cli import main; sys.argv = {words!r}; main()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (1, "")
    assert "ALARM negative_lag" in run.stdout


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with np.errstate(all="raise", under="ignore"):
        yield


def test_hostile_numbers_are_no_traceback(tmp_path: Path):
    rows = [*responses(0), {**responses(0)[0], "sampler_logprobs": [1e308] * 30, "step": 1}]
    rows += [{**responses(2)[0], "version": math.inf, "reward": None}, {**responses(3)[0], "step": None}]
    (tmp_path / "tokens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    assert set(judged(Watch(tmp_path), whole=True)) >= {0, 1, 2}
    shutil.copy(tmp_path / "tokens.jsonl", tmp_path / "metrics.csv")
    (tmp_path / "broken.jsonl").symlink_to(tmp_path / "nowhere.jsonl")
    assert set(judged(Watch(tmp_path), whole=True)) >= {0, 1, 2}


def test_a_folder_that_is_removed_meanwhile_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As a training removes its checkpoints."""
    (tmp_path / "tokens.jsonl").write_bytes(lines(0))
    (tmp_path / "checkpoints" / "old").mkdir(parents=True)
    scan = os.scandir

    def vanishing(path: str) -> Any:
        if str(path).endswith("old"):
            raise FileNotFoundError(2, "No such file or directory", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert list(judged(Watch(tmp_path), whole=True)) == [0]

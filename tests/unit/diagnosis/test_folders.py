"""Folders as they are: what is no log is left out and named, and copies of a response count once."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from log_fixture import SEQUENCES, plain_rows, prime_rl, write_lines

from tailrl.cli.commands import diagnose as diagnose_command
from tailrl.curves.history import read_folders
from tailrl.diagnosis import readers
from tailrl.diagnosis.diagnosis import diagnose
from tailrl.diagnosis.left_out import LeftOut
from tailrl.diagnosis.page import html_page, terminal_page
from tailrl.diagnosis.readers import read_log
from tailrl.runtime.errors import StudyError

ROWS = plain_rows()
METRICS = [{"step": step, "rollout_corr/k3_kl": 1e-4 * (1 + step % 3)} for step in range(30)]


def read(*paths: Path) -> tuple[int, tuple[str, ...]]:
    """The number of responses, and what was left out."""
    left_out = LeftOut()
    return sum(len(part.start_S) for _, part in read_log(paths, left_out=left_out)), left_out.sentences()


def shifted(rows: list[dict[str, Any]], by: float = 0.001) -> list[dict[str, Any]]:
    """The same texts, sampled once more: other log-probs."""
    return [row | {"sampler_logprobs": [x - by for x in row["sampler_logprobs"]]} for row in rows]


# --- what is no log --------------------------------------------------------------------------------------


def test_what_is_no_log_is_left_out_and_named_in_one_line(tmp_path: Path) -> None:
    write_lines(tmp_path / "run/log.jsonl", ROWS)
    (tmp_path / "run/config.json").write_text('{"model": "x"}')
    (tmp_path / "run/config.yaml").write_text("a: 1")
    (tmp_path / "run/STABLE").touch()
    (tmp_path / "run/.hidden.jsonl").write_text("{")
    (tmp_path / "run/plot.png").write_bytes(b"\x89PNG\r\n")
    (tmp_path / "run/model").mkdir()
    torch.save({"weight": torch.zeros(3)}, tmp_path / "run/model/optimizer.pt")
    count, notes = read(tmp_path / "run")
    assert count == len(ROWS)
    assert notes == (
        "4 files are left out, for they are no logs: config.json, config.yaml, model/optimizer.pt, plot.png.",
    )


def test_what_cannot_be_read_is_said_apart(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and no more")
    count, notes = read(tmp_path)
    assert count == len(ROWS) and len(notes) == 1
    assert notes[0].startswith("1 file is left out that cannot be read: b.parquet. The first: ")


def test_the_notes_stand_on_the_page_and_in_the_terminal(tmp_path: Path) -> None:
    write_lines(tmp_path / "log.jsonl", [*ROWS, ROWS[0] | {"mask": []}])
    (tmp_path / "notes.md").write_text("x")
    found = diagnose(tmp_path)
    assert len(found.notes) == 2
    terminal, page = terminal_page(found), html_page(found)
    for note in found.notes:
        assert f"Note: {note}" in terminal and note.replace("'", "&#39;") in page
    assert "1 of 4 rows is left out: their columns differ in length. The first: " in terminal
    assert "1 file is left out, for it is no log: notes.md." in terminal


def test_several_named_files_of_which_one_is_no_log(tmp_path: Path) -> None:
    good, bad = write_lines(tmp_path / "a.jsonl", ROWS), write_lines(tmp_path / "b.jsonl", [{"x": 1}])
    assert read(good, bad) == (len(ROWS), ("1 file is left out, for it is no log: b.jsonl.",))
    with pytest.raises(StudyError, match=r"b\.jsonl: holds no log of tokens in 2 files; the first: .*a\.jsonl"):
        read(write_lines(tmp_path / "a.jsonl", [{"y": 1}]), bad)
    with pytest.raises(StudyError, match=r"c\.jsonl: is missing"):
        read(good, tmp_path / "c.jsonl")


def test_a_folder_of_prime_rl_with_its_marks(tmp_path: Path) -> None:
    prime_rl(tmp_path)
    (tmp_path / "token_exports/step_3/STABLE").touch()
    traces = tmp_path / "rollouts/step_3/train/all/traces.jsonl"
    write_lines(traces, [{"id": "a", "nodes": [], "rewards": {}}])
    count, notes = read(tmp_path)
    assert count == len(SEQUENCES)
    assert notes == (f"1 file is left out, for it is no log: {traces.relative_to(tmp_path)}.",)
    with pytest.raises(
        StudyError, match=r"looks like a folder of prime-rl: traces\.jsonl is .* Set enable_token_export"
    ):
        read(tmp_path / "rollouts")


# --- rows that do not fit --------------------------------------------------------------------------------


def test_thousands_of_bad_rows_make_one_line(tmp_path: Path) -> None:
    short = {"sampler_logprobs": [-1.0, -2.0], "trainer_logprobs": [-1.0]}
    rows = [short] * 3000 + ROWS + [short] * 2000 + [{"sampler_logprobs": "words", "trainer_logprobs": [-1.0]}]
    file = write_lines(tmp_path / "log.jsonl", rows)
    count, notes = read(file)
    assert count == len(ROWS)
    assert notes == (
        f"5,000 of 5,004 rows are left out: their columns differ in length. The first: {file}, line 1: "
        "trainer_logprobs has 1 numbers, and sampler_logprobs 2.",
        f"1 of 5,004 rows is left out: sampler_logprobs is no list of numbers. The first: {file}, line 5004: "
        "sampler_logprobs is no list of numbers: words.",
    )


def test_a_file_without_a_good_row_at_its_beginning_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "MOST_BAD_ROWS", 50)
    file = write_lines(tmp_path / "log.jsonl", [{"x": 1}] * 50 + ROWS)
    with pytest.raises(StudyError, match="line 1: no known log: it has x"):
        read(file)


def test_a_row_of_a_rectangle_is_left_out_alone(tmp_path: Path) -> None:
    row = {"sampler_logprobs": [[-1.0], [-1.0, -2.0], [-3.0]], "trainer_logprobs": [[-1.0], [-1.0], [-3.0]]}
    count, notes = read(write_lines(tmp_path / "log.jsonl", [row]))
    assert count == 2 and notes[0].startswith("1 of 3 rows is left out: their columns differ in length.")
    assert "sequence 1: trainer_logprobs has 1 numbers, and sampler_logprobs 2" in notes[0]


def test_a_mask_that_leaves_nothing_is_said(tmp_path: Path) -> None:
    rows = [row | {"mask": [0] * len(row["token_ids"])} for row in ROWS]
    with pytest.raises(StudyError, match=r"holds no sequence with a response: its mask or length leaves no token"):
        read(write_lines(tmp_path / "log.jsonl", rows))
    count, notes = read(write_lines(tmp_path / "log.jsonl", [*rows, *ROWS]))
    assert (count, notes) == (3, ("3 responses have no token that counts.",))


# --- the same response in several files ------------------------------------------------------------------


def test_a_file_for_each_rank_with_the_same_responses_counts_once(tmp_path: Path) -> None:
    for rank in range(3):
        write_lines(tmp_path / f"rank_{rank}.jsonl", ROWS)
    count, notes = read(tmp_path)
    assert count == len(ROWS)
    assert notes == (
        "6 responses of rank_1.jsonl, rank_2.jsonl stand in an earlier file too, with the same prompt, tokens and "
        "log-probs to the bit, and count once.",
    )
    assert diagnose(tmp_path).measured.sequences == len(ROWS)


def test_ranks_that_share_a_part(tmp_path: Path) -> None:
    write_lines(tmp_path / "rank_0.jsonl", ROWS)
    write_lines(tmp_path / "rank_1.jsonl", [ROWS[2], *shifted(ROWS)])
    count, notes = read(tmp_path)
    assert count == 2 * len(ROWS) and notes[0].startswith("1 response of rank_1.jsonl stand")


@pytest.mark.parametrize(
    "other",
    [
        shifted(ROWS),  # the same text, sampled again
        [row | {"step": 4} for row in ROWS],  # weights of another step that give the same numbers
        [row | {"token_ids": [9, *row["token_ids"]]} for row in ROWS],  # another prompt
        [row | {"prompt": "another one"} for row in ROWS],
        [row | {"prompt": [5, 6]} for row in ROWS],
        [row | {"trainer_logprobs": [np.nextafter(x, -9) for x in row["trainer_logprobs"]]} for row in ROWS],
    ],
    ids=["log-probs", "step", "prompt ids", "prompt", "prompt in ids", "last bit"],
)
def test_samples_that_merely_agree_are_samples(other: list[dict[str, Any]], tmp_path: Path) -> None:
    write_lines(tmp_path / "rank_0.jsonl", ROWS)
    write_lines(tmp_path / "rank_1.jsonl", other)
    assert read(tmp_path) == (2 * len(ROWS), ())


def test_a_file_and_a_link_to_it_are_one(tmp_path: Path) -> None:
    write_lines(tmp_path / "log.jsonl", ROWS)
    (tmp_path / "latest.jsonl").symlink_to("log.jsonl")
    assert read(tmp_path, tmp_path / "log.jsonl") == (len(ROWS), ())


def test_a_response_that_one_file_has_twice_is_two_samples(tmp_path: Path) -> None:
    write_lines(tmp_path / "rank_0.jsonl", ROWS * 2)
    assert read(tmp_path) == (2 * len(ROWS), ())
    write_lines(tmp_path / "rank_1.jsonl", ROWS * 3)
    count, notes = read(tmp_path)
    assert count == 3 * len(ROWS) and notes[0].startswith("6 responses of rank_1.jsonl")


# --- curves in a folder ----------------------------------------------------------------------------------


def test_a_folder_with_curves_alone_goes_to_the_curves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(tmp_path / "run/metrics.jsonl", METRICS)
    (tmp_path / "run/config.json").write_text("{}")
    diagnose_command([str(tmp_path / "run")])
    assert "rollout_corr/k3_kl is 0.0" in capsys.readouterr().out
    write_lines(tmp_path / "run/tokens/log.jsonl", ROWS)
    diagnose_command([str(tmp_path / "run")])
    out = capsys.readouterr().out
    assert "8 tokens with log-probs of both sides" in out
    assert "files are left out, for they are no logs: config.json, metrics.jsonl." in out


def test_of_the_states_of_checkpoints_the_longest_is_read(tmp_path: Path) -> None:
    for steps in (10, 30, 5):  # by name the last one comes last
        folder = tmp_path / f"checkpoint-{steps}"
        folder.mkdir()
        rows = [{"step": step, "sampling/sampling_logp_difference/mean": 0.01} for step in range(steps)]
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": steps, "log_history": rows}))
    (history,) = read_folders([tmp_path])
    assert Path(history.where).parent.name == "checkpoint-30"


def test_an_empty_folder_and_one_of_pictures(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"holds no file that may be a log: JSON, Parquet, Arrow"):
        read(tmp_path)
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    with pytest.raises(StudyError, match=r"holds no log of tokens in 1 file; the first: .*a\.png: is no log"):
        read(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", ROWS)
    write_lines(tmp_path / "b.jsonl", ROWS).chmod(0)
    count, notes = read(tmp_path)
    assert count == len(ROWS) and "b.jsonl: cannot be read: Permission denied" in notes[0]

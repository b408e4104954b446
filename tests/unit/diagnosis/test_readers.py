"""Logs of every framework give the same tokens; what is no log is one sentence."""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import torch
from log_fixture import SEQUENCES, nemo_rl, plain_rows, prime_rl, slime, write_lines

from tailrl.artifacts.tokens import ARRAYS, write_tokens
from tailrl.diagnosis import readers
from tailrl.diagnosis.left_out import LeftOut
from tailrl.diagnosis.log import Log
from tailrl.diagnosis.readers import read_log
from tailrl.runtime.errors import StudyError


def parquet(folder: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(plain_rows()), folder / "log.parquet")
    return folder / "log.parquet"


def plain(folder: Path) -> Path:
    return write_lines(folder / "log.jsonl", plain_rows())


def own(folder: Path) -> Path:
    lengths = [len(one["tokens"]) for one in SEQUENCES]
    arrays: dict[str, Any] = {name: np.zeros(sum(lengths)) for name in ARRAYS}
    arrays |= {
        "step": np.full(sum(lengths), 3),
        "sequence": np.repeat(np.arange(len(lengths)), lengths),
        "token": np.concatenate([one["tokens"] for one in SEQUENCES]),
        "logp_train": np.concatenate([one["train"] for one in SEQUENCES]),
        "logp_infer": np.concatenate([one["infer"] for one in SEQUENCES]),
        "advantage": np.repeat([one["advantage"] for one in SEQUENCES], lengths),
        "reward": np.repeat([one["reward"] for one in SEQUENCES], lengths),
    }
    write_tokens(folder, arrays)
    return folder / "tokens.npz"


def read(*paths: Path) -> Log:
    ((_, log),) = read_log(paths)
    return log


@pytest.mark.parametrize("write", [plain, parquet, nemo_rl, prime_rl, slime, own])
def test_every_format_gives_the_same_tokens(write: Callable[[Path], Path], tmp_path: Path) -> None:
    log = read(write(tmp_path))
    lengths = [len(one["tokens"]) for one in SEQUENCES]
    assert log.token_T.tolist() == [token for one in SEQUENCES for token in one["tokens"]]
    np.testing.assert_array_equal(log.trainer_T, np.concatenate([one["train"] for one in SEQUENCES]))
    np.testing.assert_array_equal(log.sampler_T, np.concatenate([one["infer"] for one in SEQUENCES]))
    assert log.advantage_T.tolist() == np.repeat([one["advantage"] for one in SEQUENCES], lengths).tolist()
    assert log.start_S.tolist() == [0, 4, 5] and log.sequence_T.tolist() == [0, 0, 0, 0, 1, 2, 2, 2]
    assert log.position_T.tolist() == [0, 1, 2, 3, 0, 0, 1, 2]
    assert log.step_S.tolist() == [3, 3, 3]
    if write is not prime_rl:
        assert log.reward_S.tolist() == [one["reward"] for one in SEQUENCES]
    assert log.has() >= {"token", "advantage", "step"} and "version" not in log.has()


WRITTEN = Path(__file__).parents[2] / "fixtures/framework_logs"


@pytest.mark.parametrize("name", ["nemo_rl", "prime_rl", "slime", "miles"])
def test_files_that_the_frameworks_own_code_wrote(name: str) -> None:
    """`tests/fixtures/make_framework_logs.py` names each writer's lines; log-probs went through float32."""
    log = read(WRITTEN / name)
    assert log.token_T.tolist() == [token for one in SEQUENCES for token in one["tokens"]]
    np.testing.assert_allclose(log.trainer_T, np.concatenate([one["train"] for one in SEQUENCES]), rtol=1e-6)
    np.testing.assert_allclose(log.sampler_T, np.concatenate([one["infer"] for one in SEQUENCES]), rtol=1e-6)
    lengths = [len(one["tokens"]) for one in SEQUENCES]
    assert log.advantage_T.tolist() == np.repeat([one["advantage"] for one in SEQUENCES], lengths).tolist()
    assert log.step_S.tolist() == [3, 3, 3]
    if name != "prime_rl":
        assert log.reward_S.tolist() == [one["reward"] for one in SEQUENCES]
    if name in ("slime", "miles"):
        assert log.version_S.tolist() == [3, 3, 3]  # of two versions the last


def test_a_dump_that_context_parallelism_cut_is_refused(tmp_path: Path) -> None:
    dump = torch.load(WRITTEN / "miles/3_0.pt", weights_only=True)
    torch.save(dump | {"cp_size": 2}, tmp_path / "cut.pt")
    with pytest.raises(StudyError, match=r"cut\.pt: has a part of each response, for context parallelism cut them"):
        list(read_log([tmp_path / "cut.pt"]))


def test_parts_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "CHUNK", 4)
    prime_rl(tmp_path / "run"), plain(tmp_path / "run"), (tmp_path / "run" / "notes.txt").touch()
    parts = list(read_log([tmp_path / "run"]))
    assert [title.split(",")[0] for title, _ in parts] == ["the documented JSONL or Parquet"] * 2 + ["prime-rl"] * 2
    assert [len(log.sampler_T) for _, log in parts] == [4, 4, 4, 4]


def test_a_compressed_log_and_a_file_that_is_named_twice(tmp_path: Path) -> None:
    whole = plain(tmp_path / "run")
    (tmp_path / "gz").mkdir()
    packed = tmp_path / "gz" / "log.jsonl.gz"
    packed.write_bytes(gzip.compress(whole.read_bytes()))
    expected = read(whole)
    for paths in ([packed], [packed.parent], [whole.parent, whole], [whole, whole.parent / "." / whole.name]):
        log = read(*paths)
        np.testing.assert_array_equal(log.trainer_T, expected.trainer_T)
        assert len(log.start_S) == len(expected.start_S)
    read_bytes: list[float] = []
    list(read_log([packed], read_bytes.append))
    assert sum(read_bytes) == packed.stat().st_size
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(StudyError, match=r"log\.jsonl\.gz: cannot be read"):
        list(read_log([packed]))


def test_the_last_line_of_a_log_that_is_still_written_is_left_out(
    tmp_path: Path,
) -> None:
    file = plain(tmp_path)
    whole = file.read_text()
    expected = read(file)
    file.write_text(whole + whole.splitlines()[0][:30])
    cut = len(whole.splitlines()) + 1
    for content, words in (
        (whole + whole.splitlines()[0][:30], f"line {cut}: is cut off: the file is still being written"),
        (whole.splitlines()[0][:30] + "\n" + whole, "line 1: not valid JSON"),
        (whole + "[1]", f"line {cut}: holds list, not a JSON object"),
    ):
        file.write_text(content)
        left_out = LeftOut()
        ((_, log),) = read_log([file], left_out=left_out)
        np.testing.assert_array_equal(log.trainer_T, expected.trainer_T)
        (sentence,) = left_out.sentences()
        assert sentence.startswith(f"1 of {cut} rows is left out: ") and words in sentence


def test_a_column_of_impossible_times_is_one_sentence(tmp_path: Path) -> None:
    """Python's dates end in the year 9999. A column that no format has is not read."""
    far = pa.array([2**31 - 1], pa.int32()).cast(pa.date32())
    pair = {name: [values] for name, values in PAIR.items()}
    pq.write_table(pa.table({**pair, "reward": far}), tmp_path / "log.parquet")
    with pytest.raises(StudyError, match=r"log\.parquet: cannot be read"):
        list(read_log([tmp_path / "log.parquet"]))
    pq.write_table(pa.table({**pair, "when": far}), tmp_path / "log.parquet")
    assert read(tmp_path / "log.parquet").sampler_T.tolist() == PAIR["sampler_logprobs"]


def test_what_is_not_logged_and_what_is_odd(tmp_path: Path) -> None:
    rows = [
        {"sampler_logprobs": [-1.0, None, float("-inf")], "trainer_logprobs": [0.5, -1.0, -1.0], "text": "<script>"},
        {"sampler_logprobs": [], "trainer_logprobs": []},
        {"sampler_logprobs": [-1.0], "trainer_logprobs": [-2.0], "mask": [0]},
        {"sampler_logprobs": [-1.0], "trainer_logprobs": [-2.0], "token_ids": [[4]], "version": ["3", "5"]},
        {"sampler_logprobs": [-1.0], "trainer_logprobs": [-2.0], "version": "a1b2", "step": 2, "text": None},
    ]
    log = read(write_lines(tmp_path / "log.jsonl", rows))
    np.testing.assert_array_equal(log.sampler_T, [-1, np.nan, -np.inf, -1, -1])
    assert log.token_T.tolist() == [-1, -1, -1, 4, -1]
    np.testing.assert_array_equal(log.version_S, [np.nan, 5, np.nan])
    np.testing.assert_array_equal(log.step_S, [np.nan, np.nan, 2])
    assert log.text_S == ("<script>", None, None)
    assert np.isnan(log.advantage_T).all()


PAIR = {"sampler_logprobs": [-1.0, -1.0], "trainer_logprobs": [-1.0, -2.0]}
BAD: dict[str, tuple[str, str | bytes | None, str]] = {
    "nothing": ("log.jsonl", None, "log.jsonl: is missing"),
    "another table": ("log.csv", "a,b", "log.csv, line 1: no known log: it has a, b, and not sampler_logprobs and"),
    "another file": ("log.txt", "a,b", "log.txt: is no log that can be read: it is neither JSON, CSV, Parquet,"),
    "empty": ("log.jsonl", "", "log.jsonl: holds no sequence with a response"),
    "no JSON": ("log.jsonl", "{", "log.jsonl, line 1: not valid JSON"),
    "brackets without end": ("log.jsonl", "[" * 100_000, "line 1: not valid JSON"),
    "not text": ("log.jsonl", b"\xff\xfe\x00", "log.jsonl: is no log that can be read: it is text in UTF-16"),
    "no text at all": ("log.jsonl", b"\xfe\xfd\x00", "line 1: not valid JSON"),
    "a list": ("log.jsonl", "[1]", "line 1: holds list, not a JSON object"),
    "one side": ("log.jsonl", '{"sampler_logprobs": [-1]}', "has sampler_logprobs and no trainer_logprobs: a mismatch"),
    "one side of verl's": ("log.jsonl", '{"rollout_log_probs": [-1]}', "has rollout_log_probs and no log_probs"),
    "other names": ("log.jsonl", '{"output": "text"}', r"no known log: it has output, and not sampler_logprobs and"),
    "mixed lengths": (
        "log.jsonl",
        json.dumps(PAIR | {"trainer_logprobs": [-1]}),
        "has 1 numbers, and sampler_logprobs 2",
    ),
    "a mask of another length": ("log.jsonl", json.dumps(PAIR | {"mask": [1]}), "mask has 1 numbers"),
    "text for numbers": ("log.jsonl", json.dumps(PAIR | {"trainer_logprobs": "none"}), "trainer_logprobs is no list"),
    "lists for numbers": ("log.jsonl", json.dumps(PAIR | {"trainer_logprobs": [[1], [2]]}), "must have one shape"),
    "a side that is null": ("log.jsonl", json.dumps(PAIR | {"trainer_logprobs": None}), "trainer_logprobs is missing"),
    "no parquet": ("log.parquet", "PAR1", "log.parquet: cannot be read"),
    "no dump": ("log.pt", "PK", "log.pt: cannot be read"),
    "no npz": ("tokens.npz", "PK", "tokens.npz: cannot be read as an npz file"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_log_is_one_sentence(name: str, tmp_path: Path) -> None:
    file, content, sentence = BAD[name]
    if content is not None:
        (tmp_path / file).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(StudyError, match=re.escape(sentence)) as raised:
        list(read_log([tmp_path / file]))
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 700


ODD: dict[str, tuple[dict[str, Any], str]] = {
    "too few ids": ({"token_ids": [1]}, "token_ids differs in length from sampler_logprobs; it is not used"),
    "ids in words": ({"token_ids": ["a", "b"]}, "token_ids is no list of numbers; it is not used"),
    "400 digits": ({"step": 10**400}, "step is no number; it is not used"),
    "a step of text": ({"step": "three"}, "step is no number; it is not used"),
    "rewards by name": ({"reward": {"format": 1.0}}, "reward is no number; it is not used"),
    "an advantage in words": ({"advantage": "high"}, "advantage is no list of numbers; it is not used"),
    "a mask of another format in words": ({"loss_mask": "all"}, "loss_mask is no list of numbers; it is not used"),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_optional_column_is_left_out_and_counted(name: str, tmp_path: Path) -> None:
    more, note = ODD[name]
    left_out = LeftOut()
    ((_, log),) = read_log([write_lines(tmp_path / "log.jsonl", [PAIR, PAIR | more])], left_out=left_out)
    assert log.sampler_T.tolist() == PAIR["sampler_logprobs"] * 2
    assert log.trainer_T.tolist() == PAIR["trainer_logprobs"] * 2
    assert log.token_T.tolist() == [-1] * 4 and np.isnan([*log.step_S, *log.reward_S, *log.advantage_T]).all()
    assert left_out.sentences() == (f"In 1 of 2 rows {note}.",)


def test_lists_as_text_a_step_in_words_and_a_label_for_a_schema(tmp_path: Path) -> None:
    row = {name: json.dumps(values) for name, values in PAIR.items()}
    row |= {"token_ids": "[4, 5]", "mask": "[0, 1]", "step": "step_12", "schema": "my/v2", "id": 3}
    left_out = LeftOut()
    ((_, log),) = read_log([write_lines(tmp_path / "log.jsonl", [row])], left_out=left_out)
    assert log.trainer_T.tolist() == [-2.0] and log.token_T.tolist() == [5] and log.step_S.tolist() == [12]
    assert log.labels_S[0]["schema"] == "my/v2" and left_out.sentences() == ()


def test_a_folder_without_logs(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"holds no file that may be a log: JSON, Parquet, "):
        list(read_log([tmp_path]))


def test_nothing_is_unpickled_but_tensors_and_plain_values(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "harmed",))

    torch.save({"samples": [{"log_probs": Harm()}]}, tmp_path / "harm.pt")
    with pytest.raises(StudyError, match=r"harm\.pt: .* holds other objects than tensors and plain values"):
        list(read_log([tmp_path / "harm.pt"]))
    assert not (tmp_path / "harmed").exists()
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(StudyError, match=r"list\.pt: holds a list of int, not of rows"):
        list(read_log([tmp_path / "list.pt"]))


PART = {"sampler_logprobs": [[-1.0, -2.0], [-3.0, -4.0]], "trainer_logprobs": [[-1.5, -2.0], [-3.0, -4.5]]}
NAMED: dict[str, tuple[Any, list[float]]] = {
    "one batch": ({"batch": PART}, [np.nan] * 2),
    "a batch beside its step": ({"batch": PART, "step": 7}, [7, 7]),
    "a batch beside what is none": ({"meta": {"seed": 1}, "batch": PART, "timing": {"gen": 2.5}}, [np.nan] * 2),
    "a batch for each step": ({"step1": PART, "step2": PART}, [1, 1, 2, 2]),
    "batches of other names": ({"first": PART, "second": PART}, [np.nan] * 4),
}


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("ending", ["json", "pt"])
def test_all_batches_under_names_are_read(name: str, ending: str, tmp_path: Path) -> None:
    document, steps = NAMED[name]
    file = tmp_path / f"log.{ending}"
    if ending == "json":
        file.write_text(json.dumps(document))
    else:
        torch.save(document, file)
    log = read(file)
    assert log.trainer_T.tolist() == [-1.5, -2.0, -3.0, -4.5] * (len(steps) // 2)
    np.testing.assert_array_equal(log.step_S, steps)


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "feather"])
def test_a_row_with_its_columns_under_a_name(ending: str, tmp_path: Path) -> None:
    rows = [{"step": n, "data": {**PAIR, "reward": 0.5}, "other": {"seed": n}} for n in (1, 2, 3)]
    file = tmp_path / f"log.{ending}"
    if ending == "jsonl":
        write_lines(file, rows)
    elif ending == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        feather.write_feather(pa.Table.from_pylist(rows), file)
    log = read(file)
    assert log.trainer_T.tolist() == PAIR["trainer_logprobs"] * 3
    assert log.step_S.tolist() == [1, 2, 3] and log.reward_S.tolist() == [0.5] * 3

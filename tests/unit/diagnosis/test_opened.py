"""The same sequences come out of every kind of file, whatever its name and compression."""

import gzip
import io
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest
import torch
from log_fixture import SEQUENCES, plain_rows

from tailrl.diagnosis.left_out import LeftOut
from tailrl.diagnosis.log import Log
from tailrl.diagnosis.readers import read_log
from tailrl.runtime.errors import StudyError

ROWS = plain_rows()
COLUMNS = {name: [row[name] for row in ROWS] for name in ROWS[0]}


def lines(rows: list[dict[str, Any]] = ROWS) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def written(write: Callable[[Any], object]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def arrow(stream: bool, rows: list[dict[str, Any]] = ROWS) -> bytes:
    table = pa.Table.from_pylist(rows)

    def write(file: Any) -> None:
        kind = pa.ipc.new_stream if stream else pa.ipc.new_file
        with kind(file, table.schema) as writer:
            writer.write_table(table)

    return written(write)


def token_rows() -> list[dict[str, Any]]:
    return [
        {
            "response_id": f"r{number}",
            "position": place,
            "token_id": token,
            "sampler_logprob": one["infer"][place],
            "trainer_logprob": one["train"][place],
            "advantage": one["advantage"],
            "reward": one["reward"],
            "step": 3,
        }
        for number, one in enumerate(SEQUENCES)
        for place, token in enumerate(one["tokens"])
    ]


def flat() -> dict[str, np.ndarray]:
    return {name: np.array([row[name] for row in token_rows()]) for name in token_rows()[0]}


CONTENTS: dict[str, Callable[[], bytes]] = {
    "rows.jsonl": lines,
    "array.json": lambda: json.dumps(ROWS).encode(),
    "spaced.json": lambda: json.dumps(ROWS, indent=2).encode(),
    "columns.json": lambda: json.dumps(COLUMNS).encode(),
    "columns_over_lines.json": lambda: json.dumps(COLUMNS, indent=1).encode(),
    "under_a_name.json": lambda: json.dumps({"run": "a", "data": ROWS}).encode(),
    "columns_under_a_name.json": lambda: json.dumps({"run": "a", "batch": COLUMNS}).encode(),
    "records.json": lambda: pd.DataFrame(ROWS).to_json(orient="records", double_precision=15).encode(),
    "pandas.json": lambda: pd.DataFrame(ROWS).to_json(double_precision=15).encode(),
    "split.json": lambda: pd.DataFrame(ROWS).to_json(orient="split", double_precision=15).encode(),
    "mark.ndjson": lambda: b"\xef\xbb\xbf" + lines(),
    "table.parquet": lambda: written(lambda file: pq.write_table(pa.Table.from_pylist(ROWS), file)),
    "file.arrow": lambda: arrow(stream=False),
    "stream.arrow": lambda: arrow(stream=True),
    "table.feather": lambda: written(lambda f: pyarrow.feather.write_feather(pa.Table.from_pylist(ROWS), f, "lz4")),
    "tokens.csv": lambda: pd.DataFrame(token_rows()).to_csv(index=False).encode(),
    "tokens_with_an_index.csv": lambda: pd.DataFrame(token_rows()).to_csv().encode(),
    "semicolons.csv": lambda: pd.DataFrame(token_rows()).to_csv(index=False, sep=";").encode(),
    "tokens.tsv": lambda: pd.DataFrame(token_rows()).to_csv(index=False, sep="\t").encode(),
    "lists_in_cells.csv": lambda: pd.DataFrame(ROWS).to_csv(index=False).encode(),
    "positions.csv": lambda: pd.DataFrame(token_rows()).drop(columns="response_id").to_csv(index=False).encode(),
    "tokens.jsonl": lambda: lines(token_rows()),
    "tokens.parquet": lambda: written(lambda file: pq.write_table(pa.Table.from_pylist(token_rows()), file)),
    "flat.json": lambda: json.dumps({name: values.tolist() for name, values in flat().items()}).encode(),
    "flat.npz": lambda: written(lambda file: np.savez(file, **flat())),
    "rows.pt": lambda: written(lambda file: torch.save(ROWS, file)),
    "columns.pt": lambda: written(lambda file: torch.save(COLUMNS, file)),
    "nested.pt": lambda: written(
        lambda file: torch.save(
            {
                name: torch.nested.nested_tensor(
                    [torch.tensor(x, dtype=torch.float64) for x in values], layout=torch.jagged
                )
                if isinstance(values[0], list)
                else torch.tensor(values)
                for name, values in COLUMNS.items()
            },
            file,
        )
    ),
}


def check(log: Log) -> None:
    assert log.token_T.tolist() == [token for one in SEQUENCES for token in one["tokens"]]
    np.testing.assert_allclose(log.trainer_T, np.concatenate([one["train"] for one in SEQUENCES]), rtol=1e-12)
    np.testing.assert_allclose(log.sampler_T, np.concatenate([one["infer"] for one in SEQUENCES]), rtol=1e-12)
    lengths = [len(one["tokens"]) for one in SEQUENCES]
    assert np.diff(np.append(log.start_S, len(log.token_T))).tolist() == lengths
    assert log.advantage_T.tolist() == np.repeat([one["advantage"] for one in SEQUENCES], lengths).tolist()
    assert log.reward_S.tolist() == [one["reward"] for one in SEQUENCES] and log.step_S.tolist() == [3, 3, 3]


@pytest.mark.parametrize("name", CONTENTS)
def test_every_kind_of_file_gives_the_same_sequences(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(CONTENTS[name]())
    left_out = LeftOut()
    read: list[float] = []
    ((_, log),) = read_log([tmp_path / name], read.append, left_out)
    check(log)
    assert left_out.sentences() == ()
    assert sum(read) == pytest.approx((tmp_path / name).stat().st_size)


@pytest.mark.parametrize("name", ["table.parquet", "file.arrow", "stream.arrow", "rows.jsonl"])
def test_columns_of_words_group_the_rows_of_every_kind_of_file(name: str, tmp_path: Path) -> None:
    rows = [row | {"data_source": "ab"[number % 2], "image": 1.5} for number, row in enumerate(ROWS)]
    contents = {
        "table.parquet": lambda: written(lambda file: pq.write_table(pa.Table.from_pylist(rows), file)),
        "file.arrow": lambda: arrow(False, rows),
        "stream.arrow": lambda: arrow(True, rows),
        "rows.jsonl": lambda: lines(rows),
    }
    (tmp_path / name).write_bytes(contents[name]())
    ((_, log),) = read_log([tmp_path / name])
    assert [labels["data_source"] for labels in log.labels_S] == ["a", "b", "a"]
    assert all("image" not in labels for labels in log.labels_S)


COMPRESSED: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: bytes(pa.compress(data, codec="zstd", asbytes=True)),
}


@pytest.mark.parametrize("ending", COMPRESSED)
@pytest.mark.parametrize(
    "name",
    ["rows.jsonl", "array.json", "table.parquet", "stream.arrow", "file.arrow", "tokens.csv", "flat.npz", "rows.pt"],
)
def test_every_kind_of_file_may_be_compressed(name: str, ending: str, tmp_path: Path) -> None:
    packed = COMPRESSED[ending](CONTENTS[name]())
    for file in (tmp_path / f"{name}{ending}", tmp_path / ("log.csv" if name == "tokens.csv" else "log")):
        file.write_bytes(packed)  # the second name says nothing of what the file holds
        ((_, log),) = read_log([file])
        check(log)


@pytest.mark.parametrize("name", ["rows.jsonl", "table.parquet", "file.arrow", "stream.arrow", "flat.npz", "rows.pt"])
def test_what_a_file_holds_counts_more_than_its_ending(name: str, tmp_path: Path) -> None:
    for ending in (".txt", ".json", ".parquet", ".bin"):
        file = tmp_path / f"log{ending}"
        file.write_bytes(CONTENTS[name]())
        ((_, log),) = read_log([file])
        check(log)


@pytest.mark.parametrize("ending", COMPRESSED)
def test_a_compressed_file_that_was_cut_is_read_up_to_there(ending: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    rows = [
        {**ROWS[0], "sampler_logprobs": (-random.random(4)).tolist(), "text": random.bytes(300).hex()}
        for _ in range(2000)
    ]
    whole = COMPRESSED[ending](lines(rows))
    file = tmp_path / f"log.jsonl{ending}"
    file.write_bytes(whole[: len(whole) * 2 // 3])
    left_out = LeftOut()
    read = sum(len(part.start_S) for _, part in read_log([file], left_out=left_out))
    assert 500 < read < 2000
    assert any("cannot be read" in one and "What came before was read" in one for one in left_out.sentences())
    file.write_bytes(whole[:20])
    with pytest.raises(StudyError, match=r"cannot be read|holds no sequence"):
        list(read_log([file]))


UNREAD = {
    "text in UTF-16": ("log.jsonl", "{}".encode("utf-16"), "it is text in UTF-16 or UTF-32; save it in UTF-8"),
    "text in UTF-16 without a mark": ("log.jsonl", '{"a": 1}\n{"a": 2}'.encode("utf-16-le"), "it is text in UTF-16"),
    "text in UTF-32": ("log.jsonl", '{"a": 1}\n{"a": 2}'.encode("utf-32-be"), "it is text in UTF-16 or UTF-32"),
    "one array": ("log.npz", written(lambda file: np.save(file, np.zeros(3))), "it is one array"),
    "an archive": ("log.zip", b"PK\x03\x04" + bytes(30), "it is an archive; unpack it"),
    "an image": ("log.png", b"\x89PNG\r\n\x1a\n", "it is neither JSON, CSV, Parquet, Arrow, Feather, npz or .pt"),
    "old Feather": ("log.feather", b"FEA1" + bytes(30), "it is Feather in version 1; write version 2"),
}


@pytest.mark.parametrize("name", UNREAD)
def test_what_is_not_read_is_named(name: str, tmp_path: Path) -> None:
    file, content, words = UNREAD[name]
    (tmp_path / file).write_bytes(content)
    with pytest.raises(StudyError) as raised:
        list(read_log([tmp_path / file]))
    assert str(raised.value).startswith(f"{tmp_path / file}: is no log that can be read: {words}")


def test_a_link_is_followed_to_a_file_and_not_around_a_loop(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real/rows.jsonl").write_bytes(lines())
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link.jsonl").symlink_to(tmp_path / "real/rows.jsonl")
    (folder / "loop.jsonl").symlink_to(folder / "loop.jsonl")
    (folder / "around").symlink_to(folder)
    ((_, log),) = read_log([folder])
    check(log)
    with pytest.raises(StudyError, match=r"loop\.jsonl: cannot be read"):
        list(read_log([folder / "loop.jsonl"]))
    os.mkfifo(folder / "pipe.jsonl")
    ((_, log),) = read_log([folder])
    check(log)

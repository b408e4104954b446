"""Hostile logs, files and folders, made from a seed: each is read rightly, or refused in one sentence.

    PYTHONPATH=workflow:tests/fuzz python tests/fuzz/hostile_logs.py --seed 0

Each is diagnosed in a process of its own, within a minute and two gigabytes.
"""

import argparse
import gzip
import io
import json
import lzma
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import torch

from tailrl.diagnosis.diagnosis import diagnose_parts
from tailrl.diagnosis.left_out import LeftOut
from tailrl.diagnosis.log import Log
from tailrl.diagnosis.readers import read_log
from tailrl.runtime.errors import StudyError

SECONDS, BYTES = 60, 2e9
LONGEST = 5000  # characters of a sentence
TIMES = 3  # of each kind, with other random numbers
REFUSED = -1

Rows = list[dict[str, Any]]
Made = tuple[Path, int | None]
"""What is diagnosed, and the tokens that are rightly read; REFUSED; None: either may be right."""

HOSTILE: dict[str, Callable[[Path, Random], Made]] = {}


def hostile(kind: Callable[[Path, Random], Made]) -> Callable[[Path, Random], Made]:
    HOSTILE[kind.__name__] = kind
    return kind


def good(rng: Random, count: int = 12) -> Rows:
    """Rows in the documented schema."""
    rows = []
    for _ in range(count):
        length = rng.randrange(1, 9)
        rows.append(
            {
                "token_ids": [rng.randrange(90) for _ in range(length)],
                "sampler_logprobs": [-rng.random() for _ in range(length)],
                "trainer_logprobs": [-rng.random() for _ in range(length)],
            }
        )
    return rows


def tokens(rows: Rows) -> int:
    return sum(len(row["sampler_logprobs"]) for row in rows)


def text(rows: Rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def put(folder: Path, name: str, content: bytes | str) -> Path:
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    return folder / name


def written(write: Callable[[Any], object]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def parquet(rows: Rows) -> bytes:
    return written(lambda file: pq.write_table(pa.Table.from_pylist(rows), file))


def arrow(rows: Rows, stream: bool = False, compression: str | None = None) -> bytes:
    table = pa.Table.from_pylist(rows)

    def write(file: Any) -> None:
        options = pa.ipc.IpcWriteOptions(compression=compression)
        make = pa.ipc.new_stream if stream else pa.ipc.new_file
        with make(file, table.schema, options=options) as writer:
            writer.write_table(table)

    return written(write)


def torch_file(value: Any) -> bytes:
    return written(lambda file: torch.save(value, file))


def zstd(data: bytes) -> bytes:
    return bytes(pa.compress(data, codec="zstd", asbytes=True))


# --- cut and damaged -------------------------------------------------------------------------------------


@hostile
def cut_lines(folder: Path, rng: Random) -> Made:
    whole = text(good(rng)).encode()
    cut = whole[: rng.randrange(1, len(whole))]
    kept = [json.loads(line) for line in cut.split(b"\n")[:-1]]
    return put(folder, "log.jsonl", cut), tokens(kept) or None


def cut_of(name: str, content: Callable[[Rows], bytes]) -> None:
    def cut(folder: Path, rng: Random) -> Made:
        whole = content(good(rng))
        return put(folder, name, whole[: rng.randrange(1, len(whole))]), None

    def damaged(folder: Path, rng: Random) -> Made:
        whole = bytearray(content(good(rng)))
        for _ in range(rng.randrange(1, 20)):
            whole[rng.randrange(len(whole))] = rng.randrange(256)
        return put(folder, name, bytes(whole)), None

    HOSTILE[f"cut_{name}"], HOSTILE[f"damaged_{name}"] = cut, damaged


CONTENTS: dict[str, Callable[[Rows], bytes]] = {
    "log.parquet": parquet,
    "log.arrow": arrow,
    "stream.arrow": lambda rows: arrow(rows, stream=True),
    "lz4.feather": lambda rows: arrow(rows, compression="lz4"),
    "log.json": lambda rows: json.dumps(rows).encode(),
    "log.jsonl.gz": lambda rows: gzip.compress(text(rows).encode()),
    "log.jsonl.xz": lambda rows: lzma.compress(text(rows).encode()),
    "log.jsonl.zst": lambda rows: zstd(text(rows).encode()),
    "log.pt": torch_file,
    "log.npz": lambda rows: written(lambda file: np.savez(file, **flat(rows))),  # type: ignore[arg-type]
    "log.csv": lambda rows: csv(rows).encode(),
}


def flat(rows: Rows) -> dict[str, Any]:
    columns = {name: np.array([x for row in rows for x in row[name]]) for name in rows[0]}
    return columns | {"response_id": np.repeat(np.arange(len(rows)), [len(row["token_ids"]) for row in rows])}


def csv(rows: Rows) -> str:
    columns = flat(rows)
    lines = [",".join(map(str, values)) for values in zip(*columns.values(), strict=True)]
    return "\n".join([",".join(columns), *lines]) + "\n"


for name, content in CONTENTS.items():
    cut_of(name, content)


# --- values ----------------------------------------------------------------------------------------------

VALUES: tuple[Any, ...] = (
    *(None, True, False, "", "x", "1e5", "NaN", {}, {"a": 1}, [], [[]], [None], [[None]], [{}], ["a"], [[1], [2, 3]]),
    *([1e308], [-1e308] * 3, [10**30], [0.1] * 10_000, -1, 0, 3.5, [True], [[[1.0]]], ["-0.5"], "[-0.5]"),
)


@hostile
def wrong_types(folder: Path, rng: Random) -> Made:
    """Some rows have another value in a column; the others are read."""
    rows = good(rng, 30)
    bad = rng.sample(range(30), 8)
    for place in bad:
        rows[place][rng.choice(list(rows[place]))] = rng.choice(VALUES)
    return put(folder, "log.jsonl", text(rows)), None


@hostile
def one_good_row_among_lists(folder: Path, rng: Random) -> Made:
    rows = good(rng, 1)
    lines = [json.dumps(rng.choice(VALUES)) for _ in range(50)]
    lines.insert(rng.randrange(50), json.dumps(rows[0]))
    return put(folder, "log.jsonl", "\n".join(lines) + "\n"), tokens(rows)


@hostile
def words_of_json_for_no_numbers(folder: Path, rng: Random) -> Made:
    rows = good(rng)
    content = text(rows).replace("[-0.", f"[{rng.choice(['NaN', 'Infinity', '-Infinity', 'null'])}, -0.")
    content = content.replace('"token_ids": [', '"token_ids": [7, ')
    return put(folder, "log.jsonl", content), tokens(rows) + len(rows)


@hostile
def huge_numbers(folder: Path, rng: Random) -> Made:
    number = rng.choice(["1e400", "-1e400", "1" + "0" * 4000, "-1e-400", "1e308", "9" * 5000])
    rows = good(rng)
    line = json.dumps({"sampler_logprobs": [-1.0], "trainer_logprobs": ["@"]}).replace('"@"', number)
    return put(folder, "log.jsonl", text(rows) + line + "\n"), None


@hostile
def nested_deep(folder: Path, rng: Random) -> Made:
    rows = good(rng)
    deep = rng.choice(["[" * 200_000, '{"a":' * 100_000, '{"sampler_logprobs":' + "[" * 50_000])
    return put(folder, "log.jsonl", deep + "\n" + text(rows)), tokens(rows)


@hostile
def duplicated_keys(folder: Path, rng: Random) -> Made:
    """The last value of a key counts, as in every reader of JSON."""
    rows = good(rng)
    lines = [json.dumps(row).replace("{", '{"sampler_logprobs": "first", "step": 1, "step": 2, ', 1) for row in rows]
    return put(folder, "log.jsonl", "\n".join(lines)), tokens(rows)


@hostile
def a_hundred_thousand_columns(folder: Path, _: Random) -> Made:
    row = {f"c{number}": 0 for number in range(100_000)}
    return put(folder, "log.jsonl", json.dumps(row) + "\n"), REFUSED


@hostile
def a_long_response(folder: Path, _: Random) -> Made:
    values = [-0.5] * 300_000
    return put(folder, "log.jsonl", json.dumps({"sampler_logprobs": values, "trainer_logprobs": values})), 300_000


@hostile
def absurd_masks(folder: Path, rng: Random) -> Made:
    rows = good(rng, 20)
    expected = 0
    for row in rows:
        length = len(row["token_ids"])
        masks: list[tuple[Any, int]] = [
            ([1] * (length + 1), length), ([1] * (length - 1) or [1, 1], int(length == 1)),
            ([-1] * length, 0), ([0.5] * length, length),
            ([float("nan")] * length, 0), (["1"] * length, length), ("1" * length, int(length == 1)),
            ([[1] * length], length), ([[1]] * (length + 2), 0), ([], 0), ([True] * length, length), (None, length),
            ({}, 0), ([1e308] * length, length),
        ]  # fmt: skip
        row["mask"], kept = rng.choice(masks)
        expected += kept
    return put(folder, "log.jsonl", text(rows)), expected or None


@hostile
def negative_lengths(folder: Path, rng: Random) -> Made:
    rows = good(rng)
    columns: dict[str, Any] = {
        "tokens": [row["token_ids"] for row in rows],
        "rollout_log_probs": [row["sampler_logprobs"] for row in rows],
        "log_probs": [row["trainer_logprobs"] for row in rows],
        "response_lengths": [rng.randrange(-9, 0) for _ in rows],
        "total_lengths": [-(2**63)] * len(rows),
    }
    return put(folder, "0_0.pt", torch_file({"rollout_id": -1, "rollout_data": columns, "cp_size": 1})), tokens(rows)


# --- text and encodings ----------------------------------------------------------------------------------


@hostile
def mixed_ends_of_lines(folder: Path, rng: Random) -> Made:
    rows = good(rng)
    ends = ["\n", "\r\n", "\n\n", "\n \t\n", "\r\r\n"]
    content = "".join(json.dumps(row | {"text": "a\u2028b\x85"}, ensure_ascii=False) + rng.choice(ends) for row in rows)
    return put(folder, "log.jsonl", "\ufeff" + content), tokens(rows)


@hostile
def carriage_returns_alone(folder: Path, rng: Random) -> Made:
    return put(folder, "log.jsonl", text(good(rng)).replace("\n", "\r")), REFUSED


@hostile
def other_encodings(folder: Path, rng: Random) -> Made:
    encoding = rng.choice(["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-7", "cp037"])
    return put(folder, "log.jsonl", text(good(rng)).encode(encoding)), REFUSED if encoding != "utf-7" else None


@hostile
def letters_of_latin_1(folder: Path, rng: Random) -> Made:
    rows = good(rng)
    row = json.dumps(rows[0] | {"text": "é"}, ensure_ascii=False).encode("latin-1")
    return put(folder, "log.jsonl", row + b"\n" + text(rows[1:]).encode()), tokens(rows[1:])


@hostile
def nothing_in_it(folder: Path, rng: Random) -> Made:
    content = rng.choice(
        [b"", b" ", b"\n\n\n", b"\x00" * 100, b"\xef\xbb\xbf", b"{}", b"[]", b"null", b"[{}]", b"{}\n{}"]
    )
    return put(
        folder, f"log{rng.choice(['.jsonl', '.json', '.csv', '.parquet', '.npz', '.pt', '.gz'])}", content
    ), REFUSED


@hostile
def other_endings(folder: Path, rng: Random) -> Made:
    name = rng.choice(list(CONTENTS))
    rows = good(rng)
    ending = rng.choice([".JSONL", ".txt", "", ".parquet", ".json.gz", ".log", ".xz"])
    is_text = name == "log.csv"
    return put(folder, f"log{'.csv' if is_text else ending}", CONTENTS[name](rows)), tokens(rows)


@hostile
def tables_of_text(folder: Path, rng: Random) -> Made:
    content = csv(good(rng))
    header, _, body = content.partition("\n")
    contents = [
        content.replace("-0.", '"-0.'), content.replace("\n", "\n\x00"), header + "\n" + content, body,
        header * 5000 + "\n" + body, content.replace(",", "|"),
        header + "\n" + "\n".join(sorted(body.split("\n"), key=lambda _: rng.random())),
        "," * 100_000 + "\n" + content, header + ",response_id\n" + body, content.replace("0", "O"),
    ]  # fmt: skip
    return put(folder, "log.csv", rng.choice(contents)), None


# --- rectangles ------------------------------------------------------------------------------------------


@hostile
def rectangles_of_other_shapes(folder: Path, rng: Random) -> Made:
    b, t = rng.randrange(1, 5), rng.randrange(1, 6)
    shapes = [(b, t), (b, t + 1), (t, b), (b, t, 2), (0, t), (b, 0), (t,), (), (b, 1), (1, b, t), (b + 1, t)]
    random = np.random.default_rng(rng.randrange(2**31))
    names = ("rollout_log_probs", "old_log_probs", "response_mask", "responses", "advantages")
    arrays = {name: -random.random(rng.choice(shapes)) for name in names}
    kind = rng.randrange(3)
    if kind == 0:
        return put(folder, "batch.npz", written(lambda file: np.savez(file, **arrays))), None  # type: ignore[arg-type]
    if kind == 1:
        return put(folder, "batch.pt", torch_file({name: torch.tensor(x) for name, x in arrays.items()})), None
    return put(folder, "batch.jsonl", json.dumps({name: x.tolist() for name, x in arrays.items()})), None


@hostile
def a_rectangle_with_bad_lines(folder: Path, rng: Random) -> Made:
    rows = good(rng)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    bad = rng.randrange(len(rows))
    columns["trainer_logprobs"][bad] = rng.choice(([], [0.0] * 99, ["x"] * len(rows[bad]["token_ids"])))
    return put(folder, "log.json", json.dumps(columns)), tokens(rows) - len(rows[bad]["token_ids"])


# --- tensors, arrays and tables --------------------------------------------------------------------------


class Harm:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("exit 7",)


@hostile
def tensors_of_other_kinds(folder: Path, rng: Random) -> Made:
    plain = -torch.rand(3, 4)
    kinds: list[Any] = [
        plain.to_sparse(), plain.half(), plain.bfloat16(), torch.quantize_per_tensor(plain, 0.1, 0, torch.qint8),
        torch.zeros(3, 4, device="meta"), plain.to(torch.complex64), plain.t(), plain.double().requires_grad_(),
        torch.nested.nested_tensor([plain[0], plain[1, :2]], layout=torch.jagged), plain > 0, plain.expand(2, 3, 4),
        [plain[0], plain[1], None], {"a": plain}, plain.to(torch.float8_e4m3fn),
    ]  # fmt: skip
    value = {"rollout_log_probs": rng.choice(kinds), "old_log_probs": rng.choice([plain, rng.choice(kinds)])}
    return put(folder, "log.pt", torch_file(value)), None


@hostile
def pickles(folder: Path, rng: Random) -> Made:
    values = [Harm(), {"samples": [Harm()]}, [Path("x")], np.zeros(3), {"a": 1}, np.dtype("O")]
    value = rng.choice(values)
    content = rng.choice(
        [
            pickle.dumps(value, protocol=rng.randrange(6)),
            torch_file(value),
            written(lambda file: torch.save(value, file, _use_new_zipfile_serialization=False)),
        ]
    )
    return put(folder, rng.choice(["log.pt", "log.pkl", "log.jsonl", "log"]), content), REFUSED


@hostile
def arrays_of_other_kinds(folder: Path, rng: Random) -> Made:
    kinds: list[Any] = [
        np.array([{}, 1], object), np.array(["a", "b"]), np.array([1, 2], "datetime64[D]"), np.zeros(2, "i4,f4"),
        np.array(3.0), np.zeros((2, 3), order="F"), np.zeros(2, complex), np.zeros((1, 1, 1, 1)), np.zeros(2, "S5"),
        np.zeros((2, 0)), np.array([np.nan, -np.inf]), np.zeros(2, np.float16), np.zeros(2, bool), np.zeros(2, "V8"),
    ]  # fmt: skip
    arrays = {name: rng.choice(kinds) for name in ("sampler_logprobs", "trainer_logprobs", "response_id")}
    return put(folder, "log.npz", written(lambda file: np.savez(file, **arrays))), None  # type: ignore[arg-type]


@hostile
def an_archive_that_lies(folder: Path, rng: Random) -> Made:
    content = bytearray(written(lambda file: np.savez(file, **flat(good(rng)))))  # type: ignore[arg-type]
    way = rng.randrange(3)
    if way == 0:  # encrypted, says every entry
        for place in range(len(content) - 4):
            if content[place : place + 4] == b"PK\x01\x02":
                content[place + 8] |= 1
    elif way == 1:
        shape = str((2**62,)).encode()
        content = bytearray(bytes(content).replace(b"(", b"(" + shape[1:-2], 1))
    else:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as packed:
            for name in ("sampler_logprobs.npy", "trainer_logprobs.npy", "../../evil.npy"):
                packed.writestr(name, b"\x93NUMPY\x09\x09" + rng.randbytes(50))
        content = bytearray(file.getvalue())
    return put(folder, "log.npz", bytes(content)), None


@hostile
def columns_of_other_types(folder: Path, rng: Random) -> Made:
    values: list[Any] = [
        pa.array([[1, 2], None, []], pa.list_(pa.int8())), pa.array(["a", None, "[-1.0]"]),
        pa.array([b"\xff", b"", None]), pa.array([{"a": 1}, None, {"a": 2}]),
        pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int32())),
        pa.array([[[-1.0]], [[-1.0], [-2.0]], None]), pa.array([2**31 - 1] * 3, pa.int32()).cast(pa.date32()),
        pa.array([1.5, None, float("nan")]).dictionary_encode(), pa.nulls(3), pa.array([[-1.0, None]] * 3),
        pa.array([[-1.0, -2.0]] * 3, pa.list_(pa.float32(), 2)), pa.array([2**64 - 1] * 3, pa.uint64()),
    ]  # fmt: skip
    table = pa.table({name: rng.choice(values) for name in ("sampler_logprobs", "trainer_logprobs", "token_ids")})
    return put(folder, "log.parquet", written(lambda file: pq.write_table(table, file))), None


@hostile
def lengths_of_arrow_that_lie(folder: Path, rng: Random) -> Made:
    content = bytearray(arrow(good(rng), stream=rng.random() < 0.5))
    place = rng.randrange(8, min(len(content) - 8, 400)) // 4 * 4
    content[place : place + 4] = struct.pack("<i", rng.choice([2**31 - 1, -1, -(2**31), 2**24]))
    return put(folder, "log.arrow", bytes(content)), None


# --- bombs -----------------------------------------------------------------------------------------------

BOMB = 3_000_000_000  # bytes that a bomb would take


def packed_bomb(folder: Path, name: str, start: bytes, repeated: bytes, size: int = BOMB) -> Path:
    """A gzip of `start` and then `repeated` up to `size` bytes."""
    piece = repeated * (10_000_000 // len(repeated))
    with gzip.open(folder / name, "wb", compresslevel=1) as file:
        file.write(start)
        for _ in range(size // len(piece)):
            file.write(piece)
    return folder / name


@hostile
def gzip_bombs(folder: Path, rng: Random) -> Made:
    start, repeated = rng.choice(
        [
            (b"", b"\x00"),
            (b"", b"\n"),
            (b'{"sampler_logprobs": [', b"-1,"),
            (b"[", b"["),
            (b"[", b"{},"),
            (b"", b"{}\n"),
        ]
    )
    return packed_bomb(folder, "log.jsonl.gz", start, repeated, 600_000_000), REFUSED


@hostile
def bombs_in_tables(folder: Path, rng: Random) -> Made:
    header = b"response_id,sampler_logprobs,trainer_logprobs\n"
    repeated = rng.choice([b"a", b"1,-1,-1\n", b'"', b",", b"\n"])
    return packed_bomb(folder, "log.csv.gz", header, repeated, 120_000_000), REFUSED


@hostile
def xz_and_zstd_bombs(folder: Path, rng: Random) -> Made:
    if rng.random() < 0.5:
        return put(folder, "log.json.xz", lzma.compress(b"[" + b" " * 300_000_000, preset=0)), REFUSED
    frames = zstd(b'{"a": "' + b"x" * 50_000_000) + zstd(b"y" * 50_000_000) * 40
    return put(folder, "log.json.zst", frames), REFUSED


@hostile
def a_gzip_in_a_gzip(folder: Path, rng: Random) -> Made:
    return put(folder, "log.jsonl.gz", gzip.compress(gzip.compress(text(good(rng)).encode()))), REFUSED


@hostile
def zip_bombs(folder: Path, _: Random) -> Made:
    header = {"descr": "<f8", "fortran_order": False, "shape": (BOMB // 16,)}
    with zipfile.ZipFile(folder / "log.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as packed:
        for name in ("sampler_logprobs", "trainer_logprobs"):
            with packed.open(f"{name}.npy", "w", force_zip64=True) as array:
                np.lib.format.write_array_header_1_0(array, header)
                for _ in range(BOMB // 2 // 50_000_000):
                    array.write(bytes(50_000_000))
    return folder / "log.npz", REFUSED


@hostile
def equal_numbers(folder: Path, rng: Random) -> Made:
    """Millions of tokens in some kilobytes."""
    rows = rng.choice([1, 64])
    values = pa.array(np.full(12_000_000, -0.5))
    lists = pa.LargeListArray.from_arrays(pa.array(np.arange(rows + 1) * (12_000_000 // rows)), values)
    table = pa.table({"sampler_logprobs": lists, "trainer_logprobs": lists})
    if rng.random() < 0.5:
        pq.write_table(table, folder / "log.parquet")
        return folder / "log.parquet", REFUSED
    with pa.ipc.new_file(
        folder / "log.arrow", table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
    ) as writer:
        writer.write_table(table)
    return folder / "log.arrow", REFUSED


@hostile
def tensors_that_are_expanded(folder: Path, rng: Random) -> Made:
    tensor = torch.zeros(1).expand(rng.choice([10**9, 10**12]))
    names = rng.choice([("rollout_log_probs", "old_log_probs"), ("rollout_log_probs", "log_probs")])
    value = dict.fromkeys(names, tensor)
    return put(folder, "log.pt", torch_file(rng.choice([value, {"samples": [value]}, [value] * 3]))), REFUSED


# --- the file system -------------------------------------------------------------------------------------


@hostile
def links(folder: Path, rng: Random) -> Made:
    path, way = folder / "log.jsonl", rng.randrange(4)
    if way == 0:
        path.symlink_to(path)
    elif way == 1:
        path.symlink_to(folder / "nowhere")
    elif way == 2:
        path.symlink_to("/dev/zero")
    else:
        (folder / "a").symlink_to(folder / "b")
        (folder / "b").symlink_to(folder / "a")
        path.symlink_to(folder / "a")
    return path, REFUSED


@hostile
def a_folder_that_holds_itself(folder: Path, rng: Random) -> Made:
    rows = good(rng)
    put(folder, "log.jsonl", text(rows))
    (folder / "again").symlink_to(folder)
    (folder / "up").symlink_to("..")
    (folder / "loop.jsonl").symlink_to(folder / "loop.jsonl")
    return folder, tokens(rows)


@hostile
def what_is_no_file(folder: Path, rng: Random) -> Made:
    path = folder / "log.jsonl"
    way = rng.randrange(3)
    if way == 0:
        os.mkfifo(path)
    elif way == 1:
        with socket.socket(socket.AF_UNIX) as made, tempfile.TemporaryDirectory() as short:
            made.bind(f"{short}/s")
            Path(short, "s").rename(path)
    else:
        path.mkdir()
    return path, REFUSED


@hostile
def a_folder_with_everything(folder: Path, rng: Random) -> Made:
    rows = good(rng)
    for name, content in CONTENTS.items():
        put(folder, name, content(good(rng))[: rng.randrange(5)])
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "broken.jsonl").symlink_to("nowhere")
    (folder / "folder.jsonl").mkdir()
    put(folder, "z" * 200 + ".jsonl", text(rows))
    return folder, tokens(rows)


@hostile
def without_permission(folder: Path, rng: Random) -> Made:
    rows = good(rng)
    put(folder, "log.jsonl", text(rows))
    put(folder, "secret.jsonl", "{}").chmod(0)
    (folder / "closed").mkdir(mode=0)
    return folder, tokens(rows)


@hostile
def thousands_of_other_files(folder: Path, rng: Random) -> Made:
    rows = good(rng)
    for number in range(2000):
        put(folder, f"{number}.json", rng.choice(['{"a": 1}', "[", "", "{}", "text"]))
    put(folder, "log.jsonl", text(rows))
    return folder, tokens(rows)


@hostile
def a_deep_folder(folder: Path, rng: Random) -> Made:
    rows = good(rng)
    deep = folder.joinpath(*["d"] * 300)
    deep.mkdir(parents=True)
    put(deep, "log.jsonl", text(rows))
    return folder, tokens(rows)


@hostile
def names_that_hide(folder: Path, rng: Random) -> Made:
    name = rng.choice(["a\nb.jsonl", "\x1b[31mred.jsonl", "-rf.jsonl", "a b;c.jsonl", "\udcff.jsonl", "{x}%s.jsonl"])
    rows = good(rng)
    put(folder, name, text([*rows, {"sampler_logprobs": [-1.0], "trainer_logprobs": []}]))
    put(folder, f"bad {name}", "{")
    return folder, tokens(rows)


# --- judging ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """How a hostile log ended: `fault` is empty where it is well."""

    kind: str
    fault: str
    said: str
    seconds: float = 0.0
    memory: float = 0.0


def judge(kind: str, folder: Path, rng: Random, whole: bool = True) -> Verdict:
    """Makes one and reads it in this process, and if `whole` diagnoses it."""
    path, expected = HOSTILE[kind](folder, rng)
    return judge_made(kind, path, expected, whole)


def judge_made(kind: str, path: Path, expected: int | None, whole: bool) -> Verdict:
    """Reads one in this process, and if `whole` diagnoses it."""
    left_out, read = LeftOut(), 0

    def parts() -> Iterator[tuple[str, Log]]:
        nonlocal read
        for title, part in read_log([path], left_out=left_out):
            read += len(part.sampler_T)
            yield title, part

    try:
        if whole:
            diagnose_parts(parts(), left_out)
        else:
            list(parts())
    except StudyError as error:
        return Verdict(kind, _fault_of_sentence(str(error), path, expected), str(error)[:LONGEST])
    except Exception as error:  # what is looked for
        return Verdict(kind, f"{type(error).__name__}", "".join(traceback.format_exception(error))[-3000:])
    said = f"{read} tokens; {' '.join(left_out.sentences())}"
    right = expected is None or read == expected
    return Verdict(kind, "" if right else f"should have {expected} tokens, or {REFUSED} for none", said)


def _fault_of_sentence(sentence: str, path: Path, expected: int | None) -> str:
    if len(sentence.splitlines()) != 1 and "\n" not in str(path):
        return "more than one line"
    if len(sentence) > LONGEST:
        return "a wall of words"
    if str(path) not in sentence:
        return "does not say where"
    return "" if expected in (None, REFUSED) else f"should have {expected} tokens"


def judge_apart(kind: str, folder: Path, seed: str) -> Verdict:
    """Diagnoses one in a process of its own, within SECONDS and BYTES; another one has made it."""

    def make() -> list[Any]:
        path, expected = HOSTILE[kind](folder, Random(seed))
        return [os.fsencode(path).hex(), expected]  # a name may be no text

    made, status, _ = _apart(make)
    if status:
        return Verdict(kind, f"could not be made: {status}", "")
    path, expected = Path(os.fsdecode(bytes.fromhex(made[0]))), made[1]

    def diagnosed() -> list[str]:
        verdict = judge_made(kind, path, expected, whole=True)
        return [verdict.fault, verdict.said[:3000]]

    began = time.perf_counter()
    answer, status, memory = _apart(diagnosed)
    seconds = time.perf_counter() - began
    if status:
        return Verdict(kind, f"ended with {status} after {seconds:.0f} s", "", seconds, memory)
    fault, said = answer
    if not fault and memory > BYTES:
        fault = f"took {memory / 1e9:.1f} GB"
    return Verdict(kind, fault, said, seconds, memory)


def _apart(work: Callable[[], Any]) -> tuple[Any, int, float]:
    """What a function returns in a process of its own, its exit status (0: well) and its largest memory in bytes."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        os.setsid()
        signal.alarm(SECONDS)
        with os.fdopen(write_end, "wb") as pipe:
            pipe.write(json.dumps(work()).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        answer = pipe.read()
    _, status, usage = os.wait4(child, 0)
    return (json.loads(answer) if answer else None), status or int(not answer), usage.ru_maxrss * 1024.0


def judged(seed: int, kinds: Sequence[str], apart: bool, times: int = TIMES) -> Iterator[Verdict]:
    """The verdict on each hostile log."""
    for kind in kinds:
        for number in range(times):
            with tempfile.TemporaryDirectory() as folder:
                there = Path(folder, "logs")
                there.mkdir()
                name = f"{seed} {kind} {number}"
                yield judge_apart(kind, there, name) if apart else judge(kind, there, Random(name), whole=False)
                if (there / "closed").is_dir():
                    (there / "closed").chmod(0o700)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--times", type=int, default=TIMES, help="how often each kind")
    parser.add_argument("--kinds", nargs="*", default=list(HOSTILE))
    given = parser.parse_args()
    verdicts = []
    for verdict in judged(given.seed, given.kinds, apart=True, times=given.times):
        verdicts.append(verdict)
        numbers = f"{verdict.seconds:5.1f} s  {verdict.memory / 1e9:.2f} GB"
        print(f"{numbers}  {verdict.kind}: {verdict.fault or 'well'}: {verdict.said[:200]}", flush=True)
    bad = [verdict for verdict in verdicts if verdict.fault]
    slowest, largest = max(one.seconds for one in verdicts), max(one.memory for one in verdicts)
    print(f"{len(verdicts)} hostile logs, {len(bad)} faults; at most {slowest:.0f} s and {largest / 1e9:.2f} GB")
    sys.exit(bool(bad))


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()

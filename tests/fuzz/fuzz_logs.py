"""Logs of other frameworks: JSON lines, Parquet, dumps of tensors, this project's tokens.npz and every other kind."""

import io
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from hostile_logs import CONTENTS
from kinds import Case, Kind
from log_fixture import nemo_rl, plain_rows, prime_rl, slime
from mutations import mutated, mutated_bytes, to_json

from tailrl.artifacts.files import parse_object
from tailrl.artifacts.tokens import ARRAYS, write_tokens
from tailrl.diagnosis.diagnosis import diagnose

WRITERS = {"nemo_rl": nemo_rl, "prime_rl": prime_rl}


def made(folder: Path) -> dict[str, bytes]:
    """One file of each kind, by the name that a case has."""
    rows = [{name: row[name] for name in ("token_ids", "sampler_logprobs", "trainer_logprobs")} for row in plain_rows()]
    files = {name: content(rows) for name, content in CONTENTS.items()}
    files |= {"log.parquet": _parquet(plain_rows()), "3.pt": slime(folder).read_bytes()}
    write_tokens(folder, {name: np.zeros(3) for name in ARRAYS})
    return files | {"tokens.npz": (folder / "tokens.npz").read_bytes()}


def prepare(folder: Path) -> None:
    for name, content in made(folder).items():
        (folder / name).write_bytes(content)
    for name, write in WRITERS.items():
        write(folder / name)


def cases(rng: Random) -> Iterator[Case]:
    """Values and text of each format's lines, Parquet of such rows, dumps of such values, and damaged bytes."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        whole = made(Path(folder))
        lines = {name: _objects(write(Path(folder))) for name, write in WRITERS.items()}
    lines["plain"] = plain_rows()
    text = {name: to_json(rows, lines=True) for name, rows in lines.items()}
    dump = torch.load(io.BytesIO(whole["3.pt"]), weights_only=True)
    plain_dump = {
        **dump,
        "samples": [{k: v.tolist() if hasattr(v, "tolist") else v for k, v in one.items()} for one in dump["samples"]],
    }
    while True:
        name, way = rng.choice(list(lines)), rng.randrange(12)
        try:
            if way < 5:
                yield f"{name}.jsonl", to_json(mutated(lines[name], rng), lines=True)
            elif way < 7:
                yield f"{name}.jsonl", mutated_bytes(text[name], rng)
            elif way == 7:
                yield "log.parquet", _parquet(mutated(lines[name], rng))
            elif way == 8:
                yield "3.pt", _dumped(mutated(plain_dump, rng))
            elif way == 9:
                yield "log.json", to_json(mutated(lines[name], rng))
            else:
                file = rng.choice(list(whole))
                yield file, mutated_bytes(whole[file], rng)
        except (
            pyarrow.ArrowException,
            UnicodeError,
            OverflowError,
            TypeError,
            AttributeError,
            LookupError,
            RecursionError,
        ):
            continue  # no file of this kind can hold these values


def _objects(path: Path) -> list[dict[str, Any]]:
    return [dict(parse_object(line, "here")) for line in path.read_bytes().splitlines()]


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


def _dumped(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def read(folder: Path, name: str) -> None:
    """As `tailrl diagnose` does, up to the advice."""
    found = diagnose(folder / name)
    assert found.measured.sequences and found.advice.words


KIND = Kind("logs", prepare, cases, read)

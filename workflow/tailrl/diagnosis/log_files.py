"""Writes a log in the documented schema, which `readers` reads: one sequence a row, as JSONL or Parquet."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tailrl.diagnosis.formats import PER_TOKEN, SCHEMA, formats
from tailrl.diagnosis.log import LoggedRow
from tailrl.runtime.errors import ConfigurationError, writing

ENDINGS = (".jsonl", ".parquet")


def check_log_name(path: Path) -> None:
    """Raises StudyError for a name that no log can have."""
    if path.suffix not in ENDINGS:
        raise ConfigurationError(f"{path}: a log's name must end in {' or '.join(ENDINGS)}")


def write_log(rows: Sequence[LoggedRow], path: Path) -> None:
    """Write the rows with those columns that they have; raises StudyError if the name or the disk refuses."""
    check_log_name(path)
    found = [_plain(row) for row in rows]
    with writing(path):
        if path.suffix == ".parquet":
            import pyarrow  # type: ignore[import-untyped]
            import pyarrow.parquet  # type: ignore[import-untyped]

            names = dict.fromkeys(name for row in found for name in row)  # a row may lack some
            pyarrow.parquet.write_table(pyarrow.table({name: [row.get(name) for row in found] for name in names}), path)
            return
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in found)


def _plain(row: LoggedRow) -> dict[str, Any]:
    """A row under the documented names, without what was not logged."""
    names = formats()["plain"].columns
    lists = {names[name]: getattr(row, f"{name}_T") for name in PER_TOKEN}
    numbers = {names[name]: getattr(row, name) for name in ("step", "version", "reward")}
    found = {name: values.tolist() for name, values in lists.items() if values is not None}
    found |= {name: value for name, value in numbers.items() if not np.isnan(value)}
    if row.whole_T is not None and row.place_T is not None:
        found[names["prompt"]] = row.whole_T[: int(row.place_T[0])].tolist()
    found |= {names["schema"]: SCHEMA, **row.labels}
    return found if row.text is None else found | {names["text"]: row.text}

"""Follows the files of a folder while a training writes them: what is new since the last look.

JSON lines are read from where the last look ended, whole lines alone; a file that was renamed (rotated) goes on at its
place, and one that was cut or replaced is read anew. Other kinds are read whole when they have changed, and what was
taken before is left out.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tailrl.curves.history import History, flat_row, read_history
from tailrl.curves.names import KNOWN, ends
from tailrl.diagnosis.log import Log
from tailrl.diagnosis.parts import part_of
from tailrl.diagnosis.readers import step_in_name
from tailrl.diagnosis.tables import read_table
from tailrl.runtime.data_files import yaml_beside
from tailrl.runtime.errors import DataError, StorageError, one_line, reason, say
from tailrl.runtime.limits import regular
from tailrl.watch.table import digest

LINES = (".jsonl", ".ndjson")
TOKEN_FILES = (".parquet", ".pt", ".npz", ".gz", ".arrow", ".feather")
CURVE_FILES = (".wandb", ".csv", ".tsv", ".log", ".out", ".txt")
STATE = "trainer_state.json"
BYTES_A_LOOK = 64_000_000  # of a file's new lines that one look takes; the rest comes with the next
HEAD_BYTES = 256  # of a file's beginning, by which a replaced file is known
ROWS_A_STEP = 256  # responses that count as a step where a log has no steps


@dataclass(frozen=True, slots=True)
class Tokens:
    """Responses of one step: a part of a log, and the digests of their prompts [S] (0: not known)."""

    file: Path
    step: float
    log: Log
    prompt_S: np.ndarray[Any, np.dtype[np.int64]]
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Metrics:
    """Numbers of one step, by the fields of `Step` that they are; `digest` of the sampler's weights.

    `not_finite`: a metric of the mismatch that is NaN or infinite, with its value.
    """

    file: Path
    step: float
    numbers: Mapping[str, float]
    digest: str = ""
    not_finite: str = ""


Item = Tokens | Metrics


@dataclass
class Followed:
    """How far a file was read: bytes of lines, or what was taken of a whole file; `kind`: tokens, metrics or other."""

    head: bytes = b""
    place: int = 0
    lines: int = 0
    kind: str = ""
    stamp: tuple[int, int] = (-1, -1)
    taken: int = 0
    seen: dict[float, set[str]] = field(default_factory=dict)
    last_step: float = -1.0
    told: set[str] = field(default_factory=set)


@cache
def names() -> dict[str, Any]:
    """The names of `names.yaml`."""
    return dict(yaml_beside(__file__, "names.yaml"))


class Folder:
    """The files of a folder (or one file); `look` gives what is new."""

    def __init__(self, path: Path) -> None:
        """Raises StudyError where there is nothing at this path."""
        if not path.exists():
            raise StorageError(f"{path}: is missing")
        self.path = path
        self.followed: dict[tuple[int, int], Followed] = {}
        self.unnumbered = 0

    def look(self, whole: bool = False) -> Iterator[Item]:
        """What was written since the last look. `whole`: no one writes any more, so every file is finished."""
        for file in self.files():
            try:
                status = file.stat()
            except OSError:  # it was renamed or removed in between
                continue
            known = self.followed.setdefault((status.st_dev, status.st_ino), Followed())
            try:
                if _ending(file) in LINES:
                    yield from self._lines(file, known, status.st_size)
                else:
                    yield from self._whole(file, known, status, whole)
            except (DataError, StorageError) as error:
                self._tell(file, known, str(error))
            except ModuleNotFoundError as error:
                self._tell(file, known, f"{file}: is left out: {error.name} is not installed")

    def files(self) -> list[Path]:
        """The files that may be logs, by name; lines, which grow, before files that may hold the same once more."""
        if self.path.is_file():
            return [self.path]
        # `os.walk` passes over folders that the training removes in between.
        named = (Path(folder, name) for folder, _, files in os.walk(self.path) for name in files)
        every = [file for file in named if _ending(file) or file.name == STATE]
        return sorted(filter(Path.is_file, every), key=lambda file: (_ending(file) not in LINES, file))

    def _tell(self, file: Path, known: Followed, words: str) -> None:
        """Says once what is wrong with a file, and goes on."""
        if words not in known.told:
            known.told.add(words)
            say(words if str(file) in words else f"{file}: {words}")

    # --- files of lines --------------------------------------------------------------------------------

    def _lines(self, file: Path, known: Followed, size: int) -> Iterator[Item]:
        if known.kind == "other" or size == known.place:
            return
        try:
            with open(file, "rb", opener=regular) as opened:
                head = opened.read(HEAD_BYTES)
                if size < known.place or head[: len(known.head)] != known.head:
                    known.place, known.lines, known.kind = 0, 0, ""  # cut, or another file in its place
                known.head = head
                opened.seek(known.place)
                content = opened.read(BYTES_A_LOOK)
        except OSError as error:
            raise StorageError(f"{file}: cannot be read: {reason(error)}") from None
        content = content[: content.rfind(b"\n") + 1]  # the last line is still being written
        known.place += len(content)
        for line in content.split(b"\n")[:-1]:
            known.lines += 1
            if not line.strip():
                continue
            where = f"{file}, line {known.lines}"
            try:
                row = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
            except (ValueError, RecursionError):
                self._tell(file, known, f"{where}: is no JSON, and left out; later ones of the file too")
                continue
            if not isinstance(row, dict):
                known.kind = known.kind or "other"
            known.kind = known.kind or _kind(row)
            if known.kind == "other":
                return
            if known.kind == "metrics":
                yield from self._metrics(file, known, row)
            else:
                yield from self._row(file, known, row, where)

    def _row(self, file: Path, known: Followed, row: Mapping[str, Any], where: str) -> Iterator[Item]:
        try:
            parts = [log for _, log in read_table([row])]
        except DataError as error:
            # The sentence says what is wrong with this row, behind its place in a table of one.
            self._tell(file, known, f"{where}: is left out: {one_line(str(error).removeprefix('row 0: '))}")
            return
        for log in parts:
            step = float(log.step_S[0])
            step = step_in_name(file.name) if math.isnan(step) else step
            if math.isnan(step):
                step = float(self.unnumbered // ROWS_A_STEP)
                self.unnumbered += len(log.start_S)
            prompt_S = np.full(len(log.start_S), _prompt(row, log), np.int64)
            yield Tokens(file, step, log, prompt_S, _digest(row))

    def _metrics(self, file: Path, known: Followed, row: Mapping[str, Any]) -> Iterator[Item]:
        flat = dict(flat_row(row))
        named = [flat[name] for name in KNOWN.steps if name in flat]
        step = named[0] if named else known.last_step + 1
        if not math.isfinite(step):
            return
        known.last_step = step
        numbers, broken = told_by(flat)
        if numbers or broken or _digest(row):
            yield Metrics(file, step, numbers, _digest(row), broken)

    # --- other files -----------------------------------------------------------------------------------

    def _whole(self, file: Path, known: Followed, status: os.stat_result, whole: bool) -> Iterator[Item]:
        stamp = (status.st_size, status.st_mtime_ns)
        if known.kind == "other" or stamp == known.stamp:
            return
        if not known.kind:
            known.kind = "tokens" if file.suffix.lower() in TOKEN_FILES else "metrics"
        try:
            if known.kind == "metrics":
                yield from self._history(file, known)
            else:
                yield from self._parts(file, known)
            known.stamp = stamp
        except (DataError, StorageError):
            # It may be half-written: the next look says whether it is.
            if whole or known.stamp == stamp:
                raise
        finally:
            known.stamp = stamp if whole else known.stamp

    def _history(self, file: Path, known: Followed) -> Iterator[Item]:
        history = read_history(file)
        if history is None:
            if file.suffix.lower() not in (".log", ".out", ".txt", ".csv", ".tsv"):
                known.kind = "other"
            return
        for step, flat in _rows_of(history).items():
            new = {name: value for name, value in flat.items() if name not in known.seen.get(step, ())}
            known.seen.setdefault(step, set()).update(new)
            numbers, broken = told_by(new)
            if numbers or broken:
                yield Metrics(file, step, numbers, not_finite=broken)

    def _parts(self, file: Path, known: Followed) -> Iterator[Item]:
        taken, number = known.taken, 0
        for _, log in read_table(file):
            count = len(log.start_S)
            first, number = max(0, taken - number), number + count
            chosen_S = np.arange(count) >= first
            step_S = np.where(np.isnan(log.step_S), float(self.unnumbered // ROWS_A_STEP), log.step_S)
            for step in np.unique(step_S[chosen_S]).tolist():
                part = part_of(log, (chosen_S & (step_S == step))[log.sequence_T])
                yield Tokens(file, step, part, np.zeros(len(part.start_S), np.int64))
        if number > taken:
            # A file without steps is one step.
            self.unnumbered = (self.unnumbered // ROWS_A_STEP + 1) * ROWS_A_STEP
        known.taken = max(known.taken, number)


def _ending(file: Path) -> str:
    """The ending that says how to read a file; one that was rotated keeps its kind: `.jsonl.1`."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    while suffixes and suffixes[-1][1:].isdigit():
        suffixes.pop()
    last = suffixes[-1] if suffixes else ""
    return last if last in (*LINES, *TOKEN_FILES, *CURVE_FILES) else ""


def _kind(row: Mapping[str, Any]) -> str:
    """What the first line of a file says: a row of tokens has lists, a row of metrics known names or a step."""
    if any(isinstance(value, list) for value in row.values()):
        try:
            next(iter(read_table([row])))
        except (DataError, StopIteration):
            return "tokens" if any("logp" in name.lower() for name in row) else "other"
        return "tokens"
    flat = dict(flat_row(row))
    known = any(name in flat for name in KNOWN.steps) or bool(told_by(flat)[0])
    return "metrics" if known else "other"


def _rows_of(history: History) -> dict[float, dict[str, float]]:
    rows: dict[float, dict[str, float]] = {}
    for curve in history.curves:
        for step, value in zip(curve.step_N.tolist(), curve.value_N.tolist(), strict=True):
            rows.setdefault(step, {})[curve.name] = value
    return dict(sorted(rows.items()))


OF_THE_SPREAD = ("pearson", "abs_prob_std")
"""Quantities that are NaN where one side's values are all alike, as of a policy that is sure of each token."""


def told_by(flat: Mapping[str, float]) -> tuple[dict[str, float], str]:
    """What metrics say of a step by their logged names.

    Returns:
        The fields of `Step`, and a metric of the mismatch that is NaN or infinite, by its name and value; "" for none.
    """
    numbers: dict[str, float] = {}
    broken = ""
    for name, value in flat.items():
        metric = KNOWN.metric(name)
        if not math.isfinite(value):
            if metric and metric.of not in OF_THE_SPREAD:
                broken = broken or f"{name} is {value}"
        elif KNOWN.is_learning_rate(name):
            numbers.setdefault("learning_rate", value)
        elif metric and (field_name := names()["quantities"].get(metric.of)):
            numbers.setdefault(field_name, value)
        else:
            for field_name in ("clip", "reward", "version"):
                if any(end in names()[field_name] for end in ends(name)):
                    numbers.setdefault(field_name, value)
    return numbers, broken


def _digest(row: Mapping[str, Any]) -> str:
    """The digest of the sampler's weights in a row, or its version where that is a name and no number."""
    for name in [*names()["digest"], *names()["version"]]:
        value = row.get(name)
        if isinstance(value, str) and value and (name in names()["digest"] or not value.replace(".", "").isdigit()):
            return value
    return ""


def _prompt(row: Mapping[str, Any], log: Log) -> int:
    """A digest of the row's prompt: a column of its own, or the ids before the response's; 0 where it is not known."""
    for name in names()["prompt"]:
        if value := row.get(name):
            return digest(json.dumps(value, default=str).encode())
    if len(log.start_S) != 1 or (log.token_T < 0).any():
        return 0
    response = log.token_T.tolist()
    for value in row.values():
        if isinstance(value, list) and len(value) > len(response) and value[-len(response) :] == response:
            return digest(json.dumps(value[: -len(response)], default=str).encode())
    return 0

"""Metrics of a run over its steps, from whatever file or service holds them.

W&B (CSV export, the run's own file, a run's address), transformers' `trainer_state.json`, TensorBoard's CSV, metrics as
JSON lines, any CSV with a column of steps, and the consoles of verl and TRL.
"""

import ast
import csv
import io
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tailrl.artifacts.metrics import FloatArray
from tailrl.curves.names import KNOWN, Names
from tailrl.curves.wandb_file import read_wandb_file
from tailrl.diagnosis.folders import regular_files
from tailrl.diagnosis.opened import opened, plain_ending
from tailrl.runtime.errors import ConfigurationError, DataError, StorageError, reason
from tailrl.runtime.jsonl import json_value, numbered_lines
from tailrl.runtime.limits import MEMORY, limited_memory

TENSORBOARD = "TensorBoard's CSV"
HEAD = 65_536  # bytes that say whether a file holds metrics
MOST_BYTES = 512_000_000  # a history is small; a larger file is something else
ADDRESS = re.compile(r"https://[^/]+/(?P<entity>[^/]+)/(?P<project>[^/]+)/runs/(?P<run>[^/?#]+)")
OF_W_AND_B = re.compile(r"^(?P<run>.+) - (?P<metric>.+?)(?P<bound>__MIN|__MAX)?$")  # a column of W&B's CSV export
VERL_LINE = re.compile(r"\bstep:(\d+) - (.+)$")
VERL_VALUE = re.compile(r"(?:np\.\w+\()?(-?(?:\d+\.?\d*(?:e[-+]?\d+)?|nan|inf))\)?$", re.IGNORECASE)
OF_TOKENS = re.compile(r"logp|log_p", re.IGNORECASE)  # in the names of lists that make a row a log of tokens
NO_NUMBER = re.compile(r"(?<=: )(-?(?:nan|inf))\b")  # which Python prints as no literal
LONGEST_LINE = 65_536  # characters of a dictionary in a console
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric of one run over N steps.

    Attributes:
        run: the run's name where a file has several runs; else empty.
        name: the metric's name, as it was logged.
        step_N: float64, rising. value_N: float64; a value that was logged as NaN or infinite is kept.
    """

    run: str
    name: str
    step_N: FloatArray
    value_N: FloatArray


@dataclass(frozen=True, slots=True)
class History:
    """What a file of metrics holds.

    Attributes:
        where: the file or address. kind: what it is called, such as "a W&B export".
        curves: those of all runs and metrics.
        restarts: for each run with any, the steps at which its log goes back: the run was started again there.
    """

    where: str
    kind: str
    curves: tuple[Curve, ...]
    restarts: Mapping[str, tuple[float, ...]]


def read_all(paths: Sequence[str | Path], names: Names = KNOWN) -> list[History]:
    """The metrics in these files and at these addresses; empty if the first of them holds none.

    Raises:
        StudyError: some hold metrics and another one does not.
    """
    histories: list[History] = []
    for path in map(str, paths):
        online = path.startswith(("https://", "http://"))
        history = read_address(path, names) if online else _of_file(Path(path), names)
        if history is None:
            if histories:
                raise DataError(f"{path}: holds no metrics over steps, as {paths[0]} does: give logs and curves apart")
            return []
        histories.append(history)
    return histories


def read_folders(paths: Iterable[Path], names: Names = KNOWN) -> list[History]:
    """The metrics in the files of these folders; of copies of one file, such as each checkpoint's, the longest."""
    histories: dict[str, tuple[int, History]] = {}
    for path in paths:
        for file in sorted(regular_files(path)) if path.is_dir() else [path]:
            try:
                history = _of_file(file, names)
            except (DataError, StorageError):  # one of many files is damaged, or is something else
                continue
            if history is None or not any(names.metric(curve.name) for curve in history.curves):
                continue
            size = sum(len(curve.step_N) for curve in history.curves)
            if size >= histories.get(file.name, (0, history))[0]:
                histories[file.name] = size, history
    return [history for _, history in histories.values()]


def _of_file(path: Path, names: Names) -> History | None:
    if not path.is_file():
        return None
    with limited_memory(MEMORY, str(path)):
        return read_history(path, names)


def read_history(path: Path, names: Names = KNOWN) -> History | None:
    """The metrics in a file; None if it holds none, and so is something else.

    Args:
        path: the file.
        names: the known ones, and the user's own.

    Raises:
        StudyError: it is a file of metrics, and damaged.
    """
    ending = plain_ending(path)
    if ending == ".wandb":
        return history_of_rows(((("", row)) for row in read_wandb_file(path)), str(path), "a W&B run's own file", names)
    if ending == ".json":
        return _json(path, names)
    if ending in (".jsonl", ".ndjson"):
        return _json_lines(path, names)
    if ending in (".csv", ".tsv"):
        return _table(path, "\t" if ending == ".tsv" else ",", names)
    if ending in (".log", ".txt", ".out"):
        return _console(path, names)
    return None


def read_address(address: str, names: Names = KNOWN) -> History:
    """The metrics of a W&B run by its address, such as https://wandb.ai/ENTITY/PROJECT/runs/ID.

    Raises:
        StudyError: the address is no run's, no key is set, wandb is not installed, or the service refuses.
    """
    parts = ADDRESS.match(address)
    if not parts:
        raise ConfigurationError(
            f"{address}: is no address of a W&B run, such as https://wandb.ai/ENTITY/PROJECT/runs/ID"
        )
    if not os.environ.get("WANDB_API_KEY"):
        raise ConfigurationError(f"{address}: WANDB_API_KEY is not set; export the run's chart as CSV, or set the key")
    try:
        import wandb
    except ImportError:
        raise ConfigurationError(f"{address}: wandb is not installed; export the run's chart as CSV") from None
    try:
        run = wandb.Api().run(f"{parts['entity']}/{parts['project']}/{parts['run']}")
        rows = [("", row) for row in run.scan_history()]
    except Exception as error:  # wandb has errors of its own, and those of the network
        raise ConfigurationError(f"{address}: W&B does not give the run: {reason(error)}") from None
    return history_of_rows(rows, address, "a W&B run", names)


def history_of_rows(
    rows: Iterable[tuple[str, Mapping[str, Any]]], where: str, kind: str, names: Names = KNOWN
) -> History:
    """The curves of rows of metrics, each with the name of its run.

    A row without a step is counted on from the row before. Where the step goes back, the run was started again: the
    later value of a step counts.
    """
    values: dict[tuple[str, str], dict[float, float]] = {}
    restarts: dict[str, list[float]] = {}
    last_step: dict[str, float] = {}
    for run, row in rows:
        flat = dict(flat_row(row))
        step = next((flat[name] for name in names.steps if name in flat), last_step.get(run, -1.0) + 1)
        if not math.isfinite(step):
            continue
        if step < last_step.get(run, -math.inf):
            restarts.setdefault(run, []).append(step)
        last_step[run] = step
        for name, value in flat.items():
            if name not in names.steps:
                values.setdefault((run, name), {})[step] = value
    curves = []
    for (run, name), by_step in values.items():
        steps = sorted(by_step)
        curves.append(Curve(run, name, np.array(steps, np.float64), np.array([by_step[step] for step in steps])))
    return History(where, kind, tuple(curves), {run: tuple(steps) for run, steps in restarts.items()})


def flat_row(row: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a row; names of nested mappings are joined by slashes."""
    for name, value in row.items():
        whole = f"{before}{name}"
        if isinstance(value, Mapping):
            yield from flat_row(value, f"{whole}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            try:
                yield whole, float(value)
            except OverflowError:
                yield whole, math.inf
        elif isinstance(value, str) and value.lower() in ("nan", "infinity", "-infinity", "inf", "-inf"):
            yield whole, float(value)  # W&B writes such numbers as text


# --- kinds of files ------------------------------------------------------------------------------------


def _text(path: Path, most: int = MOST_BYTES) -> str:
    """The text of a file, or its first `most` bytes."""
    with opened(path) as content:
        return content.stream.read(most).decode("utf-8-sig", "replace")


def _json(path: Path, names: Names) -> History | None:
    """trainer_state.json, or a list of rows of metrics; a log of tokens is not read as a whole."""
    head = _text(path, HEAD)
    if '"log_history"' not in head and not _begins_with_metrics(head, names):
        return None
    state = json_value(_text(path))
    rows = state.get("log_history") if isinstance(state, dict) else state
    if not isinstance(rows, list):
        return None
    kind = "transformers' trainer_state.json" if isinstance(state, dict) else "metrics as JSON"
    return history_of_rows(((("", row)) for row in rows if isinstance(row, dict)), str(path), kind, names)


def _begins_with_metrics(head: str, names: Names) -> bool:
    """Whether a text begins a list whose first entry has metrics."""
    if not head.lstrip().startswith("["):
        return False
    try:
        row, _ = json.JSONDecoder().raw_decode(head.lstrip()[1:].lstrip())
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and _is_metrics(row, names)


def _json_lines(path: Path, names: Names) -> History | None:
    """Lines of metrics; None where the first line names no step, or has lists, as a log of tokens has.

    Only the first line of another file is read: a log of tokens may be large.
    """
    rows: list[tuple[str, Mapping[str, Any]]] = []
    broken: int | None = None
    with opened(path) as content:
        for number, line in numbered_lines(content.stream, path, MOST_BYTES):
            if broken is not None:
                raise DataError(f"{path}, line {broken}: is no JSON")
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                if not rows:
                    return None
                broken = number  # the last line may be cut off: the run is still writing it
                continue
            if not isinstance(row, dict) or (not rows and not _is_metrics(row, names)):
                return None
            rows.append(("", row))
    return history_of_rows(rows, str(path), "metrics as JSON lines", names) if rows else None


def _is_metrics(row: Mapping[str, Any], names: Names) -> bool:
    """Whether a row has metrics: a known name and no tokens' log-probs, or a step and numbers alone."""
    flat = dict(flat_row(row))
    if any(names.metric(name) for name in flat):
        return not any(isinstance(value, list) and OF_TOKENS.search(name) for name, value in row.items())
    return any(name in flat for name in names.steps) and all(name in flat for name in row)


def _table(path: Path, separator: str, names: Names) -> History | None:
    try:
        titles = [name.strip() for name in next(csv.reader(io.StringIO(_text(path, HEAD)), delimiter=separator), [])]
        steps = [place for place, title in enumerate(titles) if title in names.steps]
        columns = [(place, parts) for place, title in enumerate(titles) if (parts := OF_W_AND_B.match(title))]
        is_of_tensorboard = [title.lower() for title in titles[:3]] == ["wall time", "step", "value"]
        if not (is_of_tensorboard or columns or (steps and any(map(names.metric, titles)))):
            return None
        lines = [line for line in csv.reader(io.StringIO(_text(path)), delimiter=separator) if line]
    except csv.Error as error:
        raise DataError(f"{path}: is no table: {error}") from None
    if len(lines) < 2:
        return None
    body = lines[1:]
    if is_of_tensorboard:
        name = names.of_file(path.stem)
        rows = ((("", {"step": _number(line[1]), name: _number(line[2])})) for line in body if len(line) > 2)
        return history_of_rows(rows, str(path), TENSORBOARD, names)
    exported = [(place, parts) for place, parts in columns if not parts["bound"]]
    if exported:
        of_step = steps[0] if steps else 0  # the first column is the axis that the chart had

        def cells() -> Iterator[tuple[str, dict[str, Any]]]:
            for line in body:
                for place, parts in exported:
                    if place < len(line) and line[place].strip():
                        yield parts["run"], {"step": _number(line[of_step]), parts["metric"]: _number(line[place])}

        return history_of_rows(sorted(cells(), key=lambda cell: cell[0]), str(path), "a W&B export", names)
    rows = ((("", {title: _number(cell) for title, cell in zip(titles, line, strict=False)})) for line in body)
    return history_of_rows(rows, str(path), "a table of metrics", names)


def _number(text: str) -> float | None:
    """A cell's number; None where it has none."""
    try:
        return float(text)
    except ValueError:
        return None


def _console(path: Path, names: Names) -> History | None:
    """verl's console: `step:3 - actor/lr:1e-06 - rollout_corr/k3_kl:0.001 - ...`; or a dictionary a line, as of TRL."""
    rows: list[tuple[str, Mapping[str, Any]]] = []
    with opened(path) as content:
        for _, line in numbered_lines(content.stream, path, MOST_BYTES):
            text = ANSI.sub("", line.decode("utf-8", "replace").rstrip())
            if printed := _dictionary(text, names):
                rows.append(("", printed))
            match = VERL_LINE.search(text)
            if printed or not match:
                continue
            row: dict[str, Any] = {"step": float(match[1])}
            for part in match[2].split(" - "):
                name, _, text = part.rpartition(":")
                if value := VERL_VALUE.match(text.strip()):
                    row[name.strip()] = float(value[1])
            rows.append(("", row))
    return history_of_rows(rows, str(path), "a console", names) if rows else None


def _dictionary(text: str, names: Names) -> dict[str, Any] | None:
    """The metrics in a line that ends with a dictionary of Python; transformers prints its numbers as words, too."""
    begin = text.find("{")
    if begin < 0 or not text.endswith("}") or len(text) > LONGEST_LINE:
        return None
    try:
        row = ast.literal_eval(NO_NUMBER.sub(r"'\1'", text[begin:]))
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return None
    if not isinstance(row, dict):
        return None
    numbers = {str(name): _number(value) if isinstance(value, str) else value for name, value in row.items()}
    return numbers if any(names.metric(name) for name, _ in flat_row(numbers)) else None

"""A batch of verl as rows of the plain schema (docs/how-to/log-schema.md), and files of them."""

import json
import math
import random
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from tailrl.diagnosis.log import Log as Packed
from tailrl.diagnosis.log import LoggedRow, pack
from tailrl.integrations.verl.settings import Log
from tailrl.runtime.errors import DataError, writing

TOKENS = {"sampler_logprobs": "rollout_log_probs", "trainer_logprobs": "old_log_probs"}
"""Columns with one number a token of the response, by verl's names of them."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Responses of one step.

    Attributes:
        columns: verl's names, each with one tensor [T] a response; `prompts` [P].
        masks: [T] each, 0 for a token that is left out: a tool's, or one outside the trainer's safe set. It is from
            before a rejection.
        rewards: one number a response.
        advantages: [T] each; NaN where a rejection has set it to 0.
        extra: more columns a token, by the plain schema's names, [T] each.
        rows: more values a response, by the plain schema's names, such as `version`.
    """

    columns: Mapping[str, Sequence[Tensor]]
    masks: Sequence[Tensor]
    rewards: Sequence[float]
    advantages: Sequence[Tensor]
    extra: Mapping[str, Sequence[Tensor]]
    rows: Mapping[str, Sequence[Any]]


def require(columns: Container[str], names: Iterable[str] = ("response_mask", *TOKENS.values())) -> None:
    """Raises StudyError where a batch of verl lacks a column."""
    if missing := [name for name in names if name not in columns]:
        raise DataError(f"tailrl: verl's batch has no {', '.join(missing)}")


def chosen(step: int, indices: Sequence[int], count: int) -> list[int]:
    """At most `count` of these responses, at random and the same in each run of the step."""
    return sorted(random.Random(step).sample(list(indices), min(count, len(indices))))


def rows(batch: Batch, indices: Sequence[int], step: int) -> Iterator[dict[str, Any]]:
    """These responses in the plain schema; `token_ids` begin with the prompt's."""
    for i in indices:
        row: dict[str, Any] = {
            "token_ids": batch.columns["prompts"][i].tolist() + batch.columns["responses"][i].tolist(),
            "mask": batch.masks[i].int().tolist(),
        }
        row |= {name: batch.columns[key][i].tolist() for name, key in TOKENS.items()}
        row |= {name: values[i].tolist() for name, values in batch.extra.items()}
        row["advantage"] = [None if value != value else value for value in batch.advantages[i].tolist()]  # NaN
        row |= {name: values[i] for name, values in batch.rows.items()}
        yield row | {"step": step, "reward": batch.rewards[i], "framework": "verl"}


def packed(batch: Batch, indices: Sequence[int], step: int) -> Packed:
    """The same responses as `tailrl diagnose` reads them: tokens whose mask is not 0."""

    def kept(values: Sequence[Tensor], i: int) -> np.ndarray[Any, Any]:
        return values[i][batch.masks[i].bool()].double().numpy()

    def number(name: str, i: int) -> float:
        value = batch.rows[name][i] if name in batch.rows else None
        return math.nan if value is None else float(value)

    return pack(
        [
            LoggedRow(
                where=f"step {step}, response {i}",
                sampler_T=kept(batch.columns[TOKENS["sampler_logprobs"]], i),
                trainer_T=kept(batch.columns[TOKENS["trainer_logprobs"]], i),
                token_T=kept(batch.columns["responses"], i).astype(np.int64),
                advantage_T=kept(batch.advantages, i),
                step=step,
                version=number("version", i),
                reward=batch.rewards[i],
            )
            for i in indices
        ]
    )


def write(table: Sequence[dict[str, Any]], settings: Log, name: str) -> Path:
    """Write rows as one file of the folder, whole or not at all; a file of that name is replaced.

    Raises:
        StudyError: the disk is full, or the folder cannot be written to.
    """
    path = Path(settings.folder) / f"{name}.{settings.format}"
    aside = path.with_suffix(".part")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if settings.format == "parquet":
            import pyarrow  # type: ignore[import-untyped]
            import pyarrow.parquet  # type: ignore[import-untyped]

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(table)), aside)
        else:
            with aside.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in table)
        aside.replace(path)
    return path


def size_of(path: Path, rows_written: int, rows_there: int, every: int) -> str:
    """What the first file says of the log's size."""
    size = path.stat().st_size
    return (
        f"{rows_written} of {rows_there} responses logged in {path}: {size / 1e6:.3g} MB; "
        f"at every={every}, {1000 / every * size / 1e6:.3g} MB in 1,000 steps"
    )

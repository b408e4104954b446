"""Prompts from a file of their own: one a row, or a set in which each response's prompt is found by the numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tailrl.artifacts.files import parse_object, read_text
from tailrl.artifacts.metrics import FloatArray
from tailrl.explanation.scorer import Scorer, logprobs_after
from tailrl.explanation.sequences import Response, Scored, encode, joined
from tailrl.runtime.errors import DataError

TRIED = 16  # a response's prompt is found by so many of its first tokens
TURNS = 2  # so many prompts, the best by the first token, are tried alone before all others
EXACT = 1e-3  # nats; a column that is nowhere further from the model's numbers has them: its prompt is found
CHECKED = 6  # responses by which it is seen whether each row has its line's prompt
AROUND = 16  # prompts before and after a response's own one, in the log's order, that may have been read instead


def read_prompts(file: Path, tokenizer: Any) -> list[tuple[int, ...]]:
    """The prompts' ids in a file: JSON lines with `prompt_ids`, `prompt` or a log's ids and mask; or text, one a line.

    Raises:
        StudyError: the file cannot be read, or a line has no prompt.
    """
    lines = [line for line in read_text(file).splitlines() if line.strip()]
    found = []
    for number, line in enumerate(lines, 1):
        where = f"{file}, line {number}"
        found.append(
            _of_object(parse_object(line.encode(), where), tokenizer, where)
            if file.suffix == ".jsonl"
            else _encoded(line, tokenizer, where)
        )
    if not found:
        raise DataError(f"{file}: holds no prompt")
    return found


def _of_object(given: dict[str, Any], tokenizer: Any, where: str) -> tuple[int, ...]:
    ids = given.get("prompt_ids")
    if isinstance(ids, list) and all(isinstance(one, int) for one in ids) and ids:
        return tuple(ids)
    if isinstance(given.get("prompt"), str):
        return _encoded(given["prompt"], tokenizer, where)
    raise DataError(f"{where}: has neither prompt_ids, a list of token ids, nor prompt, a text")


def _encoded(text: str, tokenizer: Any, where: str) -> tuple[int, ...]:
    if tokenizer is None:
        raise DataError(f"{where}: is a text, and the model's folder has no tokenizer")
    return tuple(encode(tokenizer, text))


@dataclass(frozen=True, slots=True)
class _Sought:
    """A response whose prompt is looked for: its token ids, and columns. One should hold the model's numbers."""

    ids: Sequence[int]
    columns: Sequence[FloatArray]


def match(
    scorer: Scorer,
    responses: Sequence[Response],
    prompts: Sequence[tuple[int, ...]],
    rows: int,
    seen: Callable[[int], object],
) -> tuple[list[Response], str]:
    """The responses after their prompts, and a sentence on how these were found.

    With as many prompts as the log has rows, each row has its own, if the numbers say so. Else a response's prompt is
    the one after which the model's numbers are nearest to either logged column.
    """
    # Log-probs are negative; a log may have them without their sign.
    sought = [_Sought(_ids(one), [-np.abs(one.trainer_T), -np.abs(one.sampler_T)]) for one in responses]
    if len(prompts) == rows:  # a set may have as many by chance
        own = [prompts[one.number] for one in responses[:CHECKED]]
        nearest = _nearest(scorer, sought[:CHECKED], [[prompt, *prompts[:AROUND]] for prompt in own])
        if np.mean([one == best for one, best in zip(own, nearest, strict=True)]) >= 0.5:
            return [joined(one, prompts[one.number], _ids(one)) for one in responses], "Each row has its line's prompt."
    unique = list(dict.fromkeys(prompts))
    best_ones = _nearest(scorer, sought, [unique] * len(sought), seen)
    found = [joined(one, prompt, _ids(one)) for one, prompt in zip(responses, best_ones, strict=True)]
    return found, f"Each response's prompt was found among {len(unique)} by the numbers of its first {TRIED} tokens."


def with_other_prompts(
    scorer: Scorer, chosen: Sequence[Scored], side: str, prompts: Sequence[tuple[int, ...]], fewest: int
) -> list[Scored]:
    """The responses, each with the log's prompt that fits a side's column best; empty where that is its own.

    Args:
        scorer: the model.
        chosen: the responses; all are looked at only where the first `fewest` fit another prompt.
        side: sampler or trainer.
        prompts: of the log, each once, in its order.
        fewest: the first responses, which decide.
    """
    found = _with_nearest(scorer, chosen[:fewest], side, prompts)
    if all(one.inputs.elsewhere == one.inputs.prompt for one in found):
        return []
    return found + _with_nearest(scorer, chosen[fewest:], side, prompts)


def _with_nearest(
    scorer: Scorer, chosen: Sequence[Scored], side: str, prompts: Sequence[tuple[int, ...]]
) -> list[Scored]:
    """The responses with the nearest of the prompts around their own."""
    place = {prompt: number for number, prompt in enumerate(prompts)}
    around = [
        [prompts[(place[one.inputs.prompt] + step) % len(prompts)] for step in range(-AROUND, AROUND + 1)]
        for one in chosen
    ]
    sought = [_Sought(one.inputs.ids[one.inputs.first :], [getattr(one.response, f"{side}_T")]) for one in chosen]
    return [
        replace(one, inputs=replace(one.inputs, elsewhere=prompt))
        for one, prompt in zip(chosen, _nearest(scorer, sought, around), strict=True)
    ]


def _ids(response: Response) -> list[int]:
    if response.token_T is None:
        raise DataError(f"row {response.number}: has no token ids, which a prompt from a file needs")
    ids: list[int] = response.token_T.tolist()
    return ids


def _nearest(
    scorer: Scorer,
    sought: Sequence[_Sought],
    candidates: Sequence[Sequence[tuple[int, ...]]],
    seen: Callable[[int], object] = int,
) -> list[tuple[int, ...]]:
    """Of each response, the candidate after which the model's numbers are nearest to one of its columns.

    The first token, which costs little, gives the order. A prompt after which a column has the model's own numbers ends
    the search: most logs have such a column, and the other prompts need not be read.
    """
    own = [list(dict.fromkeys(prompts)) for prompts in candidates]
    first = _distances(scorer, sought, [(row, prompt) for row, those in enumerate(own) for prompt in those], 1)
    order = [sorted(those, key=lambda prompt: first[row, prompt]) for row, those in enumerate(own)]
    found: dict[tuple[int, tuple[int, ...]], tuple[float, float]] = {}
    left = set(range(len(sought)))
    for turn in range(TURNS + 1):
        next_ones = slice(turn, turn + 1 if turn < TURNS else None)
        pairs = [(row, prompt) for row in sorted(left) for prompt in order[row][next_ones]]
        tried = _distances(scorer, sought, pairs, TRIED, seen)
        found |= tried
        left -= {row for (row, _), (largest, _) in tried.items() if largest <= EXACT}
    return [
        min(
            (prompt for prompt in those if (row, prompt) in found),
            key=lambda prompt: (found[row, prompt][0] > EXACT, found[row, prompt][1]),
        )
        for row, those in enumerate(order)
    ]


def _distances(
    scorer: Scorer,
    sought: Sequence[_Sought],
    pairs: Sequence[tuple[int, tuple[int, ...]]],
    tokens: int,
    seen: Callable[[int], object] = int,
) -> dict[tuple[int, tuple[int, ...]], tuple[float, float]]:
    """The largest and the median difference in nats, for each pair of a response's row and a prompt.

    They compare the response's first `tokens` tokens with the nearest of its columns.
    """
    rows_of: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in pairs:
        rows_of.setdefault(prompt, []).append(row)
    found = {}
    for prompt, rows in rows_of.items():
        logprobs = logprobs_after(scorer, prompt, [sought[row].ids[:tokens] for row in rows])
        for row, logprob_N in zip(rows, logprobs, strict=True):
            apart = [np.abs(column_T[: len(logprob_N)] - logprob_N) for column_T in sought[row].columns]
            known = [apart_N[np.isfinite(apart_N)] for apart_N in apart if np.isfinite(apart_N).any()]
            each = [(float(apart_N.max()), float(np.median(apart_N))) for apart_N in known]
            found[row, prompt] = min(each, key=lambda one: one[1], default=(np.inf, np.inf))
        seen(len(prompt))
    return found

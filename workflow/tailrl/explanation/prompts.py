"""Prompts from a file of their own: one a row, or a set in which each response's prompt is found by the numbers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tailrl.artifacts.files import parse_object, read_text
from tailrl.artifacts.metrics import FloatArray
from tailrl.explanation.scorer import Scorer, logprobs_after
from tailrl.explanation.sequences import Response, Scored, encode, joined
from tailrl.runtime.errors import DataError

TRIED = 16  # a response's prompt is found by so many of its first tokens
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
    ids = [_ids(one) for one in responses]
    # Log-probs are negative; a log may have them without their sign.
    columns = [[-np.abs(column_T) for column_T in (one.trainer_T, one.sampler_T)] for one in responses]
    if len(prompts) == rows and _is_by_row(scorer, responses[:CHECKED], prompts, ids, columns):
        return [joined(one, prompts[one.number], _ids(one)) for one in responses], "Each row has its line's prompt."
    unique = list(dict.fromkeys(prompts))
    distance_PR = []
    for prompt in unique:
        distance_PR.append(_distances(scorer, prompt, ids, columns))
        seen(len(prompt))
    best_R = np.argmin(distance_PR, 0)
    found = [joined(one, unique[best], own) for one, best, own in zip(responses, best_R, ids, strict=True)]
    return found, f"Each response's prompt was found among {len(unique)} by the numbers of its first {TRIED} tokens."


def _is_by_row(
    scorer: Scorer,
    responses: Sequence[Response],
    prompts: Sequence[tuple[int, ...]],
    ids: Sequence[Sequence[int]],
    columns: Sequence[Sequence[FloatArray]],
) -> bool:
    """Whether most responses are nearest to their own line's prompt; a set may have as many prompts by chance."""
    own = [prompts[one.number] for one in responses]
    tried = list(dict.fromkeys([*own, *prompts[:AROUND]]))
    count = len(responses)
    distance_PR = np.array([_distances(scorer, prompt, ids[:count], columns[:count]) for prompt in tried])
    nearest = [tried[place] for place in distance_PR.argmin(0)]
    return bool(np.mean([one == best for one, best in zip(own, nearest, strict=True)]) >= 0.5)


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
    best: list[tuple[float, tuple[int, ...]]] = [(np.inf, one.inputs.prompt) for one in chosen]
    around = [
        {(place[one.inputs.prompt] + step) % len(prompts) for step in range(-AROUND, AROUND + 1)} for one in chosen
    ]
    for number, prompt in enumerate(prompts):
        those = [row for row, places in enumerate(around) if number in places]
        if not those:
            continue
        ids = [chosen[row].inputs.ids[chosen[row].inputs.first :] for row in those]
        columns = [[getattr(chosen[row].response, f"{side}_T")] for row in those]
        for row, distance in zip(those, _distances(scorer, prompt, ids, columns), strict=True):
            best[row] = min(best[row], (float(distance), prompt))
    return [
        replace(one, inputs=replace(one.inputs, elsewhere=prompt))
        for one, (_, prompt) in zip(chosen, best, strict=True)
    ]


def _ids(response: Response) -> list[int]:
    if response.token_T is None:
        raise DataError(f"row {response.number}: has no token ids, which a prompt from a file needs")
    ids: list[int] = response.token_T.tolist()
    return ids


def _distances(
    scorer: Scorer, prompt: Sequence[int], ids: Sequence[Sequence[int]], columns: Sequence[Sequence[FloatArray]]
) -> FloatArray:
    """Of each response, nats: the median difference from the nearest of its columns after this prompt."""
    logprobs = logprobs_after(scorer, prompt, [one[:TRIED] for one in ids])
    found = [
        [np.nanmedian(np.abs(column_T[: len(logprob_N)] - logprob_N)) for column_T in own]
        for logprob_N, own in zip(logprobs, columns, strict=True)
    ]
    distance_R: FloatArray = np.nan_to_num(found, nan=np.inf).min(1)
    return distance_R

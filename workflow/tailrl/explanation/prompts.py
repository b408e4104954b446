"""Prompts from a file of their own: one a row, or a set in which each response's prompt is found by the numbers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tailrl.artifacts.files import parse_object, read_text
from tailrl.explanation.inputs import Inputs
from tailrl.explanation.scorer import Scorer, first_logprobs
from tailrl.explanation.sequences import Response, encode, joined
from tailrl.runtime.errors import StudyError

TRIED = 16  # a response's prompt is found by so many of its first tokens
SHORTLIST = 4  # the first token alone picks so many prompts, which are then tried


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
        raise StudyError(f"{file}: holds no prompt")
    return found


def _of_object(given: dict[str, Any], tokenizer: Any, where: str) -> tuple[int, ...]:
    ids = given.get("prompt_ids")
    if isinstance(ids, list) and all(isinstance(one, int) for one in ids) and ids:
        return tuple(ids)
    if isinstance(given.get("prompt"), str):
        return _encoded(given["prompt"], tokenizer, where)
    raise StudyError(f"{where}: has neither prompt_ids, a list of token ids, nor prompt, a text")


def _encoded(text: str, tokenizer: Any, where: str) -> tuple[int, ...]:
    if tokenizer is None:
        raise StudyError(f"{where}: is a text, and the model's folder has no tokenizer")
    return tuple(encode(tokenizer, text))


def match(
    scorer: Scorer,
    responses: Sequence[Response],
    prompts: Sequence[tuple[int, ...]],
    rows: int,
    seen: Callable[[int], object],
) -> tuple[list[Response], str]:
    """The responses after their prompts, and a sentence on how these were found.

    With as many prompts as the log has rows, each row has its own. Else a response's prompt is the one after which the
    model's numbers are nearest to either logged column.
    """
    if len(prompts) == rows:
        return [joined(one, prompts[one.number], _ids(one)) for one in responses], "Each row has its line's prompt."
    unique = list(dict.fromkeys(prompts))
    first_PV = [first_logprobs(scorer, prompt) for prompt in unique]
    found = []
    for response in responses:
        ids = _ids(response)
        first = np.array([logp_V[ids[0]].item() for logp_V in first_PV])
        distance_P = np.minimum(np.abs(first - response.trainer_T[0]), np.abs(first - response.sampler_T[0]))
        shortlist = np.argsort(distance_P, kind="stable")[:SHORTLIST]
        distances = [_distance(scorer, response, unique[i], ids) for i in shortlist]
        found.append(joined(response, unique[shortlist[int(np.argmin(distances))]], ids))
        seen(1)
    return found, f"Each response's prompt was found among {len(unique)} by the numbers of its first {TRIED} tokens."


def _ids(response: Response) -> list[int]:
    if response.token_T is None:
        raise StudyError(f"row {response.number}: has no token ids, which a prompt from a file needs")
    ids: list[int] = response.token_T.tolist()
    return ids


def _distance(scorer: Scorer, response: Response, prompt: Sequence[int], ids: Sequence[int]) -> float:
    count = min(TRIED, len(ids))
    inputs = Inputs((*prompt, *ids[:count]), len(prompt) + np.arange(count), len(prompt))
    rows = scorer.rows([inputs])
    assert rows is not None
    logp_T = rows.logprobs().numpy()
    sides = (response.trainer_T[:count], response.sampler_T[:count])
    return float(min(np.nanmedian(np.abs(side_T - logp_T)) for side_T in sides))

"""Prompts from a file of their own: one a row, or a set in which each response's prompt is found by the numbers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from tailrl.artifacts.files import parse_object, read_text
from tailrl.artifacts.metrics import FloatArray
from tailrl.explanation.inputs import Inputs
from tailrl.explanation.scorer import Scorer, first_logprobs
from tailrl.explanation.sequences import Response, Scored, encode, joined
from tailrl.runtime.errors import StudyError

TRIED = 16  # a response's prompt is found by so many of its first tokens
SHORTLIST = 4  # the first token alone picks so many prompts, which are then tried
AROUND = 16  # prompts before and after a response's own one, in the log's order, that may have been read instead
OTHERS = 8  # of these the first token picks so many


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
    unique, first = list(dict.fromkeys(prompts)), First(scorer)
    found = []
    for response in responses:
        ids, columns = _ids(response), (response.trainer_T, response.sampler_T)
        found.append(joined(response, nearest(first, ids, columns, unique, SHORTLIST), ids))
        seen(1)
    return found, f"Each response's prompt was found among {len(unique)} by the numbers of its first {TRIED} tokens."


class First:
    """Log-probs of the first token after each prompt, computed once."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer
        self._logprobs: dict[tuple[int, ...], Tensor] = {}

    def logprob(self, prompt: tuple[int, ...], token: int) -> float:
        """Of a token after a prompt, nats."""
        if prompt not in self._logprobs:
            self._logprobs[prompt] = first_logprobs(self.scorer, prompt)
        return self._logprobs[prompt][token].item()


def nearest(
    first: First,
    ids: Sequence[int],
    columns: Sequence[FloatArray],
    prompts: Sequence[tuple[int, ...]],
    shortlist: int,
) -> tuple[int, ...]:
    """The prompt after which the model's numbers are nearest to one of the columns, by the response's first tokens.

    Args:
        first: the model's numbers of first tokens.
        ids: of the response.
        columns: logged numbers of all its tokens, nats.
        prompts: among which it is looked for.
        shortlist: so many are tried, the best by the first token.
    """
    apart = [min(abs(first.logprob(prompt, ids[0]) - column_T[0]) for column_T in columns) for prompt in prompts]
    best = [prompts[place] for place in np.argsort(apart, kind="stable")[:shortlist]]
    return min(best, key=lambda prompt: _distance(first.scorer, prompt, ids, columns))


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
    first, place = First(scorer), {prompt: number for number, prompt in enumerate(prompts)}
    found: list[Scored] = []
    for one in chosen:
        own = place[one.inputs.prompt]
        around = dict.fromkeys(prompts[(own + step) % len(prompts)] for step in range(-AROUND, AROUND + 1))
        column_T = getattr(one.response, f"{side}_T")
        prompt = nearest(first, one.inputs.ids[one.inputs.first :], (column_T,), list(around), OTHERS)
        found.append(replace(one, inputs=replace(one.inputs, elsewhere=prompt)))
        if len(found) == fewest and all(same.inputs.elsewhere == same.inputs.prompt for same in found):
            return []
    return found


def _ids(response: Response) -> list[int]:
    if response.token_T is None:
        raise StudyError(f"row {response.number}: has no token ids, which a prompt from a file needs")
    ids: list[int] = response.token_T.tolist()
    return ids


def _distance(scorer: Scorer, prompt: Sequence[int], ids: Sequence[int], columns: Sequence[FloatArray]) -> float:
    count = min(TRIED, len(ids))
    inputs = Inputs((*prompt, *ids[:count]), len(prompt) + np.arange(count), len(prompt))
    rows = scorer.rows([inputs])
    assert rows is not None
    logp_T = rows.logprobs().numpy()
    return float(min(np.nanmedian(np.abs(column_T[:count] - logp_T)) for column_T in columns))

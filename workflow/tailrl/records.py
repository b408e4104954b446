"""The records that travel through one step. Shapes are in the names: T response tokens, N sequences."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tailrl.errors import StudyError, one_line, reason

COMPARED = ("math", "text")
"""How an answer may be compared: as a number or formula, or as text; `tailrl.tasks.scoring` does it."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One verifiable problem: its prompt as the policy reads it, its answer and how that is compared, and, where the
    task makes worked solutions, one (what a warm start learns from)."""

    id: str
    prompt: str
    answer: str
    solution: str = ""
    compared: str = "math"


@dataclass(frozen=True, slots=True)
class Request:
    """One response to sample.

    Attributes:
        prompt_tokens: token ids.
        seed: of the response's own random stream.
        threshold: the number of the safe set's rule for this response (ln ρ, k or p).
        start: tokens of the response that are there already, at the end of `prompt_tokens`: the first one to be
            sampled stands at this place of the response.
    """

    prompt_tokens: tuple[int, ...]
    seed: int
    threshold: float = 0.0
    start: int = 0


@dataclass(frozen=True, slots=True)
class Rollout:
    """What the sampling engine did for one request.

    Attributes:
        prompt_tokens: the prompt, token ids.
        tokens: the response, token ids, T of them, with the end token where one was sampled.
        logp_infer_T: float32, nats: log π'^mp of each sampled token under the *masked, renormalised*
            distribution it was drawn from. The unmasked log π_infer is `logp_infer_T + log_kept_infer_T`.
        log_kept_infer_T: float32, nats: log Z', the engine's probability mass inside its safe set.
        kept_vocab_infer_T: int32: |V'_S|, the number of tokens in the engine's safe set.
        stopped: whether the response ended with the end token (False: cut at the length limit).
        logits_infer_KV: float32 [V] for each kept place (`rollout.is_kept`), in order: the logits that its token was
            drawn from, after temperature and disturbance, before any mask. None where no place is to be kept.
    """

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    logp_infer_T: NDArray[np.float32]
    log_kept_infer_T: NDArray[np.float32]
    kept_vocab_infer_T: NDArray[np.int32]
    stopped: bool
    logits_infer_KV: tuple[NDArray[np.float32], ...] = ()


def write_problems(problems: Iterable[Problem], path: Path) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for problem in problems:
            file.write(json.dumps(asdict(problem), ensure_ascii=False) + "\n")


def read_problems(path: Path) -> list[Problem]:
    """The problems of a JSONL file; raises StudyError naming the file and line that cannot be used."""
    problems = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                try:
                    problem = Problem(**json.loads(line))
                    if not all(isinstance(value, str) for value in asdict(problem).values()):
                        raise TypeError("every field must be text")
                    if not problem.prompt:
                        raise ValueError("its prompt is empty")
                    if problem.compared not in COMPARED:
                        raise ValueError(f"compared must be one of {', '.join(COMPARED)}")
                    "".join(asdict(problem).values()).encode()  # half a character is JSON, but no tokenizer reads it
                    problems.append(problem)
                except (TypeError, ValueError, RecursionError) as error:
                    raise StudyError(f"{path}, line {number}: not a problem: {one_line(error)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise StudyError(f"{path}: cannot be read: {reason(error)}") from None
    if not problems:
        raise StudyError(f"{path}: holds no problem")
    return problems

"""The one rule that scores a response, whatever the task; and rewards of a user's own."""

import atexit
import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cache
from typing import Any

from tailrl.runtime.errors import ConfigurationError, one_line, say
from tailrl.runtime.import_path import called, imported, is_import_path
from tailrl.tasks.answers import integer, last_boxed
from tailrl.tasks.loaded import canonical
from tailrl.tasks.problem import Problem
from tailrl.tasks.verifier import MathVerifier
from tailrl.tasks.word_list import WORDS


def score(response: str, answer: str, compared: str = "math") -> float:
    r"""1.0 if the last `\boxed{}` of the response holds the answer, else 0.0.

    Args:
        response: as the policy wrote it.
        answer: the right one.
        compared: how the two are, a key of `SAME`.
    """
    boxed = last_boxed(response)
    return float(boxed is not None and SAME[compared](boxed, answer))


def reward_of(response: str, problem: Problem) -> float:
    """The reward of a response: 1 for the right answer, else 0; or what the problem's own reward gives.

    A reward of one's own is `reward(prompt, response, row)`, where row has the problem's fields. Two others are taken
    as they are: verl's `compute_score(data_source, solution_str, ground_truth, extra_info)`, which may give a mapping
    with `score`, and TRL's `reward(prompts, completions, **columns)`, which gives a list.

    Raises:
        StudyError: a reward of one's own fails, or gives no number from 0 to 1: in these a run's collapse is told.
    """
    path = problem.compared
    if not is_import_path(path):
        return score(response, problem.answer, path)
    row = {name: value for name, value in asdict(problem).items() if name != "compared"}
    parameters = inspect.signature(imported(path)).parameters
    if "solution_str" in parameters:
        verl = {"data_source": "tailrl", "solution_str": response, "ground_truth": problem.answer, "extra_info": row}
        value = called(path, **_taken(parameters, verl))
    elif "completions" in parameters:
        columns = {name: [given] for name, given in row.items() if name != "prompt"}
        value = called(path, prompts=[row["prompt"]], completions=[response], **_taken(parameters, columns))
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
    else:
        value = called(path, problem.prompt, response, row)
    value = value.get("score") if isinstance(value, dict) else value
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigurationError(
            f"{path}: problem {problem.id}: the reward must be a number from 0 to 1, not {one_line(repr(value))}"
        )
    return float(value)


def _taken(parameters: Mapping[str, inspect.Parameter], named: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arguments that a function with these parameters takes."""
    every = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return {name: value for name, value in named.items() if every or name in parameters}


def same_math(boxed: str, answer: str) -> bool:
    """Whether both are the same number or formula to math-verify, however each is spelled.

    Two written integers are compared here: the same verdict without math-verify. Its worker process starts at the first
    other pair and lives as long as this process. docs/how-to/answers.md says where a score differs.
    """
    gold, number = integer(answer), integer(boxed)
    if gold is not None and number is not None:
        return gold == number
    return _verifier().equal(boxed, answer)


def same_integer(boxed: str, answer: str) -> bool:
    """Whether both are written integers, and the same.

    For questions that are sums themselves: to math-verify a copied question is its own answer.
    """
    number = integer(boxed)
    return number is not None and number == integer(answer)


def same_text(boxed: str, answer: str) -> bool:
    """Whether both are the same text, up to white space and Unicode's composed forms."""
    return canonical(boxed) == canonical(answer)


def has_initials(boxed: str, answer: str) -> bool:
    """Whether the text is different words of the list, one for each letter of the answer, with it as their initial."""
    words = boxed.split()
    return [word[0] for word in words] == answer.split() and len(set(words)) == len(words) and _LISTED.issuperset(words)


_LISTED = frozenset(WORDS)

SAME: dict[str, Callable[[str, str], bool]] = {
    "math": same_math,
    "integer": same_integer,
    "text": same_text,
    "initials": has_initials,
}


@cache
def _verifier() -> MathVerifier:
    verifier = MathVerifier()
    atexit.register(_close, verifier)
    return verifier


def _close(verifier: MathVerifier) -> None:
    """End the worker, and say how many answers were scored 0 because it came to no verdict."""
    verifier.close()
    if verifier.timeouts or verifier.crashes:
        say(
            f"math-verify came to no verdict on {verifier.timeouts + verifier.crashes} answers, which count as wrong: "
            f"{verifier.timeouts} took too long, {verifier.crashes} ended its process"
        )

"""The one rule that scores a response, whatever the task."""

import atexit
from collections.abc import Callable
from functools import cache

from tailrl.runtime.errors import say
from tailrl.tasks.answers import integer, last_boxed
from tailrl.tasks.loaded import canonical
from tailrl.tasks.verifier import MathVerifier


def score(response: str, answer: str, compared: str = "math") -> float:
    r"""1.0 if the last `\boxed{}` of the response holds the answer, else 0.0.

    Args:
        response: as the policy wrote it.
        answer: the right one.
        compared: how the two are, a key of `SAME`.
    """
    boxed = last_boxed(response)
    return float(boxed is not None and SAME[compared](boxed, answer))


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


SAME: dict[str, Callable[[str, str], bool]] = {"math": same_math, "integer": same_integer, "text": same_text}


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

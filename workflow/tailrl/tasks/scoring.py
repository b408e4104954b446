"""The one rule that scores a response, whatever the task."""

import atexit
import sys
from functools import cache

from tailrl.tasks.answers import boxed_integer, integer, last_boxed
from tailrl.tasks.verifier import MathVerifier


def score(response: str, answer: str) -> float:
    r"""1.0 where the last `\boxed{}` of the response holds the answer, else 0.0.

    Integers are compared here. Any other answer goes to math-verify, whose worker process starts at the first one
    and lives as long as this process.
    """
    gold = integer(answer)
    if gold is not None:
        return float(boxed_integer(response) == gold)
    boxed = last_boxed(response)
    return float(boxed is not None and _verifier().equal(boxed, answer))


@cache
def _verifier() -> MathVerifier:
    verifier = MathVerifier()
    atexit.register(_close, verifier)
    return verifier


def _close(verifier: MathVerifier) -> None:
    """End the worker, and say how many answers were scored 0 because it came to no verdict."""
    verifier.close()
    if verifier.timeouts or verifier.crashes:
        print(
            f"tailrl: math-verify came to no verdict on {verifier.timeouts + verifier.crashes} answers, which count as "
            f"wrong: {verifier.timeouts} took too long, {verifier.crashes} ended its process",
            file=sys.stderr,
        )

"""The worker of `tailrl.tasks.verifier`: a script that imports math-verify and nothing of ours.

    python -P math_verify_worker.py <memory limit, bytes> <seconds a pair may take>

It writes "ready" (or why it is not), then reads one JSON pair [gold, answer] a line and replies with one JSON
word: equal, different or unparsed. Its caller kills it when it is late.
"""

import json
import logging
import math
import os
import resource
import signal
import sys

DEGREES = r"^\circ"  # math-verify does not read the sign itself


def compare(gold: str, answer: str) -> str:
    """`equal`, `different` or `unparsed`, for two LaTeX answers without their box."""
    from math_verify import parse, verify
    from math_verify.parser import LatexExtractionConfig

    # LaTeX only: math-verify's other reader hands plain text to sympy's parse_expr, which evaluates it as Python.
    config = [LatexExtractionConfig(boxed_match_priority=0)]
    boxes = (rf"\boxed{{{text.replace('°', DEGREES)}}}" for text in (gold, answer))
    gold_parsed, answer_parsed = (parse(box, config, parsing_timeout=None) for box in boxes)
    if not gold_parsed or not answer_parsed:
        return "unparsed"
    return "equal" if verify(gold_parsed, answer_parsed, timeout_seconds=None) else "different"


def limit(kind: int, most: int) -> None:
    """Limit a resource of this process; a lower limit that is already set stays."""
    _, allowed = resource.getrlimit(kind)
    most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
    resource.setrlimit(kind, (most, most))


def limit_to_comparing() -> None:
    """From here on no file can be written and no memory dumped, and only root can start a process or thread."""
    for kind in (resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        limit(kind, 0)


def main(memory_bytes: int, timeout: float) -> None:
    """Serve pairs until the caller closes our input."""
    limit(resource.RLIMIT_AS, memory_bytes)
    # Replies go to a copy of standard output: what a library prints must not be read as a reply.
    replies = os.fdopen(os.dup(1), "w", encoding="ascii", buffering=1)
    os.dup2(2, 1)
    try:
        compare("1", "1")
    except Exception as error:
        replies.write(json.dumps(f"{type(error).__name__}: {error}") + "\n")
        return
    logging.disable()
    limit_to_comparing()
    replies.write(json.dumps("ready") + "\n")
    for line in sys.stdin:
        # Nobody kills a worker whose caller was itself killed: without a handler this signal ends the process.
        signal.alarm(math.ceil(timeout) + 1)
        reply = compare(*json.loads(line))
        signal.alarm(0)
        replies.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))

"""The exception that a user reads: one sentence that names what is wrong and where."""

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LONGEST = 300
"""Characters of a value or of another library's message that a sentence quotes."""

SHORTEST_SECRET = 8
"""Characters; a shorter value is no secret, and would occur in any sentence."""

_SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)$")


LIMITS = {errno.EFBIG: "ulimit -f", errno.EMFILE: "ulimit -n"}
"""The shell's names of limits, which the system's words leave out."""


class StudyError(Exception):
    """Bad input or an impossible request; the command line prints it without a traceback and exits 1."""


class NumericalError(StudyError):
    """A NaN or Inf in log-probs, loss or gradient: the update is skipped, and the run goes on for a while."""


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Around a block that writes a file: raises StudyError, which names the file, if the disk is full or refuses."""
    try:
        yield
    except OSError as error:
        raise StudyError(f"{file}: could not be written: {reason(error)}") from None


def say(sentence: str) -> None:
    """Print a sentence for the user on stderr."""
    print(f"tailrl: {sentence}", file=sys.stderr, flush=True)


def one_line(text: object) -> str:
    """The text on one line, without its middle if it is longer than LONGEST characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"


def reason(error: Exception) -> str:
    """An exception's message on one line: a system error's words, or the type of an exception without a message.

    Another library may quote its input: the values of the environment's keys and tokens are masked.
    """
    words = str(error.strerror if isinstance(error, OSError) and error.strerror else error)
    if isinstance(error, OSError) and error.errno in LIMITS:
        words += f" ({LIMITS[error.errno]})"
    for name, value in os.environ.items():
        if len(value) >= SHORTEST_SECRET and _SECRET.search(name):
            words = words.replace(value, f"${name}")
    return one_line(words) or type(error).__name__

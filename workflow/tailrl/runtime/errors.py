"""The exception that a user reads: one sentence that names what is wrong and where."""

import errno
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote, unquote

LONGEST = 300
"""Characters of a value or of another library's message that a sentence quotes."""

SHORTEST_SECRET = 8
"""Characters; a shorter value is no secret, and would occur in any sentence."""

_SECRET = re.compile(
    r"(key|token|secret|passw(or)?d|passphrase|pass|(?<=_)pwd|credential|auth)s?(?![a-z])", re.IGNORECASE
)
"""Within the name of a variable: API_KEY_2, hf_token, AWS_ACCESS_KEY_ID; not TOKENIZERS_PARALLELISM or PWD."""
_USER = re.compile(r"://([^/?#\s$]+)@")
"""The credentials in a URL."""

LIMITS = {errno.EFBIG: "ulimit -f", errno.EMFILE: "ulimit -n"}
"""The shell's names of limits, which the system's words leave out."""


class StudyError(Exception):
    """Bad input or an impossible request; the command line prints it without a traceback and exits 1."""


class ConfigurationError(StudyError):
    """Settings, options or arguments that are wrong, or that this machine or environment cannot do."""


class DataError(StudyError):
    """What a file or a table holds cannot be used: a log, problems, a job's results."""


class ModelError(StudyError):
    """A policy, its tokenizer or an engine cannot be used, or does not compute what it must."""


class StorageError(StudyError):
    """A file is missing or damaged, or the disk refuses it."""


class NumericalError(ModelError):
    """A NaN or Inf in log-probs, loss or gradient: the update is skipped, and the run goes on for a while."""


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Around a block that writes a file: raises StorageError, which names the file, if the disk is full or refuses."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{file}: could not be written: {reason(error)}") from None


def say(sentence: str) -> None:
    """Print a sentence for the user on stderr, on one line."""
    print(f"tailrl: {printable(sentence)}", file=sys.stderr, flush=True)


def printable(sentence: str) -> str:
    """The sentence with line feeds and other control characters, which a file's name may hold, written as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in sentence)


def one_line(text: object) -> str:
    """The text on one line, without its middle if it is longer than LONGEST characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"


def few(names: Sequence[str], most: int = 4) -> str:
    """The first names, and how many more there are."""
    rest = [f"{len(names) - most} more"] if len(names) > most else []
    return " and ".join([", ".join(names[:most]), *rest])


def reason(error: Exception) -> str:
    """An exception's message on one line: a system error's words, or the type of an exception without a message.

    Another library may quote its input, which is `masked`.
    """
    words = str(error.strerror if isinstance(error, OSError) and error.strerror else error)
    if isinstance(error, OSError) and error.errno in LIMITS:
        words += f" ({LIMITS[error.errno]})"
    return one_line(masked(words)) or type(error).__name__


def masked(text: str) -> str:
    """The text without the secrets of the environment, plain or percent-encoded, and without credentials in URLs.

    A variable's secret is its value, where its name says so, and the credentials in a URL.
    """
    secrets: dict[str, str] = {}
    for name, value in os.environ.items():
        if _SECRET.search(name):
            secrets[value] = name
        for found in _USER.finditer(value):
            secrets |= dict.fromkeys([found[1], *found[1].split(":")], name)
    forms = {
        form: name for value, name in secrets.items() for form in (value, unquote(value), quote(unquote(value), ""))
    }
    for form in sorted(forms, key=len, reverse=True):  # one may be part of another
        if len(form) >= SHORTEST_SECRET:
            shown = f"${forms[form]}".replace("\\", "\\\\")
            text = re.sub(re.escape(form), shown, text, flags=re.IGNORECASE)
    return _USER.sub("://***@", text)

"""A tokenizer tried in a process of its own, which can be killed: a template, pattern or replacement may never end.

    python -P -m tailrl.model.tokenizer_trial <folder or name on the hub> <seconds>

writes "ready" once it has imported what it needs, then what is wrong, or nothing.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

from tailrl.runtime.errors import ModelError, reason
from tailrl.tasks.math_verify_worker import limit
from tailrl.tasks.verifier import reply_of

SECONDS = 9.0
"""Most processor time that loading, encoding and decoding may take. Qwen's tokenizer, of 151,643 tokens, takes 2.4 s.
Where twenty processes share two cores, the same 2.4 s are two minutes on a clock, so no clock measures a tokenizer."""

WAIT = 1800.0
"""Seconds on a clock after which a trial that takes no processor time has failed; as many for the imports before it."""

MEMORY_BYTES = 2 << 30
"""Most that they may take beyond what the process has once it can begin."""

RUN = 2000
"""Characters of each run in the text: long enough for a pattern that backtracks, short enough for any other."""

TEXT = " ".join(
    (*map(chr, range(33, 127)), "naïve Ωμέγα 漢字 \U0001f600", r"\boxed{17}", *(c * RUN + "!" for c in "a0 1.\n"))
)


def try_tokenizer(path: str) -> None:
    """Raises StudyError where the tokenizer cannot be read, or does not encode and decode a text within the limits."""
    with subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, path, str(SECONDS)],
        bufsize=0,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        slow = f"{path}: its tokenizer and chat template did not encode and decode a text within"
        try:
            reply_of(process, WAIT)
            wrong = reply_of(process, WAIT)
        except TimeoutError:
            wrong = f"{slow} {WAIT:g} s"
        except EOFError:
            wrong = f"{path}: its tokenizer or chat template needs more than {MEMORY_BYTES >> 30} GiB for a short text"
            if process.wait() == -signal.SIGPROF:
                wrong = f"{slow} {SECONDS:g} s of processor time"
        finally:
            process.kill()
    if wrong:
        raise ModelError(wrong)


def _trial(path: str) -> str:
    """What is wrong with the tokenizer; empty where nothing is."""
    from tailrl.model.policy import encode_prompt, load_tokenizer

    try:
        tokenizer = load_tokenizer(path)
        tokenizer.decode(encode_prompt(tokenizer, TEXT))
        tokenizer.batch_decode([[token] for token in range(len(tokenizer))], skip_special_tokens=True)
    except ModelError as error:
        return str(error)
    except Exception as error:
        return f"{path}: its tokenizer cannot decode: {reason(error)}"
    return ""


def main(path: str, seconds: float) -> None:
    """Try one tokenizer within so much processor time, in seconds, and say what is wrong on standard output."""
    import tailrl.model.policy  # noqa: F401 - before the limits

    # Replies go to a copy of standard output: what a library prints must not be read as a reply.
    replies = os.fdopen(os.dup(1), "w", encoding="ascii", buffering=1)
    os.dup2(2, 1)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit(resource.RLIMIT_AS, pages * resource.getpagesize() + MEMORY_BYTES)
    limit(resource.RLIMIT_CORE, 0)
    replies.write(json.dumps("ready") + "\n")
    signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
    replies.write(json.dumps(_trial(path)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))

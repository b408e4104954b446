"""Whether a damaged input is taken well: accepted, or refused in one sentence, soon and in little memory."""

import gc
import resource
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from kinds import Case, Kind

from tailrl.runtime.errors import StudyError

SECONDS, GIB = 10.0, 1 << 30
"""Most seconds of the processor that one input may take, and most bytes by which the process may grow."""

LONGEST = 5000
"""Most characters of a sentence: more is a wall."""

OUT_OF_MEMORY = ("memoryerror", "allocate memory", "unable to allocate", "not enough memory", "out of memory")
"""Words of libraries whose errors a reader puts into its sentence."""

SHRINKS, LONG = 300, 100_000
"""Most tries to make a failing content smaller, and bytes of one that is left as it is."""


class TooLongError(BaseException):
    """No Exception, for a reader may catch those."""


@dataclass(frozen=True)
class Finding:
    """What went wrong with a case; `place` is the same for all cases of one fault."""

    place: str
    words: str


@contextmanager
def limited() -> Iterator[None]:
    """Inside it, the process may grow by a GiB, and what `judge` times ends with an error."""

    def stop(_: int, __: FrameType | None) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGPROF, stop)
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + GIB, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        signal.signal(signal.SIGPROF, before)


def judge(kind: Kind, folder: Path, case: Case, seconds: float = SECONDS) -> Finding | bool:
    """Reads the folder with the damaged file in it, and puts it right again: a finding, or whether it was accepted."""
    file = folder / case[0]
    before = {path: path.read_bytes() for path in [file, *file.parent.glob("*manifest.json")] if path.is_file()}
    file.write_bytes(case[1])
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        kind.read(folder, case[0])
        return True
    except StudyError as error:
        return _of_sentence(str(error), folder) or False
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "/tailrl/" in frame.filename] or frames
        place = "" if isinstance(error, TooLongError | MemoryError) else f" in {Path(frames[-1].filename).name}"
        last = f"{Path(ours[-1].filename).name}:{ours[-1].name}"
        return Finding(f"{type(error).__name__} at {last}{place}", "".join(traceback.format_exception(error))[-3000:])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        file.unlink(missing_ok=True)
        for path, content in before.items():
            path.write_bytes(content)


def _of_sentence(sentence: str, folder: Path) -> Finding | None:
    lowered = sentence.lower()
    if len(sentence.splitlines()) != 1:
        return Finding("more than one line", sentence)
    if len(sentence) > LONGEST:
        return Finding("a wall of words", sentence[:LONGEST])
    if any(words in lowered for words in OUT_OF_MEMORY):
        return Finding("asked for more than a GiB", sentence)
    if "Traceback" in sentence or str(folder) not in sentence:
        return Finding("does not say where", sentence)
    return None


def shrunk(kind: Kind, folder: Path, case: Case, place: str) -> bytes:
    """The case's content, without pieces that it fails without too; whole where it is long, or takes long to fail."""
    name, content = case
    size, tries = len(content) // 2, 0
    if "TooLong" in place or len(content) > LONG:
        return content
    while size and tries < SHRINKS:
        begin = 0
        while begin < len(content) and tries < SHRINKS:
            tries += 1
            smaller = content[:begin] + content[begin + size :]
            judged = judge(kind, folder, (name, smaller))
            if isinstance(judged, Finding) and judged.place == place:
                content = smaller
            else:
                begin += size
        size //= 2
    return content

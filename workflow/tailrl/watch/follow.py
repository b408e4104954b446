"""`tailrl watch`: follows a training's logs, and says of each step what is wrong."""

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tailrl.page_parts.number_text import short
from tailrl.runtime.errors import StudyError, say
from tailrl.watch.alarms import MOST_STEPS, Alarm, Alarms, Step, numbers_of
from tailrl.watch.files import Folder, Item, Metrics, Tokens
from tailrl.watch.table import TokenTable, reply_digests

QUIET, ALARMED, NOTHING = 0, 1, 2  # exit codes
RESTART = 2  # steps by which a log goes back where the run was started again; rows of nearer steps are late
SAME_RESPONSES = 4  # responses that a part of a file needs to be told as a second copy of another file's


@dataclass
class Open:
    """A step that may still grow; `look`: the number of the look that added to it last."""

    table: TokenTable = field(default_factory=TokenTable)
    numbers: dict[str, float] = field(default_factory=dict)
    digest: str = ""
    not_finite: str = ""
    look: int = 0
    held: dict[Path, set[int]] = field(default_factory=dict)

    def add(self, item: Item, look: int) -> None:
        """Adds responses or metrics. A file with the responses of another file again is left out."""
        self.look = look
        self.digest = item.digest or self.digest
        if isinstance(item, Metrics):
            self.numbers |= item.numbers
            self.not_finite = item.not_finite or self.not_finite
            return
        replies = reply_digests(item.log)
        others = [held for file, held in self.held.items() if file != item.file]
        if len(replies) >= SAME_RESPONSES and any(set(replies) <= held for held in others):
            return
        self.held.setdefault(item.file, set()).update(replies)
        self.table.add(item.log, item.prompt_S)

    def has(self, item: Item) -> bool:
        """Whether all that the item says is known of the step."""
        if isinstance(item, Metrics):
            return all(self.numbers.get(name) == value for name, value in item.numbers.items())
        known = set[int]().union(*self.held.values())
        return set(reply_digests(item.log)) <= known

    def as_step(self, number: float) -> Step:
        """The step's numbers: those of the tokens, and of the metrics where tokens do not say."""
        step = self.table.as_step(number) if self.table.responses else Step(number)
        absent: dict[str, Any] = {name: v for name, v in self.numbers.items() if math.isnan(getattr(step, name))}
        return replace(step, **absent, digest=self.digest or step.digest, not_finite=self.not_finite)


@dataclass(frozen=True, slots=True)
class Judged:
    """A step with its alarms."""

    step: Step
    alarms: tuple[Alarm, ...]


class Watch:
    """Follows the logs in a folder; `look` gives the steps that are whole since the last look, with their alarms.

    A step is whole when a later one has begun and nothing came to it in the last look, or when all is over.
    """

    def __init__(self, path: Path, exact: bool = False, without: tuple[str, ...] = ()) -> None:
        """`exact`, `without`: see `Alarms`. Raises StudyError where there is nothing at this path."""
        self.folder = Folder(path)
        self.make: Callable[[], Alarms] = lambda: Alarms(exact, without)
        self.alarms = self.make()
        self.open: dict[float, Open] = {}
        self.done = -math.inf
        self.looks = 0
        self.late = 0
        self.read: set[Path] = set()
        self.judged: dict[float, Open] = {}

    def look(self, whole: bool = False) -> Iterator[Judged]:
        """Reads what is new. `whole`: all is over, so every step is whole."""
        self.looks += 1
        for item in self.folder.look(whole):
            if item.step <= self.done and not self._again(item):
                continue
            if item.step <= self.done:
                yield from self._restart(item.step)
            self.read.add(item.file)
            self.open.setdefault(item.step, Open()).add(item, self.looks)
        newest = max(self.open, default=-math.inf)
        ready = [
            n for n, one in self.open.items() if whole or (n < newest and one.look < self.looks) or n + 2 <= newest
        ]
        for number in sorted(ready):
            yield self._judge(number)

    def _judge(self, number: float) -> Judged:
        self.judged[number] = self.open.pop(number)
        self.done = max(self.done, number)
        step = self.judged[number].as_step(number)
        while len(self.judged) > MOST_STEPS:
            del self.judged[min(self.judged)]
        return Judged(step, tuple(self.alarms.step(step)))

    def _again(self, item: Item) -> bool:
        """Whether an item of a step that was judged says that the run was started again.

        A copy, as of a finished run's files, does not, and neither does a row that comes late.
        """
        before = self.judged.get(item.step)
        if before is None:
            return item.file in self.read
        if before.has(item):
            return False
        if self.done - item.step >= RESTART:
            return True
        if isinstance(item, Tokens):
            if not self.late:
                say(f"{item.file}: rows of step {item.step:g} came after it was judged, and are left out")
            self.late += len(item.log.start_S)
        return False

    def _restart(self, step: float) -> Iterator[Judged]:
        for number in sorted(self.open):
            yield self._judge(number)
        say(f"the log goes back to step {step:g}: the run was started again, and the alarms begin anew")
        self.alarms, self.done = self.make(), -math.inf
        self.judged.clear()


def watch(
    path: Path,
    once: bool = False,
    as_json: bool = False,
    seconds: float = 2.0,
    idle: float = math.inf,
    stop: bool = False,
    exact: bool = False,
    without: tuple[str, ...] = (),
    show: Callable[[str], object] = print,
) -> int:
    """Follow the logs and show each step and alarm; returns the exit code.

    Args:
        path: the folder or file of a running training's logs.
        once: read what is there, judge every step, and end.
        as_json: a line of JSON a step in place of text.
        seconds: between two looks.
        idle: ends where nothing new was seen for so many seconds; Ctrl-C ends too.
        stop: ends at the first step with an alarm.
        exact: see `Alarms`.
        without: see `Alarms`.
        show: takes each line.

    Returns:
        QUIET; ALARMED if any step had an alarm; NOTHING if no step was found, or no file.
    """
    try:
        following = Watch(path, exact, without)
    except StudyError as error:
        say(str(error))
        return NOTHING
    steps, alarmed, raised = 0, 0, set[str]()
    heard, over = time.monotonic(), once
    with _until_interrupted() as asked:
        while True:
            for judged in following.look(over):
                heard = time.monotonic()
                steps += 1
                alarmed += bool(judged.alarms)
                for line in json_lines(judged) if as_json else text_lines(judged, raised):
                    show(line)
                raised = {alarm.name for alarm in judged.alarms}
                if stop and judged.alarms:
                    return ALARMED
            if over:
                break
            over = asked.wait(seconds) or time.monotonic() - heard > idle
    if not steps:
        if once:
            say(f"{path}: holds no step: no tokens with both sides' log-probs, and no metrics over steps")
        return NOTHING
    return ALARMED if alarmed else QUIET


@contextmanager
def _until_interrupted() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets, so that no look is cut off: a last one judges the steps that are left."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.signal(signal.SIGINT, lambda *_: asked.set())
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def json_lines(judged: Judged) -> Iterator[str]:
    """One line: the step's numbers and its alarms."""
    alarms = [{"name": alarm.name, "says": alarm.says, "do": alarm.do} for alarm in judged.alarms]
    yield json.dumps({"step": judged.step.number, **numbers_of(judged.step), "alarms": alarms}, ensure_ascii=False)


SHOWN = {
    "responses": "responses", "lag": "lag", "mean_abs": "mean |Δ|", "level": "level", "k3": "k3", "ess": "ess",
    "reward": "reward", "learning_rate": "rate",
}  # fmt: skip


def text_lines(judged: Judged, before: set[str]) -> Iterator[str]:
    """A line for the step, and one for each alarm; what to do is said where the step before had not the alarm."""
    step = judged.step
    known = {words: getattr(step, name) for name, words in SHOWN.items()}
    shown = [f"{words} {short(value)}" for words, value in known.items() if not math.isnan(value)]
    yield "  ".join([f"step {step.number:g}", *shown, "" if judged.alarms else "ok"]).rstrip()
    for alarm in judged.alarms:
        yield f"  ALARM {alarm.name}: {alarm.says}." + ("" if alarm.name in before else f" {alarm.do}")

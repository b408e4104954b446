"""What a log held that was not read: rows, files and copies, counted by reason, in a few sentences."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tailrl.runtime.errors import DataError, StudyError, few, printable


class RowError(DataError):
    """A row that cannot be read; `reason` is the same for all rows with this fault.

    `framework` names whose file it is where the columns tell.
    """

    def __init__(self, reason: str, sentence: str, framework: str = "") -> None:
        super().__init__(sentence)
        self.reason = reason
        self.framework = framework


class DamagedError(DataError):
    """A file that cannot be read on from some place; what came before is sound."""


@dataclass
class LeftOut:
    """What was left out while a log was read.

    Attributes:
        rows: the rows that were looked at.
        empty: the responses that have no token, or whose tokens are all masked.
        reasons: the left out rows by reason. first: the sentence on the first row of each reason.
        framework: whose rows they are, by reason, where it is told.
        notes: what was taken in another way than a format has it, with its rows.
        files: the files that gave nothing, each with its sentence. folders: those that were looked into.
        damaged: a sentence on each file that was read up to some place only.
        copied: for each file the responses that an earlier file has too.
    """

    rows: int = 0
    empty: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    framework: dict[str, str] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    files: dict[Path, StudyError] = field(default_factory=dict)
    folders: list[Path] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    copied: Counter[Path] = field(default_factory=Counter)

    def row(self, error: StudyError) -> None:
        """Counts a row that is left out."""
        self.rows += 1
        reason = error.reason if isinstance(error, RowError) else str(error)
        self.reasons[reason] += 1
        self.first.setdefault(reason, str(error))
        if isinstance(error, RowError):
            self.framework.setdefault(reason, error.framework)

    def add(self, other: "LeftOut") -> None:
        """Adds what was left out of one file."""
        self.rows += other.rows
        self.empty += other.empty
        self.reasons.update(other.reasons)
        self.notes.update(other.notes)
        self.first = {**other.first, **self.first}

    def only_reason(self, file: Path) -> StudyError:
        """Why a file gave no sequence: the first row's reason."""
        for reason, sentence in self.first.items():
            return RowError(reason, sentence, self.framework.get(reason, ""))
        if self.empty:
            return DataError(f"{file}: holds no sequence with a response: its mask or length leaves no token")
        return DataError(f"{file}: holds no sequence with a response")

    def sentences(self) -> tuple[str, ...]:
        """One sentence on each reason."""
        said = [
            f"{count:,} of {self.rows:,} rows {'is' if count == 1 else 'are'} left out: {reason}. "
            f"The first: {self.first[reason]}."
            for reason, count in self.reasons.most_common()
        ]
        said += [f"In {count:,} of {self.rows:,} rows {note}." for note, count in self.notes.most_common()]
        if self.empty:
            are = "response has" if self.empty == 1 else "responses have"
            said.append(f"{self.empty:,} {are} no token that counts.")
        said += [f"{sentence}. What came before was read." for sentence in self.damaged]
        unreadable = [file for file, error in self.files.items() if isinstance(error, DamagedError)]
        no_logs = [file for file in self.files if file not in unreadable]
        if no_logs:
            are = (
                "file is left out, for it is no log"
                if len(no_logs) == 1
                else "files are left out, for they are no logs"
            )
            said.append(f"{len(no_logs):,} {are}: {self._names(no_logs)}.")
        if unreadable:
            are = "file is" if len(unreadable) == 1 else "files are"
            said.append(
                f"{len(unreadable):,} {are} left out that cannot be read: {self._names(unreadable)}. The first: "
                f"{self.files[unreadable[0]]}."
            )
        if self.copied:
            count = sum(self.copied.values())
            said.append(
                f"{count:,} {'response' if count == 1 else 'responses'} of {self._names(list(self.copied))} "
                "stand in an earlier file too, with the same prompt, tokens and log-probs to the bit, and count once."
            )
        return tuple(printable(sentence) for sentence in said)

    def _names(self, files: list[Path]) -> str:
        """The files' names, within the folder that was given."""
        return few(sorted(str(self._within(file)) for file in files))

    def _within(self, file: Path) -> Path:
        for folder in self.folders:
            if file.is_relative_to(folder):
                return file.relative_to(folder)
        return Path(file.name)

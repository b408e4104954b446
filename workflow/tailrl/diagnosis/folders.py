"""Which files of a folder are looked at, and whose folder it is where none holds a log."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tailrl.diagnosis.formats import Dump, dumps, how_to_log
from tailrl.diagnosis.left_out import LeftOut, RowError
from tailrl.diagnosis.opened import may_be_log
from tailrl.page_parts.number_text import count
from tailrl.runtime.errors import DataError, StorageError, StudyError, few, reason


class NoLogError(DataError):
    """No file holds a log of tokens; some may hold curves."""


def log_files(paths: Iterable[Path], left_out: LeftOut) -> list[Path]:
    """These files, and those in these folders that may be logs, in order, each once.

    Raises:
        StudyError: a path is missing.
    """
    return list({os.path.realpath(file): file for path in paths for file in _files(path, left_out)}.values())


def _files(path: Path, left_out: LeftOut) -> list[Path]:
    if path.is_dir():
        left_out.folders.append(path)
        files: list[Path] = []
        for file in sorted(regular_files(path)):
            if may_be_log(file):
                files.append(file)
            elif file.stat().st_size:  # an empty file marks that something is done
                left_out.files[file] = NoLogError(f"{file}: is no log")
        return files
    try:
        path.stat()
    except FileNotFoundError:
        raise StorageError(f"{path}: is missing") from None
    except (OSError, ValueError) as error:  # a name with a zero byte
        raise StorageError(f"{path}: cannot be read: {reason(error)}") from None
    return [path]


def regular_files(folder: Path) -> Iterator[Path]:
    """The regular files in a folder and in the folders within, hidden ones apart; links to folders are not followed."""
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            file = Path(where, name)
            if not name.startswith(".") and file.is_file():
                yield file


def of_folder(paths: Sequence[Path], left_out: LeftOut) -> StudyError:
    """Why nothing could be read: the file's own reason, or whose folder it looks like and what to switch on."""
    if len(left_out.files) == 1 and not any(path.is_dir() for path in paths):
        return next(iter(left_out.files.values()))
    where = few([str(path) for path in paths])
    errors = list(left_out.files.values())
    known = [(file, dump) for file, error in left_out.files.items() if (dump := _dump(file, error))]
    if known:
        framework, _ = Counter(dump.framework for _, dump in known).most_common(1)[0]
        file, dump = next((file, dump) for file, dump in known if dump.framework == framework)
        return NoLogError(
            f"{where}: holds no log of tokens. It looks like a folder of {framework}: {file.name} is {dump.title}. "
            f"{how_to_log(framework)}"
        )
    if not errors:
        return NoLogError(f"{where}: holds no file that may be a log: JSON, Parquet, Arrow, CSV, npz or .pt")
    first = next((error for error in errors if not isinstance(error, NoLogError)), errors[0])
    return NoLogError(f"{where}: holds no log of tokens in {count(len(errors), 'file')}; the first: {first}")


def _dump(file: Path, error: StudyError) -> Dump | None:
    """What a framework wrote into a file, by its columns or by its path; None if that is not known."""
    title = error.reason.removeprefix("it is ") if isinstance(error, RowError) and error.framework else ""
    return next((dump for dump in dumps() if dump.title == title or (dump.path and file.match(dump.path))), None)

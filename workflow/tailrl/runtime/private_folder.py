"""A folder for this user alone in a temporary directory that users share."""

import os
import stat
import tempfile
from pathlib import Path

from tailrl.runtime.errors import StorageError, reason


def private_folder(name: str) -> Path:
    """The folder of this name in the temporary directory, made with mode 0700 where it is missing.

    Anybody can guess the name and be first, so that owner and mode are looked at. Where the processes of a job alone
    need a folder, `tempfile.TemporaryDirectory` has a name that nobody knows before.

    Raises:
        StudyError: it cannot be made, is another user's or no folder, or other users may go in.
    """
    folder = Path(tempfile.gettempdir()) / name
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise StorageError(f"{folder}: cannot be made: {reason(error)}") from None
    wrong = {
        "is no folder": not stat.S_ISDIR(status.st_mode),
        "is another user's": status.st_uid != os.getuid(),
        "is open to other users": stat.S_IMODE(status.st_mode) & 0o077,
    }
    for words, is_so in wrong.items():
        if is_so:
            raise StorageError(f"{folder}: {words}: remove it, or set TMPDIR to a folder of your own")
    return folder

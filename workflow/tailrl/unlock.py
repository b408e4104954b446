"""Snakemake's lock of a folder, where the Snakemake that took it was killed: SIGKILL leaves it there."""

import platform
import sys
from pathlib import Path

from tailrl.errors import StudyError

LOCKS, HOST = Path(".snakemake/locks"), Path(".snakemake/host")
"""Where Snakemake keeps its locks, and where the workflow notes the machine that it runs on."""


def remove_stale_lock(folder: Path) -> bool:
    """Removes the lock of a Snakemake that runs no more; says so on stderr. False where there is none.

    Raises:
        StudyError: a Snakemake runs in the folder, or did so on another machine, where nobody can look from here.
    """
    locks = sorted((folder / LOCKS).glob("*.lock"))
    if not locks:
        return False
    host = (folder / HOST).read_text(encoding="utf-8").strip() if (folder / HOST).exists() else platform.node()
    if host != platform.node():
        raise StudyError(
            f"{folder}: locked by a Snakemake on {host}; where none runs there any more, say snakemake --unlock"
        )
    for process in running_snakemakes(folder):
        raise StudyError(f"{folder}: a Snakemake is running here already, as process {process}")
    for lock in locks:
        lock.unlink(missing_ok=True)
    print(f"tailrl: {folder}: the lock of a Snakemake that was killed is removed", file=sys.stderr)
    return True


def running_snakemakes(folder: Path) -> list[int]:
    """The processes of this machine that run Snakemake in the folder and hold its lock."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            here = (process / "cwd").resolve(strict=True) == folder.resolve()
        except OSError:
            continue  # it has ended, or is another user's
        # `python /path/to/snakemake ...` or `python -m snakemake ...`; the one that writes the report takes no lock.
        if here and any(Path(word).name == "snakemake" for word in command[:3]) and "--nolock" not in command:
            found.append(int(process.name))
    return found

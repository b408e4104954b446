"""The tables that a study's parts left, in results/<part>/tables/ or docs/results/<part>/."""

from collections.abc import Sequence
from pathlib import Path

from tailrl.analysis.parts import Numbers
from tailrl.artifacts.tables import read_csv
from tailrl.runtime.errors import StudyError


def column(folders: Sequence[Path], table: str, name: str) -> list[Numbers]:
    """A column of each part's table by arm, in the order of its lines; an empty cell is NaN.

    Raises:
        StudyError: no part, a table is missing or none, or an arm's number of seeds differs between parts.
    """
    if not folders:
        raise StudyError("no part is finished: `snakemake -n` with the name of a part says what it takes")
    found = [_numbers(folder / table, name) for folder in folders]
    seeds = {
        arm: (len(values), folder) for folder, part in zip(folders, found, strict=True) for arm, values in part.items()
    }
    for folder, part in zip(folders, found, strict=True):
        for arm, values in part.items():
            count, other = seeds[arm]
            if len(values) != count:
                raise StudyError(f"{folder}: {arm} has {len(values)} seeds, but {count} in {other}: was one a trial?")
    return found


def part_name(folder: Path) -> str:
    """The study that left this folder of tables."""
    return (folder.parent if folder.name == "tables" else folder).name


def _numbers(path: Path, name: str) -> Numbers:
    found = dict[str, list[float]]()
    try:
        for row in read_csv(path, ("arm", name)):
            found.setdefault(row["arm"], []).append(float(row[name] or "nan"))
    except ValueError:
        raise StudyError(f"{path}: a line's {name} is not a number") from None
    return found

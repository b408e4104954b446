"""Published results, as in docs/results: pages in a folder for each study, tables of all studies in one folder.

`<root>/tables/<table>.csv` (or .csv.gz) has the rows of every study. The column `study` names the study, or a part of
it as study/part. The column `page` names the page that shows the row: `<root>/<study>/<page>.md`.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from tailrl.artifacts.tables import read_csv, write_csv
from tailrl.runtime.errors import DataError, StorageError

TABLES = "tables"
"""The folder of the tables."""

SUMMARY = "summary"
"""The page of a study's training."""

STUDY, PAGE = "study", "page"

# The longest: a row for each step, problem, claim, or pair of arms.
COMPRESSED = {"claims", "course", "differences", "k3_ratios", "kept", "mismatch", "problems", "rewards", "training"}

Rows = list[dict[str, str]]


def is_published(root: Path) -> bool:
    """Whether the folder holds published results, rather than the folders of studies that ran here."""
    return any((root / TABLES).glob("*.csv"))


def path_of(root: Path, table: str) -> Path:
    """The file of a table."""
    return root / TABLES / f"{table}.csv{'.gz' if table in COMPRESSED else ''}"


def read_published(root: Path, table: str) -> dict[str, Rows]:
    """The rows of a table by study, in the file's order, with the column `page`; none where there is no such table.

    Raises StudyError if the file is no table with both columns.
    """
    path = path_of(root, table)
    studies: dict[str, Rows] = {}
    for row in read_csv(path, (STUDY, PAGE)) if path.is_file() else []:
        studies.setdefault(row.pop(STUDY), []).append(row)
    return studies


def replace_published(root: Path, study: str, tables: Mapping[str, Rows]) -> None:
    """Put a study's rows into the tables in place of those that it had there. A row has its `page`.

    Other studies' rows keep their text. A column that only some studies have is empty for the others.
    """
    names = {path.name.partition(".")[0] for path in (root / TABLES).glob("*.csv*")} | tables.keys()
    for table in names:
        studies = read_published(root, table)
        rows = tables.get(table, [])
        if not rows and study not in studies:
            continue
        write_table(root, table, studies | {study: rows})


def write_table(root: Path, table: str, studies: Mapping[str, Iterable[Mapping[str, str]]]) -> None:
    """Write a table with the studies' rows, by the studies' names."""
    rows = [{STUDY: study, **row} for study in sorted(studies) for row in studies[study]]
    columns = dict.fromkeys(column for row in rows for column in row)
    write_csv(path_of(root, table), [{column: row.get(column, "") for column in columns} for row in rows])


def rows_of_part(folder: Path, file: str) -> Rows:
    """A table of a study's part: from the part's own folder, or as published for a folder <root>/<study>/<part>.

    Raises StudyError if it is in neither place.
    """
    root = folder.parent.parent
    if (folder / file).is_file() or not is_published(root):
        return read_csv(folder / file)
    rows = read_published(root, Path(file).stem).get(folder.relative_to(root).as_posix())
    if rows is None:
        raise DataError(f"{path_of(root, Path(file).stem)}: has no row of {folder.relative_to(root).as_posix()}")
    return rows


def file_of_part(folder: Path, file: str) -> Path:
    """The file that `rows_of_part` reads."""
    root = folder.parent.parent
    own = folder / file
    return own if own.is_file() or not is_published(root) else path_of(root, Path(file).stem)


def has_part(folder: Path, files: Iterable[str]) -> bool:
    """Whether `rows_of_part` finds all these tables of a part."""
    try:
        return all(rows_of_part(folder, file) for file in files)
    except (DataError, StorageError):
        return False

"""The tables that a study's parts left, in results/<study>/<part>/tables/, or as published in docs/results."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tailrl.artifacts.published import file_of_part, rows_of_part
from tailrl.config.pooled import SCORE_COLUMN, SCORE_TABLE, Pool
from tailrl.reports.parts.numbers import POOLED_SCORE, Numbers, PartNumbers
from tailrl.runtime.errors import DataError


def read_parts(pool: Pool, names: Sequence[str], folders: Sequence[Path]) -> PartNumbers:
    """The measures of each finished part by its name; an empty cell is NaN.

    Args:
        pool: says which tables and columns.
        names: of all parts that are pooled, in their order.
        folders: of each finished part's tables.

    Raises:
        StudyError: no part, a folder of none, a table is missing or none, or an arm's number of seeds differs between
            parts.
    """
    if not folders:
        raise DataError("no part is finished: `snakemake -n part_NAME --configfile FILE` says what one takes")
    columns = {POOLED_SCORE: (SCORE_TABLE, SCORE_COLUMN)}
    columns |= {name: (measure.table, measure.column) for name, measure in pool.measures.items()}
    found = {}
    for folder in folders:
        if (part := part_name(folder)) not in names:
            raise DataError(f"{folder}: {part} is no part of this study")
        found[part] = {name: _numbers(folder, table, column) for name, (table, column) in columns.items()}
    for name in columns:
        _check_seeds({folder: found[part_name(folder)][name] for folder in folders})
    return {part: found[part] for part in names if part in found}


def part_name(folder: Path) -> str:
    """The part that left this folder of tables."""
    return (folder.parent if folder.name == "tables" else folder).name


def _check_seeds(parts: Mapping[Path, Numbers]) -> None:
    seeds = {arm: (len(values), folder) for folder, part in parts.items() for arm, values in part.items()}
    for folder, part in parts.items():
        for arm, values in part.items():
            count, other = seeds[arm]
            if len(values) != count:
                raise DataError(f"{folder}: {arm} has {len(values)} seeds, but {count} in {other}: was one a trial?")


def _numbers(folder: Path, table: str, column: str) -> Numbers:
    path = file_of_part(folder, table)
    numbers: dict[str, dict[int, float]] = {}
    try:
        for row in rows_of_part(folder, table):
            if missing := [name for name in ("arm", "seed", column) if row.get(name) is None]:
                raise DataError(f"{path}: a line has no {missing[0]}")
            numbers.setdefault(row["arm"], {})[int(row["seed"])] = float(row[column] or "nan")
    except ValueError:
        raise DataError(f"{path}: a line's seed or {column} is not a number") from None
    return numbers

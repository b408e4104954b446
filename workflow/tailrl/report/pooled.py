"""The parts of a study over several warm starts, pooled: two tables and a page, from the tables that the parts left."""

from collections.abc import Sequence
from pathlib import Path

from tailrl.analysis.pooled import PartScores, Pooled, pooled, pooled_scores
from tailrl.artifacts.tables import flat_rows, read_csv, write_csv
from tailrl.report.page import render
from tailrl.runtime.errors import StudyError


def write_pooled(tables: Sequence[Path], out: Path) -> None:
    """Write out/differences.csv, out/scores.csv and out/pooled.md.

    Args:
        tables: policies.csv of each finished part.
        out: the report's folder; the same inputs give the same bytes.

    Raises:
        StudyError: no part is finished, or a table cannot be read.
    """
    if not tables:
        raise StudyError("no part is finished: run one, such as `make remedies_k3_1`")
    parts = [_scores(path) for path in tables]
    differences, scores = pooled(parts), pooled_scores(parts)
    write_csv(out / "differences.csv", flat_rows(differences))
    write_csv(out / "scores.csv", flat_rows(scores))
    causes: dict[str, dict[str, dict[str, Pooled]]] = {}
    for one in differences:
        causes.setdefault(one.cause, {}).setdefault(one.remedy, {})[one.less] = one
    text = render("pooled.md.j2", causes=causes, scores=scores, parts=list(map(_name, tables)))
    (out / "pooled.md").write_text(text, encoding="utf-8")


def _scores(path: Path) -> PartScores:
    """The scores of a part by arm, in the order of its table; raises StudyError for a table that is none."""
    rows, found = read_csv(path, ("arm", "avg_mean")), dict[str, list[float]]()
    try:
        for row in rows:
            found.setdefault(row["arm"], []).append(float(row["avg_mean"]))
    except ValueError:
        raise StudyError(f"{path}: a line's avg_mean is not a number") from None
    return found


def _name(path: Path) -> str:
    """The study of a table in results/<study>/tables/ or docs/results/<study>/."""
    return (path.parents[1] if path.parent.name == "tables" else path.parent).name

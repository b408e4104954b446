"""The parts of a study over several warm starts, pooled: two tables and a page, from the tables that the parts left."""

from collections.abc import Sequence
from pathlib import Path

from tailrl.analysis.pooled import Pooled, pooled, pooled_scores
from tailrl.artifacts.tables import flat_rows, write_csv
from tailrl.report.page import render
from tailrl.report.parts import column, part_name


def write_pooled(folders: Sequence[Path], out: Path) -> None:
    """Write out/differences.csv, out/scores.csv and out/pooled.md.

    Args:
        folders: of each finished part's policies.csv.
        out: the report's folder; the same inputs give the same bytes.

    Raises:
        StudyError: no part is finished, or a table cannot be read.
    """
    parts = column(folders, "policies.csv", "avg_mean")
    differences, scores = pooled(parts), pooled_scores(parts)
    write_csv(out / "differences.csv", flat_rows(differences))
    write_csv(out / "scores.csv", flat_rows(scores))
    causes: dict[str, dict[str, dict[str, Pooled]]] = {}
    for one in differences:
        causes.setdefault(one.cause, {}).setdefault(one.remedy, {})[one.less] = one
    text = render("pooled.md.j2", causes=causes, scores=scores, parts=list(map(part_name, folders)))
    (out / "pooled.md").write_text(text, encoding="utf-8")

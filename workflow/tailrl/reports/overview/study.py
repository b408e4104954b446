"""The report of a study: tables, figures and a summary in words, from the files of training and evaluation."""

from pathlib import Path

from tailrl.artifacts.claims import write_verdicts
from tailrl.artifacts.results import read_results
from tailrl.artifacts.tables import write_csv
from tailrl.config.study import Study
from tailrl.reports.collapse.page import write_collapse
from tailrl.reports.course.page import write_course
from tailrl.reports.course.snapshots import has_snapshots
from tailrl.reports.figures import FIGURES, SNAPSHOT_FIGURES, caption, place_of
from tailrl.reports.mismatch.page import write_mismatch
from tailrl.reports.overview.arms import arm_rows
from tailrl.reports.overview.screen import first_screen
from tailrl.reports.overview.summary import summarize, trained_rows
from tailrl.reports.overview.tokens import worst_responses
from tailrl.reports.overview.verdicts import judge
from tailrl.reports.page import Drawing, page
from tailrl.reports.scores.page import write_scores
from tailrl.reports.what_ran import made_by_rows


def write_report(study: Study, results: Path, out: Path) -> None:
    """Write out/summary.md, out/summary.html with figures in it, out/figures/*.svg and their tables, out/tables/*.csv.

    Args:
        study: its arms and seeds are reported.
        results: the study's own folder, results/<study>, with `train/<arm>/seed<seed>/` and `eval/<arm>.json` in it.
        out: the report's folder; the same inputs give the same bytes.

    Raises:
        StudyError: a result is missing, unreadable or empty.
    """
    read = read_results(study, results, study.arms)
    scores = write_scores(read, out)
    curves = [*write_course(read, out), *write_mismatch(read, out)]
    write_collapse(read, out)
    write_csv(out / "tables" / "arms.csv", arm_rows(read))
    write_csv(out / "tables" / "made_by.csv", made_by_rows(read))
    write_csv(out / "tables" / "trained.csv", trained_rows(read))
    verdicts = judge(read)
    write_verdicts(out / "tables" / "claims.csv", verdicts)
    summary = summarize(study, read, verdicts, scores.gains, scores.comparisons)
    (out / "summary.md").write_text(summary, encoding="utf-8")
    screen = first_screen(read, scores.gains, scores.policies, curves, verdicts, study.evaluation.temperature)
    figures = FIGURES | (SNAPSHOT_FIGURES if has_snapshots(read) else {})
    drawn = [
        Drawing(
            out / "figures" / f"{name}.svg",
            caption(name),
            tuple(f"tables/{table}.csv" for table in tables),
            (f"figures/{name}.svg", f"figures/{name}.pdf"),
        )
        for name, tables in sorted(figures.items(), key=lambda figure: place_of(figure[0]))
    ]
    (out / "summary.html").write_text(page(summary, drawn, screen, worst_responses(read, results)), encoding="utf-8")

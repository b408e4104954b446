"""One page over all studies: first the papers' statements with verdicts, then each study's figures and claims."""

import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tailrl.artifacts.files import read_text
from tailrl.artifacts.tables import write_csv
from tailrl.claims.catalogue import Statement, words_of
from tailrl.reports.figures import caption
from tailrl.reports.overview.evidence import Answer, StudyResults, made_for, read_answers, verdicts_of_statements
from tailrl.reports.page import Drawing, fragment, render

MOST_LINKED = 3
"""More studies than these are counted, not linked."""

MOST_SHOWN = 2
"""The page shows this many lines of a statement, and folds the rest if there is more than one more."""


def write_all_studies(roots: Iterable[Path], out: Path) -> None:
    """Write out/index.html, out/claims.md and out/statements.csv.

    Args:
        roots: folders with a folder for each study, such as results and docs/results. If two have a study of the same
            name, the first one is shown.
        out: the page's folder; its links are relative to it.

    Raises:
        StudyError: a table of claims cannot be read.
    """
    studies, found = read_answers(roots)
    out.mkdir(parents=True, exist_ok=True)
    write_csv(out / "statements.csv", [_csv_row(answer) for answer in found])
    (out / "claims.md").write_text(claims_page(found, out), encoding="utf-8")
    (out / "index.html").write_text(_page(studies, found, out), encoding="utf-8")


def claims_page(found: Sequence[Answer], out: Path) -> str:
    """The table of all statements in Markdown, for a file in the folder `out`."""
    return render(
        "overview/claims.md.j2",
        brief=_by_claim(found),
        own=made_for,
        links=lambda lines: _links(lines, out),
        tally=_tally(found),
        counted=_counted,
        words_of=words_of,
    )


def _page(studies: Sequence[StudyResults], found: Sequence[Answer], out: Path) -> str:
    shown = [(study, _drawings(study, out), [read_text(path) for path in study.tables]) for study in studies]
    return render(
        "overview/all_studies.html.j2", shown=shown, limit=MOST_SHOWN, fragment=fragment, **_shared(found, out)
    )


def _shared(found: Sequence[Answer], out: Path) -> dict[str, Any]:
    """The values of the page: the claims of each part, and functions that fill the cells."""
    by_part = itertools.groupby(found, key=lambda answer: answer.statement.part)
    return {
        "tally": _tally(found),
        "parts": [(part, list(_by_claim(own))) for part, own in by_part],
        "arms": _arms,
        "counted": _counted,
        "drawn": _drawn,
        "words_of": words_of,
        "relative": lambda path: _relative(Path(path), out),
    }


def _tally(found: Iterable[Answer]) -> list[tuple[str, int]]:
    """How many statements have each verdict: each counts once, whatever the number of its lines."""
    return Counter(verdicts_of_statements(found).values()).most_common()


def _counted(verdicts: Iterable[str]) -> Iterable[tuple[str, int]]:
    return Counter(verdicts).items()


def _links(lines: Iterable[Answer], out: Path) -> str:
    """Links to the pages of the lines' studies, or how many there are."""
    pages = {line.study.name: line.line.page for line in lines if line.study and line.line}
    if len(pages) > MOST_LINKED:
        return f"{len(pages)} studies"
    return ", ".join(f"[{name}]({_relative(page, out)})" if page else name for name, page in pages.items())


def _by_claim(found: Iterable[Answer]) -> Iterator[tuple[Statement | None, str, list[Answer]]]:
    """Each claim's lines, as (statement, claim, lines). The statement is None after its first claim; the claim is empty
    if its statement has no other."""
    for statement, own in itertools.groupby(found, key=lambda answer: answer.statement):
        first: Statement | None = statement
        for claim, lines in itertools.groupby(own, key=lambda answer: answer.claim):
            yield first, claim, list(lines)
            first = None


def _arms(answer: Answer) -> str:
    """A line's arms, each with its remedy."""
    remedies = answer.study.remedies if answer.study else {}
    names = answer.line.arms.split(", ") if answer.line else []
    return ", ".join(f"{name} ({remedies[name]})" if remedies.get(name) else name for name in names)


def _drawn(answer: Answer) -> Path | None:
    """The figure of the line's study that shows it."""
    drawn = {path.stem: path for path, _ in answer.study.figures} if answer.study else {}
    return next((drawn[stem] for stem in answer.statement.figures if stem in drawn), None)


def _csv_row(answer: Answer) -> dict[str, object]:
    statement, study, line = answer.statement, answer.study, answer.line
    named = {"id": statement.id, "part": statement.part, "statement": statement.text, "verdict": answer.verdict}
    named |= {"seen": answer.words, "claim_id": line.id if line else "", "study": study.name if study else ""}
    cells = ("claim", "source", "dose", "rate", "arms", "seeds", "effect", "low", "high", "unit", "p_holm")
    return {**named, **{name: getattr(line, name, "") for name in cells}, "made by": answer.made_by}


def _drawings(study: StudyResults, out: Path) -> list[Drawing]:
    return [
        Drawing(path, _caption(path), tuple(_relative(table, out) for table in tables))
        for path, tables in study.figures
    ]


def _caption(drawn: Path) -> str:
    ablation = drawn.stem != "across" and drawn.with_name(f"{drawn.stem}_claims.csv").is_file()
    return " ".join(caption("ablation" if ablation else drawn.stem).split())


def _relative(path: Path, out: Path) -> str:
    return Path(os.path.relpath(path, out)).as_posix()

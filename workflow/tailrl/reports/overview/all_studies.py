"""One page over all studies: the papers' statements with their verdicts."""

import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tailrl.artifacts.tables import write_csv
from tailrl.claims.catalogue import Statement, words_of
from tailrl.reports.overview.evidence import Answer, made_for, read_answers, verdicts_of_statements
from tailrl.reports.page import render

MOST_LINKED = 3
"""More studies than these are counted, not linked."""


def write_all_studies(roots: Iterable[Path], out: Path) -> None:
    """Write out/claims.md, and out/statements.csv with every line of every statement.

    Args:
        roots: folders with a folder for each study, such as results and docs/results. If two have a study of the same
            name, the first one is shown.
        out: the page's folder; its links are relative to it.

    Raises:
        StudyError: a table of claims cannot be read.
    """
    _, found = read_answers(roots)
    out.mkdir(parents=True, exist_ok=True)
    write_csv(out / "statements.csv", [_csv_row(answer) for answer in found])
    (out / "claims.md").write_text(claims_page(found, out), encoding="utf-8")


def claims_page(found: Sequence[Answer], out: Path) -> str:
    """The table of all statements in Markdown, for a file in the folder `out`."""
    return render(
        "overview/claims.md.j2",
        brief=_by_claim(found),
        own=made_for,
        links=lambda lines: links(lines, out),
        # How many statements have each verdict: each counts once, whatever the number of its lines.
        tally=Counter(verdicts_of_statements(found).values()).most_common(),
        counted=lambda verdicts: Counter(verdicts).items(),
        words_of=words_of,
    )


def links(lines: Iterable[Answer], out: Path) -> str:
    """Links from the folder `out` to the pages of the lines' studies, or how many there are."""
    pages = dict[str, Path | None]()
    for line in lines:
        if line.study and line.line:
            pages.setdefault(line.study.name, line.line.page)
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


def _csv_row(answer: Answer) -> dict[str, object]:
    statement, study, line = answer.statement, answer.study, answer.line
    named = {"id": statement.id, "part": statement.part, "statement": statement.text, "verdict": answer.verdict}
    named |= {"seen": answer.words, "claim_id": line.id if line else "", "study": study.name if study else ""}
    cells = ("claim", "source", "dose", "rate", "arms", "seeds", "effect", "low", "high", "unit", "p_holm")
    return {**named, **{name: getattr(line, name, "") for name in cells}, "made by": answer.made_by}


def _relative(path: Path, out: Path) -> str:
    return Path(os.path.relpath(path, out)).as_posix()

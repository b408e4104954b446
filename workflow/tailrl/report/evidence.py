"""What finished and published studies say about each statement: their claims.csv files, figures and tables."""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tailrl.errors import StudyError
from tailrl.report.catalogue import STATEMENTS
from tailrl.report.data import read_text
from tailrl.report.findings import UNTESTABLE
from tailrl.report.statement import Statement

Row = dict[str, str]

DEFINITION, OPEN = "definition", "not run yet"

PARTS = {"gradients": "gradient_quality", "distributions": "distributions"}
"""Parts of a study's folder that its report does not speak of. Of the default study each is a study of its own, called
by its target; of any other they are that study's."""

COMMANDS = {
    "default": "make reproduce",
    "distributions": "snakemake --cores 1 distributions",
    "early_warning": "snakemake --cores 1 early_warning",
}
"""What makes the results of this name, where it is not `make <name>`."""

FIRST = ("evaluation", "survival", "training", "mismatch")
"""The figures that come first, in this order."""

SEARCH = "search_"
"""How the studies begin that look for a dose with a seed or two: they show nothing, and no statement is theirs."""

COLUMNS = ("claim", "source", "verdict", "dose", "arms", "seeds", "seen", "p_holm")


@dataclass(frozen=True, slots=True)
class Shown:
    """One study's results: its claims, its figures with the table behind each (None where there is none), its page."""

    name: str
    claims: tuple[Row, ...]
    figures: tuple[tuple[Path, Path | None], ...]
    page: Path | None

    @property
    def command(self) -> str:
        """What makes it again."""
        return COMMANDS.get(self.name, f"make {self.name}")


@dataclass(frozen=True, slots=True)
class Answer:
    """A statement with its verdict by one line of one study; neither of these where nothing has spoken to it."""

    statement: Statement
    verdict: str
    words: str
    study: Shown | None = None
    line: Row | None = None


def read_shown(roots: Iterable[Path]) -> list[Shown]:
    """The studies with claims under some folders of results, each once: the first root that has a name wins. Searches
    for a dose are none of them.

    Args:
        roots: folders such as results and docs/results, with a folder for each study.

    Raises:
        StudyError: a table of claims cannot be read.
    """
    found: dict[str, Shown] = {}
    for root in roots:
        for folder in sorted(path for path in root.glob("*") if path.is_dir() and not path.name.startswith(SEARCH)):
            if folder.name == "default":
                places = {folder.name: [folder], **{name: [folder / part] for part, name in PARTS.items()}}
            else:
                places = {folder.name: [folder, *(folder / part for part in PARTS)]}
            for name, own in places.items():
                tables = [path for place in own for path in _tables(place)]
                if tables and name not in found:
                    found[name] = _shown(name, own, tables)
    return list(found.values())


def answers(studies: Sequence[Shown]) -> list[Answer]:
    """Every statement in its order, with each line that speaks to it, those of its own study first; lines that cannot
    decide it only if none can."""
    found = []
    for statement in STATEMENTS:
        # A line without arms says that a study has none to speak with.
        told = [(study, line) for study in studies for line in study.claims if line["arms"]]
        named = [(study, line) for study, line in told if study.name.startswith(statement.only)]
        lines = [(study, line) for study, line in named if _speaks(statement, line["claim"])]
        lines.sort(key=lambda pair: pair[0].command != statement.command)
        decided = [(study, line) for study, line in lines if line["verdict"] != UNTESTABLE]
        if lines:
            shown = decided or lines
            found += [Answer(statement, line["verdict"], line["seen"], study, line) for study, line in shown]
        elif statement.held_by and not statement.by:
            found.append(Answer(statement, DEFINITION, f"held by {statement.held_by}"))
        elif statement.beyond:
            found.append(Answer(statement, UNTESTABLE, statement.beyond))
        else:
            found.append(Answer(statement, OPEN, "no results at hand speak to it"))
    return found


def _speaks(statement: Statement, claim: str) -> bool:
    for name in statement.by:
        before, dots, after = name.partition("…")
        if claim == name or (dots and claim.startswith(before) and after.rstrip("…").strip() in claim):
            return True
    return False


def _tables(folder: Path) -> list[Path]:
    """The tables of claims of one study: its own, and one for each ablation."""
    own = [path for path in (folder / "claims.csv", folder / "tables" / "claims.csv") if path.is_file()]
    return own + sorted(folder.glob("*_claims.csv")) + sorted(folder.glob("ablations/*_claims.csv"))


def _shown(name: str, places: Sequence[Path], tables: Sequence[Path]) -> Shown:
    claims = [row for path in tables for row in _read(path)]
    patterns = ("*.svg", "figures/*.svg", "ablations/*.svg")
    drawn = sorted(path for place in places for pattern in patterns for path in place.glob(pattern))
    drawn.sort(key=lambda path: FIRST.index(path.stem) if path.stem in FIRST else len(FIRST))
    figures = []
    for path in drawn:
        beside = (path.with_suffix(".csv"), path.parents[1] / "tables" / f"{path.stem}.csv")
        figures.append((path, next((table for table in beside if table.is_file()), None)))
    pages = [
        place / page for place in places for page in ("summary.html", "summary.md", f"{PARTS.get(place.name, name)}.md")
    ]
    return Shown(name, tuple(claims), tuple(figures), next((page for page in pages if page.is_file()), None))


def _read(path: Path) -> list[Row]:
    rows = list(csv.DictReader(read_text(path).splitlines()))
    for row in rows:
        missing = [name for name in COLUMNS if row.get(name) is None]
        if missing:
            raise StudyError(f"{path}: a line has no {missing[0]}")
    return rows

"""Evidence for each statement from finished and published studies: their claims.csv files."""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from pydantic import Field, ValidationError

from tailrl.artifacts.claims import Verdict, read_verdicts, verdicts_of
from tailrl.artifacts.published import PAGE, is_published, path_of, read_published
from tailrl.claims.catalogue import CATALOGUE, STATEMENTS, Statement, words_of
from tailrl.claims.decide import SILENT, decide_published, outcome_of_lines, outcome_without_lines
from tailrl.claims.finding import DEFINITION, UNTESTABLE
from tailrl.config.base import Settings
from tailrl.config.load import read_yaml
from tailrl.config.messages import sentences
from tailrl.config.pooled import matching
from tailrl.config.results import FOLDERS, whole_and_part
from tailrl.runtime.errors import ConfigurationError, DataError, one_line
from tailrl.stats.tests import Difference

PARTS = {"gradients": "gradient_quality", "distributions": "distributions"}
"""Parts of a study's folder with a report of their own. In the default study each part counts as a study, named by its
target."""

MADE_FOR = "made_for.yaml"
"""Beside results: which study was made for which statement."""

SEARCH = "search_"
"""The prefix of studies that search for a dose with one or two seeds; they are no evidence."""

SAME_RUNS = ("id", "seeds", "effect", "low", "high")
"""Two lines that agree in these columns come from the same runs."""

MOST_NAMED = 4
"""The largest number of undecided studies that are listed by name."""


class PlannedDifferences(Settings):
    """Rows of a published table of differences, which a study planned and which speak to a claim.

    Attributes:
        claim: its id.
        where: the value of a row's column, or several that it may have. `*` stands for any part of a value.
        column: how the columns of the difference begin: its mean, interval, p and number of units.
        arms: the columns that name the compared arms.
        beside: more words on what is compared. A column's name in braces is its value.
        units: how many the study planned. With fewer nothing is decided.
    """

    claim: str
    study: str
    table: str = "comparisons"
    where: dict[str, str | tuple[str, ...]]
    column: str = "difference"
    arms: tuple[str, ...] = ("arm", "minus")
    beside: str = ""
    units: int = 0


class MadeFor(Settings):
    """What `made_for.yaml` beside results says of the studies there.

    Attributes:
        made_for: the ids of the statements that each study was made for.
        alone: by a statement's id the prefix of the studies whose lines alone count.
        archives: studies that no command makes again.
        differences: planned differences that speak to claims.
    """

    made_for: dict[str, tuple[str, ...]] = Field({})
    alone: dict[str, str] = Field({})
    archives: tuple[str, ...] = ()
    differences: tuple[PlannedDifferences, ...] = ()

    def command(self, statement: str) -> str:
        """The command of the study made for a statement, by its id; empty without one."""
        return next((command_of(study) for study, ids in self.made_for.items() if statement in ids), "")


def read_made_for(roots: Iterable[Path]) -> MadeFor:
    """The first made_for.yaml in these folders; nothing without one. Raises StudyError if it cannot be read."""
    file = next((file for root in roots if (file := root / MADE_FOR).is_file()), None)
    if file is None:
        return MadeFor()
    try:
        return MadeFor.model_validate(read_yaml(file))
    except ValidationError as error:
        raise ConfigurationError(f"{file}: {sentences(error, MadeFor)}") from None


def command_of(study: str) -> str:
    """The command that makes the results of this name; a part is made with its study."""
    name, _ = whole_and_part(study)
    if name == "default":
        return "make reproduce"
    return f"make search/{name.removeprefix(SEARCH)}" if name.startswith(SEARCH) else f"make {name}"


@dataclass(frozen=True, slots=True)
class ReportedVerdict(Verdict):
    """A verdict with the current text of a known claim, and the path of its report, or None."""

    page: Path | None


@dataclass(frozen=True, slots=True)
class StudyResults:
    """One study's results.

    Attributes:
        claims: the lines of its claims.csv files.
        command: the command that makes it again; empty for an archive.
    """

    name: str
    claims: tuple[ReportedVerdict, ...]
    command: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A statement with its verdict from one line of one study, or without study and line if there is no evidence.

    Attributes:
        command: of the study made for the statement; empty without one.
        claim: the entry of the statement's `by` to which the line belongs, if there are lines on several entries.
    """

    statement: Statement
    command: str
    verdict: str
    words: str
    study: StudyResults | None = None
    line: ReportedVerdict | None = None
    claim: str = ""

    @property
    def made_by(self) -> str:
        """The command that makes the evidence, again or for the first time; empty for lines of several studies."""
        if self.study:
            return self.study.command
        if self.statement.by and self.verdict == UNTESTABLE:
            return ""
        return "make test" if self.verdict == DEFINITION else self.command


def read_shown(roots: Iterable[Path]) -> list[StudyResults]:
    """The studies with claims under folders such as results and docs/results, without searches for a dose.

    The first folder with a study's name wins. Raises StudyError if a table of claims cannot be read.
    """
    folders = list(roots)
    known = read_made_for(folders)
    archives = known.archives
    found: dict[str, StudyResults] = {}
    for root in folders:
        if is_published(root):
            for study in _published(root, known):
                found.setdefault(study.name, study)
            continue
        for folder in sorted(path for path in (*root.glob("*"), *root.glob("*/*")) if path.is_dir()):
            name = folder.relative_to(root).as_posix()
            if name.startswith(SEARCH) or ("/" in name and folder.name in FOLDERS):
                continue
            if name == "default":
                places = {name: [folder], **{target: [folder / part] for part, target in PARTS.items()}}
            else:
                places = {name: [folder, *(folder / part for part in PARTS)]}
            for name, own in places.items():
                if name not in found and any(_tables(place) for place in own):
                    found[name] = _shown(name, own, "" if name in archives else command_of(name))
    return list(found.values())


def read_answers(roots: Iterable[Path]) -> tuple[list[StudyResults], list[Answer]]:
    """The studies of `read_shown`, and what they say of each statement."""
    folders = list(roots)
    studies = read_shown(folders)
    return studies, answers(studies, read_made_for(folders))


def answers(studies: Sequence[StudyResults], known: MadeFor) -> list[Answer]:
    """Every statement in order, with each of its lines, claim by claim; lines of its own study come first.

    Lines that cannot decide a claim are only counted, if another line can. Two studies may share runs to the bit: lines
    on a mean with the same effect and interval say so.
    """
    found = []
    for statement in STATEMENTS:
        # A line without arms says that its study has no suitable arm.
        told = [(study, line) for study in studies for line in study.claims if line.arms]
        command, prefix = known.command(statement.id), known.alone.get(statement.id, "")
        named = [(study, line) for study, line in told if study.name.startswith(prefix)]
        named.sort(key=lambda pair: pair[0].command != command)
        spoken = {name: [pair for pair in named if fnmatchcase(pair[1].id, name)] for name in statement.by}
        several = sum(map(bool, spoken.values())) > 1
        for name, lines in spoken.items():
            found += _spoken(statement, command, name if several else "", lines)
        if not any(spoken.values()):
            held = f"held by {statement.held_by}" if statement.held_by else ""
            words = held or statement.beyond or "no results at hand speak to it"
            found.append(Answer(statement, command, outcome_without_lines(statement), words))
    return found


def made_for(lines: Iterable[Answer]) -> list[Answer]:
    """The lines of the study made for their statement."""
    return [answer for answer in lines if answer.study and answer.study.command == answer.command]


def verdicts_of_statements(found: Iterable[Answer]) -> dict[str, str]:
    """One verdict for each statement, by its id: that of the study made for it, or of all studies if there is none."""
    verdicts = {}
    for statement, group in itertools.groupby(found, key=lambda answer: answer.statement):
        lines = list(group)
        verdicts[statement.id] = outcome_of_lines({answer.verdict for answer in made_for(lines) or lines})
    return verdicts


def _spoken(
    statement: Statement, command: str, claim: str, lines: Sequence[tuple[StudyResults, ReportedVerdict]]
) -> list[Answer]:
    """The lines on one claim of the statement, or on several of a kind. Lines without an event are only counted if
    another line on the same claim has one."""
    decided = {line.id for _, line in lines if line.verdict not in SILENT}
    found, rest = list[Answer](), list[tuple[StudyResults, ReportedVerdict]]()
    first: dict[tuple[object, ...], str] = {}
    for study, line in lines:
        if line.verdict in SILENT and line.id in decided:
            rest.append((study, line))
            continue
        runs = first.setdefault(tuple(getattr(line, key) for key in SAME_RUNS), study.name)
        # A share of runs has the same interval in any two studies with the same counts.
        same = runs != study.name and not math.isnan(line.low) and line.unit != "share of runs"
        again = f" (the same runs as in {runs})" if same else ""
        found.append(Answer(statement, command, line.verdict, line.seen + again, study, line, claim))
    if rest:
        verdict = outcome_of_lines({line.verdict for _, line in rest})
        found.append(Answer(statement, command, verdict, _rest(rest), claim=claim))
    return found


def _rest(rest: Sequence[tuple[StudyResults, ReportedVerdict]]) -> str:
    """Lines without an event in words, with their reason if it is the same for all."""
    names = dict.fromkeys(study.name for study, _ in rest)
    said = {line.seen.split(";")[0] for _, line in rest}
    lines = "one line more" if len(rest) == 1 else f"{len(rest)} lines more"
    where = f"of {', '.join(names)}" if len(names) <= MOST_NAMED else f"of {len(names)} studies"
    return f"{lines}, {where}: " + (said.pop() if len(said) == 1 else "nothing to test")


def _published(root: Path, known: MadeFor) -> Iterator[StudyResults]:
    """The studies of a folder of published results: their claims, and then their planned differences."""
    found = dict[str, list[ReportedVerdict]]()
    for name, rows in read_published(root, "claims").items():
        if name.startswith(SEARCH) or ("/" in name and name.rpartition("/")[2] in FOLDERS):
            continue
        pages = [row.pop(PAGE) for row in rows]
        found[name] = [
            ReportedVerdict(**asdict(line) | {"claim": words_of(line.id, line.claim)}, page=root / name / f"{page}.md")
            for page, line in zip(pages, verdicts_of(rows, path_of(root, "claims")), strict=True)
        ]
    for planned in known.differences:
        found.setdefault(planned.study, []).extend(_of_differences(root, planned))
    for name, claims in found.items():
        yield StudyResults(name, tuple(claims), "" if name in known.archives else command_of(name))


def _of_differences(root: Path, planned: PlannedDifferences) -> Iterator[ReportedVerdict]:
    """A line for each row of planned differences that has an interval; none where the study is not published there.

    A row with an equivalence's verdict keeps it. Raises StudyError if the claim or a column is unknown, a cell is no
    number, or no row of the study is meant.
    """
    table, claim = path_of(root, planned.table), CATALOGUE.get(planned.claim)
    named = f"which {MADE_FOR} names for {planned.claim}"
    if claim is None:
        raise ConfigurationError(f"{root / MADE_FOR}: no claim has the id {planned.claim!r}")
    every = read_published(root, planned.table).get(planned.study, [])
    numbers = {part: f"{planned.column}_{part}" for part in ("mean", "low", "high", "n")}
    columns = [*planned.where, *planned.arms, *numbers.values()]
    if lacking := [column for column in columns if every and column not in every[0]]:
        raise DataError(f"{table}: has no column {lacking[0]!r}, {named}")
    wanted = {column: (value,) if isinstance(value, str) else value for column, value in planned.where.items()}
    rows = [row for row in every if all(matching([row[column]], patterns) for column, patterns in wanted.items())]
    if every and not rows:
        where = ", ".join(f"{column} {value!r}" for column, value in planned.where.items())
        raise DataError(f"{table}: {planned.study} has no row with {where}, {named}")
    for row in rows:
        if not row[numbers["low"]]:  # a single unit
            continue
        # An equivalence has no p.
        tests = [row.get(f"{planned.column}_{part}") or "nan" for part in ("p", "p_holm")]
        try:
            mean, low, high, n, p, p_holm = map(float, [*(row[column] for column in numbers.values()), *tests])
            words = " minus ".join(row[column] for column in planned.arms) + planned.beside.format(**row)
        except (ValueError, KeyError) as error:
            raise DataError(f"{table}: {planned.study}: {one_line(str(error))}, {named}") from None
        difference, arms = Difference(mean, low, high, p, int(n)), [row[arm] for arm in planned.arms]
        line = decide_published(claim, arms, difference, p_holm, words, row.get("verdict", ""), planned.units)
        yield ReportedVerdict(**asdict(line), page=root / planned.study / f"{row[PAGE]}.md")


def _tables(folder: Path) -> list[Path]:
    """The tables of claims of one study: its own, and one per ablation."""
    own = [path for path in (folder / "claims.csv", folder / "tables" / "claims.csv") if path.is_file()]
    return own + sorted(folder.glob("*_claims.csv")) + sorted(folder.glob("ablations/*_claims.csv"))


def _shown(name: str, places: Sequence[Path], command: str) -> StudyResults:
    claims = [
        ReportedVerdict(**asdict(row) | {"claim": words_of(row.id, row.claim)}, page=_page(place, name))
        for place in places
        for path in _tables(place)
        for row in read_verdicts(path)
    ]
    return StudyResults(name, tuple(claims), command)


def _page(place: Path, name: str) -> Path | None:
    pages = (place / page for page in ("summary.html", "summary.md", f"{PARTS.get(place.name, name)}.md"))
    return next((page for page in pages if page.is_file()), None)

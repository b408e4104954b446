"""One page over all studies: the papers' statements with their verdicts first, then each study's figures and claims."""

import html
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tailrl.analysis.format import p_value, table
from tailrl.analysis.tables import write_csv
from tailrl.artifacts.files import read_text
from tailrl.claims.catalogue import Statement, words_of
from tailrl.claims.evidence import COLUMNS, Answer, Shown, answers, read_shown
from tailrl.report.page import Drawing, chip, document, figure, fragment, navigation

TITLE = "The mismatch between training and inference, and pruning the tail: what is claimed and what was found"

SHOWN = 4
"""Lines of a statement that the page shows at first, if it has more than one more."""

LEGEND = (
    "Reproduced: the one-sided p that the claim holds, by Holm over the tests of its family, is at most 2.5 %; "
    "contradicted: the same of its opposite; the p shown is two-sided. A family is of one study: where a claim has "
    "lines of many studies, one in twenty may come out by chance. Facts (exact zeros, exact sums) have no p, nor have "
    "lines on a margin or on which metric warns first, each decided by its own 95 % interval. Not "
    "testable at this scale: what it speaks of did not happen, or no run of this size can decide it. Premise fails: "
    "what the theorem assumes does not hold there. A difference is shown: a question without a direction, of which "
    "the two-sided p, by "
    "Holm, is at most 5 %. Measured: a question whose answer is a figure. Definition: nothing to decide; a test holds "
    "it. Not run yet: no results at hand speak to it, and the command makes some."
)


def write_paper(roots: Iterable[Path], captions: Path, out: Path) -> None:
    """Writes out/index.html, out/claims.md and out/statements.csv.

    Args:
        roots: folders with a folder for each study, such as results and docs/results; of two studies of one name the
            one under the earlier root is shown.
        captions: <figure>.rst with the caption of each figure.
        out: where the page goes; its links are relative to it.

    Raises:
        StudyError: a table of claims cannot be read.
    """
    studies = read_shown(roots)
    found = answers(studies)
    out.mkdir(parents=True, exist_ok=True)
    write_csv(out / "statements.csv", [_csv_row(answer) for answer in found])
    (out / "claims.md").write_text(claims_page(studies, out), encoding="utf-8")
    (out / "index.html").write_text(_page(studies, found, captions, out), encoding="utf-8")


def claims_page(studies: Sequence[Shown], out: Path) -> str:
    """The table of all statements in Markdown, for a file in the folder `out`."""
    found = answers(studies)
    parts = [
        "# Claims",
        "Every statement of the two papers and every question that they leave open, with what runs here say. "
        + _tally(found),
        LEGEND,
        "Written by `tailrl claims`; each line's study has the rest: its arms, intervals and figures.",
        "## In brief",
        _brief(found),
    ]
    header = ("statement", "verdict", "study", "at", "arms", "seeds", "seen", "p, Holm", "figure", "made by", "id")
    for part, own in itertools.groupby(found, key=lambda answer: answer.statement.part):
        rows = []
        for statement, claim, lines in _by_claim(own):
            anchor = f'<a id="{statement.id}"></a>' if statement else ""
            for answer in lines:
                said = anchor + _said(statement, claim) if answer is lines[0] else ""
                name = f"`{answer.line['id']}`" if answer.line else ""
                rows.append([said, f"**{answer.verdict}**", *_cells(answer, out), name])
        parts += [f"## {part}", table(header, rows)]
    return "\n\n".join(parts) + "\n"


def _brief(found: Iterable[Answer]) -> str:
    """A line for each claim of each statement: what the study that is about it says, and what all say."""
    rows = []
    for statement, claim, lines in _by_claim(found):
        own = [answer for answer in lines if answer.study and answer.study.command == answer.statement.command]
        made_by = {answer.made_by for answer in own or lines}
        rest = _counts(lines) if len(own) < len(lines) else ""
        command = f"`{made_by.pop()}`" if len(made_by) == 1 else "several"
        link = f"[{statement.id}](#{statement.id})" if statement else ""
        rows.append([_said(statement, claim), _counts(own), rest, command, link])
    return table(("statement", "the study made for it", "all studies", "made by", "id"), rows)


def _said(statement: Statement | None, claim: str) -> str:
    return " ".join([*([statement.text] if statement else []), *([f"*{words_of(claim, claim)}*"] if claim else [])])


def _counts(lines: Iterable[Answer]) -> str:
    counts = Counter(answer.verdict for answer in lines)
    return ", ".join(f"**{verdict}** ({count})" if count > 1 else f"**{verdict}**" for verdict, count in counts.items())


def _by_claim(found: Iterable[Answer]) -> Iterator[tuple[Statement | None, str, list[Answer]]]:
    """The lines of each claim of each statement: the statement with the first of its claims, the claim where the
    statement has several, and the lines."""
    for statement, own in itertools.groupby(found, key=lambda answer: answer.statement):
        first: Statement | None = statement
        for claim, lines in itertools.groupby(own, key=lambda answer: answer.claim):
            yield first, claim, list(lines)
            first = None


def _cells(answer: Answer, out: Path) -> list[str]:
    study, line = answer.study, answer.line
    made_by = f"`{answer.made_by}`" if answer.made_by else ""
    if study is None or line is None:
        return ["", "", "", "", answer.words, "", "", made_by]
    name = f"[{study.name}]({_relative(Path(line['page']), out)})" if line["page"] else study.name
    drawn = _drawn(answer)
    link = f"[{drawn.stem}]({_relative(drawn, out)})" if drawn else ""
    return [name, line["dose"], _arms(answer), line["seeds"], answer.words, _p(line), link, made_by]


def _arms(answer: Answer) -> str:
    """The arms of a line, each with what it does about the mismatch."""
    remedies = answer.study.remedies if answer.study else {}
    names = answer.line["arms"].split(", ") if answer.line else []
    return ", ".join(f"{name} ({remedies[name]})" if remedies.get(name) else name for name in names)


def _drawn(answer: Answer) -> Path | None:
    """The figure of the line's study that shows it."""
    drawn = {path.stem: path for path, _ in answer.study.figures} if answer.study else {}
    return next((drawn[stem] for stem in answer.statement.figures if stem in drawn), None)


def _csv_row(answer: Answer) -> dict[str, object]:
    statement, study, line = answer.statement, answer.study, answer.line or {}
    named = {
        "id": statement.id,
        "part": statement.part,
        "statement": statement.text,
        "verdict": answer.verdict,
        "seen": answer.words,
        "claim_id": line.get("id", ""),
    }
    rest = {name: line.get(name, "") for name in COLUMNS if name not in named}
    return {
        **named,
        "study": study.name if study else "",
        **rest,
        "made by": answer.made_by,
    }


# --- HTML ---------------------------------------------------------------------------------------------


def _page(studies: Sequence[Shown], found: Sequence[Answer], captions: Path, out: Path) -> str:
    links = [("#claims", "Claims"), *((f"#{study.name}", study.name) for study in studies)]
    tally = "".join(f"<li>{chip(verdict)} {count}</li>" for verdict, count in Counter(a.verdict for a in found).items())
    parts = [
        f"<h1>{html.escape(TITLE)}</h1>",
        "<p>Every statement of arXiv 2512.23087 (Dynamic Vocabulary Pruning) and arXiv 2605.14220 (VeXact), and every "
        "question that they leave open, beside what runs of this project say: each line is one study's. The figures of "
        "each study follow, with the command that makes them.</p>",
        navigation(links),
        '<h2 id="claims">Claims</h2>',
        f'<ul class="tally">{tally}</ul><p class="note">{html.escape(LEGEND)} The same as '
        '<a href="statements.csv">CSV</a> and as <a href="claims.md">text</a>.</p>',
        *(_claims(part, list(own)) for part, own in itertools.groupby(found, key=lambda a: a.statement.part)),
        *(_study(study, captions, out) for study in studies),
    ]
    return document(TITLE, "".join(parts))


def _claims(part: str, found: Sequence[Answer]) -> str:
    header = "".join(
        f"<th>{name}</th>" for name in ("statement", "verdict", "seen", "where", "seeds", "p, Holm", "figure")
    )
    bodies = []
    for statement, claim, lines in _by_claim(found):
        shown = SHOWN if len(lines) > SHOWN + 1 else len(lines)
        said = html.escape(statement.text) if statement else ""
        said += (f"<em>{html.escape(words_of(claim, claim))}</em>" if claim else "") + _more(lines[shown:])
        rows = []
        for index, answer in enumerate(lines):
            first = f'<td rowspan="{len(lines)}">{said}</td>' if not index else ""
            kind = ' class="rest"' if index >= shown else ""
            kind += f' data-claim="{html.escape(answer.line["id"])}"' if answer.line else ""
            rows.append(f"<tr{kind}>{first}<td>{chip(answer.verdict)}</td>{_line(answer)}</tr>")
        anchor = f' id="{statement.id}"' if statement else ""
        bodies.append(f"<tbody{anchor}>{''.join(rows)}</tbody>")
    return (
        f'<h3>{html.escape(part)}</h3><div class="wide"><table class="cards"><thead><tr>{header}</tr></thead>'
        f"{''.join(bodies)}</table></div>"
    )


def _more(rest: Sequence[Answer]) -> str:
    """What opens the lines past the first ones, with what they say: nothing where there are none."""
    if not rest:
        return ""
    said = ", ".join(f"{count} {verdict}" for verdict, count in Counter(answer.verdict for answer in rest).items())
    return f'<label class="more"><input type="checkbox"> {len(rest)} more: {html.escape(said)}</label>'


def _line(answer: Answer) -> str:
    study, line = answer.study, answer.line
    seen = html.escape(answer.words)
    if study is None or line is None:
        command = f"<code>{html.escape(answer.made_by)}</code>" if answer.made_by else ""
        # The path of a test may break, or it would push the last columns out of sight.
        return f"<td>{seen.replace('/', '/<wbr>')}</td><td>{command}</td><td></td><td></td><td></td>"
    scope = html.escape(", ".join(part for part in (line["dose"], _arms(answer)) if part))
    where = f'<a href="#{html.escape(study.name)}">{html.escape(study.name)}</a>: {scope}'
    drawn = _drawn(answer)
    link = (
        f'<a href="#figure-{html.escape(f"{study.name}-{drawn.stem}")}">{html.escape(drawn.stem)}</a>' if drawn else ""
    )
    seeds, p = html.escape(line["seeds"]), html.escape(_p(line))
    numbers = f'<td data-label="seeds">{seeds}</td>' + (f'<td data-label="p, Holm">{p}</td>' if p else "<td></td>")
    return f"<td>{seen}</td><td>{where}</td>{numbers}" + (
        f'<td data-label="figure">{link}</td>' if link else "<td></td>"
    )


def _study(study: Shown, captions: Path, out: Path) -> str:
    counts = Counter(line["verdict"] for line in study.claims if line["arms"])
    chips = " ".join(f"{chip(verdict)} {count}" for verdict, count in counts.items())
    whole = f' · <a href="{html.escape(_relative(study.page, out))}">all of it</a>' if study.page else ""
    drawn = [
        Drawing(path, _caption(captions, path), tuple(_relative(table, out) for table in tables))
        for path, tables in study.figures
    ]
    return (
        f'<h2 id="{html.escape(study.name)}">{html.escape(study.name)}</h2>'
        f'<p class="note">Made by <code>{html.escape(study.command)}</code>{whole}</p><p>{chips}</p>'
        + "".join(figure(drawing, f"{study.name}-") for drawing in drawn)
        + "".join(_table(path) for path in study.tables)
        + _lines(study)
    )


def _table(path: Path) -> str:
    """A table of an ablation, or of studies side by side."""
    text = read_text(path)
    title = text.partition("\n")[0].lstrip("# ")
    return f"<details><summary>{html.escape(title)}: the table</summary>{fragment(text)}</details>"


def _lines(study: Shown) -> str:
    """Every claim that the study speaks to."""
    rows = [
        f"<tr><td>{html.escape(line['claim'])}</td><td>{chip(line['verdict'])}</td><td>{html.escape(line['seen'])}</td>"
        f"<td>{html.escape(line['arms'])}</td><td>{html.escape(_p(line))}</td>"
        f"<td><code>{html.escape(line['id'])}</code></td></tr>"
        for line in study.claims
        if line["arms"]
    ]
    header = "".join(f"<th>{name}</th>" for name in ("claim", "verdict", "seen", "arms", "p, Holm", "id"))
    return (
        f'<details><summary>What it says of each claim</summary><div class="wide"><table class="cards"><thead><tr>'
        f"{header}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def _caption(captions: Path, drawn: Path) -> str:
    ablation = drawn.stem != "across" and drawn.with_name(f"{drawn.stem}_claims.csv").is_file()
    path = captions / ("ablation.rst" if ablation else f"{drawn.stem}.rst")
    return " ".join(path.read_text(encoding="utf-8").split()) if path.is_file() else ""


def _relative(path: Path, out: Path) -> str:
    return Path(os.path.relpath(path, out)).as_posix()


def _p(line: dict[str, str]) -> str:
    return p_value(float(line["p_holm"])) if line["p_holm"] else ""


def _tally(found: Sequence[Answer]) -> str:
    """How many statements have at least one line of each verdict."""
    counts = Counter(verdict for _, verdict in dict.fromkeys((a.statement.id, a.verdict) for a in found))
    said = ", ".join(f"{verdict} for {count}" for verdict, count in counts.most_common())
    return f"Of {len({answer.statement for answer in found})} statements some line says: {said}."

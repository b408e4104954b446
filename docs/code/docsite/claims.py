"""The claims in brief, as a table which docs/assets/filters.js filters by paper, cause and verdict."""

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from docsite.markdown import filtered, plain, table
from tailrl.claims.catalogue import words_of
from tailrl.reports.overview.all_studies import links
from tailrl.reports.overview.evidence import Answer, made_for, read_answers

CAUSES = {
    "matched control": "matched control: no mismatch",
    "weights rounded": "rounded weights",
    "steps ago": "stale weights",
    "floor": "tail floor",
    "noise": "noise on logits",
    "bias": "bias of tokens",
    "error of each token": "bias of tokens",
    "no mismatch": "none",
    "exact in float32, undisturbed": "none",
    "times its start": "several, for alarms",
    "exact in": "none",
    "vllm in": "engine arithmetic",
    "transformers in": "engine arithmetic",
}
"""What made the mismatch of a line, by words of its dose; the first that fit count."""

NO_RUN = "no run"
PAPERS = {"2512.23087": "DVP", "2605.14220": "VeXact"}
LEGEND = re.compile(r"^Reproduced: a one-sided test.*?$", re.MULTILINE)
BRIEF = re.compile(r"^## In brief$.*", re.MULTILINE | re.DOTALL)
HEADER = ("statement", "paper", "cause", "verdict", "lines", "seen", "study")

INTRO = """## In brief

A row has the lines of the study made for the statement; where there is none, those of all studies. Cause: what made
the mismatch.

"""


def with_table(text: str, root: Path) -> str:
    """The page of claims with the table in place of its own brief one, and its long legend folded."""
    folded = '<details markdown="1">\n<summary>What the verdicts mean</summary>\n\n{}\n\n</details>'
    text = LEGEND.sub(lambda found: folded.format(found[0]), text, count=1)
    shown = filtered(claims_table(root / "docs"), "claims", "statements", HEADER[1:4])
    return BRIEF.sub(lambda _: f"{INTRO}{shown}\n", text, count=1)


def claims_table(docs: Path) -> str:
    """A row for each statement, claim, cause and verdict, by the published results."""
    rows, named = [], set[str]()
    found = read_answers([docs / "results"])[1]
    for _, of_claim in itertools.groupby(found, key=lambda answer: (answer.statement.id, answer.claim)):
        every = list(of_claim)
        lines = made_for(every) or every
        for key in dict.fromkeys((cause(line), line.verdict) for line in lines):
            statement = lines[0].statement.id
            anchor = "" if statement in named else f'<a id="{statement}"></a>'
            anchor += f'<span data-entry="{statement}"></span>'  # filters.js counts these
            named.add(statement)
            rows.append(_row([line for line in lines if (cause(line), line.verdict) == key], anchor, docs))
    return table(HEADER, rows)


def cause(answer: Answer) -> str:
    """What made the mismatch of a line.

    Raises:
        ValueError: CAUSES has no words for the line's dose.
    """
    if answer.line is None:
        return NO_RUN
    dose = answer.line.dose
    if not dose:  # of an alarm that no run can judge
        return CAUSES["times its start"]
    for words, named in CAUSES.items():
        if words in dose:
            return named
    raise ValueError(f"docs/code/docsite/claims.py: CAUSES has no words for the dose {dose!r}")


def _row(lines: Sequence[Answer], anchor: str, docs: Path) -> tuple[str, ...]:
    first = lines[0]
    paper = next((name for number, name in PAPERS.items() if number in first.statement.part), "open question")
    text = plain(first.statement.text) + (f" *{plain(words_of(first.claim, first.claim))}*" if first.claim else "")
    seen = plain(first.words) + (", and others" if len(lines) > 1 else "")
    return (anchor + text, paper, cause(first), first.verdict, str(len(lines)), seen, links(lines, docs))
